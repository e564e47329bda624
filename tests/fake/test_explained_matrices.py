"""What Muon's matrices cost is predicted from shapes, without those ranks."""

from typing import Any

import pytest
import torch
from models import GPT, MODELS
from torch import nn

from fsdp_compile import explain_plan, fully_shard
from fsdp_compile.explain.matrices import explain_matrices
from fsdp_compile.explain.prediction import MatrixTimes


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in model.parameters() if param.dim() == 2])


def predicted(link: str) -> MatrixTimes:
    ((_, costs),) = explain_matrices(GPT, muon, fully_shard, link=link, device="h100")
    return costs


def test_prediction() -> None:
    """Bytes are two for each element that leaves its rank, and a slow link exposes more of the exchanges."""
    slow, fast = predicted("custom:1e-5,1e9"), predicted("custom:1e-6,1e12")
    assert slow.compute == fast.compute > 0 and slow.gathered > slow.compute
    assert slow.bytes == fast.bytes > 0
    assert fast.exposed < slow.exposed <= 2 * slow.exchange
    assert slow.exposed <= slow.waits <= slow.exposed + slow.compute, "the rank that computes least waits longest"
    assert [line.split()[0] for line in str(slow).splitlines()[1:]] == ["compute", "exchange", "exposed"]


def test_explain_plan() -> None:
    """A plan with Muon ends with what the matrices of its blocks compute and exchange, in the figures of above."""
    shown = MODELS["gpt"].batch(0, 2)[:1]
    given: Any = {"link": "custom:1e-5,1e9", "device": "h100"}
    plans = {name: explain_plan(GPT, shown, **given, optimizer=name) for name in ("momentum", "muon")}
    (costs,) = plans["muon"].scheduled.matrices
    text = str(plans["muon"])
    assert text.startswith(str(plans["momentum"])) and text.endswith(f"behind the step above:\n{costs}\n")
    blocks = [name for name, param in GPT().named_parameters() if name.startswith("blocks.") and param.dim() == 2]
    assert costs.owners.startswith(f"{len(blocks)} matrices on 4 ranks, ")
    with pytest.raises(ValueError, match=r"optimizer: expected one of adamw, .*, muon, .*found 'mouon'"):
        explain_plan(GPT, shown, **given, optimizer="mouon")
