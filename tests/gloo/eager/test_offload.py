"""Shards and gradients in host memory. On a CPU the copies are the identity, so the numbers must be, too."""

from typing import Any

import pytest
import torch
from models import MLP
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision

from ..ranks import Ranks, on_ranks
from ..training import OPTIMIZERS, assert_bitwise, backward, mine, shard

OFFLOAD = CPUOffload(offload_params=True)


def _assert_on_cpu(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        assert param.device.type == "cpu", name
        assert param.grad is None or param.grad.device.type == "cpu", name


def _train(rank: int, strategy: str, low_precision: bool) -> None:
    options: dict[str, Any] = {"devices_per_node": 2} if "HYBRID" in strategy else {}
    options |= {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)} if low_precision else {}
    plain, offloaded = shard(MLP, strategy, **options), shard(MLP, strategy, cpu_offload=OFFLOAD, **options)
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in (plain, offloaded)]
    for seed in range(4):
        for model, optimizer in zip((plain, offloaded), optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, MLP, mine(MLP, seed))
        assert_bitwise(offloaded, plain, f"gradients {seed}")
        _assert_on_cpu(offloaded)
        for optimizer in optimizers:
            optimizer.step()
        assert_bitwise(offloaded, plain, f"step {seed}")


@pytest.mark.parametrize("low_precision", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_trains_as_without(two: Ranks, four: Ranks, strategy: str, low_precision: bool) -> None:
    """Offloading changes where shards and gradients are, and no bit of them; it needs no accelerator.

    With copies on two nodes too. E-OFF-1, E-OFF-3, E-OFF-4.
    """
    (four if "HYBRID" in strategy else two).run(_train, strategy, low_precision)


@on_ranks(2)
def test_no_stale_gradients() -> None:
    """A unit that had no part in this backward has no gradient, whatever it had before (E-OFF-8, E-FIN-6)."""
    model = shard(MLP, cpu_offload=OFFLOAD)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    backward(model, MLP, mine(MLP, 1))
    optimizer.step()
    optimizer.zero_grad()
    model.blocks[1].forward = lambda x: x  # not used from here on
    backward(model, MLP, mine(MLP, 2))
    assert all(param.grad is None for param in model.blocks[1].parameters()), "a gradient of an earlier backward"
    assert all(param.grad is not None for param in model.blocks[0].parameters())
