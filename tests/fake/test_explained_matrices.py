"""What Muon's matrices cost is predicted from shapes, without those ranks."""

from functools import partial

import pytest
import torch
from models import GPT
from torch import nn

from fsdp_compile import fully_shard
from fsdp_compile.explain.matrices import MatrixCosts, explain_matrices


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in model.parameters() if param.dim() == 2])


def predicted(link: str) -> MatrixCosts:
    (costs,) = explain_matrices(GPT, muon, fully_shard, link=link, device="h100")
    return costs


def test_prediction() -> None:
    """Bytes are two for each element that leaves its rank, and a slow link exposes more of the exchanges."""
    slow, fast = predicted("custom:1e-5,1e9"), predicted("custom:1e-6,1e12")
    assert slow.compute == fast.compute > 0 and slow.gathered > slow.compute
    assert slow.bytes_there == fast.bytes_there > 0
    assert fast.exposed < slow.exposed <= slow.there + slow.back
    assert [line.split()[0] for line in str(slow).splitlines()[1:]] == ["compute", "to", "back", "exposed"]


def test_names_are_checked() -> None:
    """Unknown links and devices are refused by name."""
    explain = partial(explain_matrices, GPT, muon, fully_shard)
    with pytest.raises(ValueError, match="device"):
        explain(link="custom:1e-5,1e9", device="h1")
    with pytest.raises(ValueError, match="link"):
        explain(link="string", device="h100")
