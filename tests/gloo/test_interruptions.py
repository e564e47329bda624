"""Whatever is raised within a step, and wherever, the next step is right."""

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interruptions import interrupted
from models import MODELS
from torch import Tensor
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

import fsdp_compile

from .ranks import Ranks
from .training import backward, build, local, mine

MLP = MODELS["mlp"]
BF16 = MixedPrecision(torch.bfloat16, torch.float32)


def _step(model: Any, seed: int) -> None:
    backward(model, MLP, mine(MLP, seed))


def _accumulate(model: Any, seed: int) -> None:
    with model.no_sync():
        backward(model, MLP, mine(MLP, seed + 10))
    backward(model, MLP, mine(MLP, seed))


def _summon(model: Any, seed: int) -> None:
    with fsdp_compile.summon_full_params(model, with_grads=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0)
    backward(model, MLP, mine(MLP, seed))


OPTIONS: dict[str, tuple[dict[str, Any], Callable[[Any, int], None]]] = {
    "FULL_SHARD": ({}, _step),
    "SHARD_GRAD_OP": ({"reshard_after_forward": False}, _step),
    "NO_SHARD": ({"sharding_strategy": ShardingStrategy.NO_SHARD}, _step),
    "prefetch": ({"forward_prefetch": True}, _step),
    "bf16": ({"mixed_precision": BF16}, _step),
    "accumulation": ({}, _accumulate),
    "summon": ({}, _summon),
}


def _grads_of(model: Any, step: Callable[[Any, int], None], seed: int) -> list[Tensor | None]:
    model.zero_grad()
    step(model, seed)
    return [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]


def _interrupt(rank: int, name: str, number: int) -> None:
    options, step = OPTIONS[name]
    model = fsdp_compile.fully_shard(build(MLP), **options)
    _grads_of(model, step, 0)
    expected = _grads_of(model, step, 2)
    calls = interrupted(lambda: _grads_of(model, step, 1), at=-1)
    for at in random.Random(0).sample(range(1, calls + 1), min(number, calls)):
        model = fsdp_compile.fully_shard(build(MLP), **options)
        _grads_of(model, step, 0)
        try:
            interrupted(lambda: _grads_of(model, step, 1), at)  # noqa: B023
        except RuntimeError:  # autograd's, of an interruption in a hook
            sys.setprofile(None)
        for found, clean in zip(_grads_of(model, step, 2), expected, strict=True):
            same = (found is None and clean is None) or torch.equal(found, clean)  # type: ignore[arg-type]
            assert same, f"{name}, call {at} of {calls}"


@pytest.mark.parametrize("number", [12, pytest.param(300, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_step_after_an_interruption(two: Ranks, name: str, number: int) -> None:
    """An exception at any call of the package in forward, backward or a summon leaves a model whose next step is that
    of a clean one, bit for bit."""
    two.run(_interrupt, name, number)
