"""Whatever is raised within a step, and wherever, the next step is right."""

import random
import sys
from typing import Any

import pytest
import torch
from interruptions import interrupted
from models import MODELS
from torch import Tensor

import fsdp_compile

from .ranks import Ranks
from .training import backward, build, local, mine

MLP = MODELS["mlp"]
OPTIONS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"reshard_after_forward": False},
    "prefetch": {"forward_prefetch": True},
}


def _step(model: Any, seed: int) -> list[Tensor | None]:
    """The loss and the gradients of a step."""
    model.zero_grad()
    loss = backward(model, MLP, mine(MLP, seed))
    return [loss, *(None if p.grad is None else local(p.grad).clone() for p in model.parameters())]


def _interrupt(rank: int, options: dict[str, Any], number: int) -> None:
    model = fsdp_compile.fully_shard(build(MLP), **options)
    _step(model, 0)
    expected = _step(model, 2)
    calls = interrupted(lambda: _step(model, 1), at=-1)
    for at in random.Random(0).sample(range(1, calls + 1), number):
        model = fsdp_compile.fully_shard(build(MLP), **options)
        _step(model, 0)
        try:
            interrupted(lambda: _step(model, 1), at)  # noqa: B023
        except RuntimeError:  # autograd's, of an interruption in a hook
            sys.setprofile(None)
        for found, clean in zip(_step(model, 2), expected, strict=True):
            same = (found is None and clean is None) or torch.equal(found, clean)  # type: ignore[arg-type]
            assert same, f"call {at} of {calls}"


@pytest.mark.parametrize("number", [20, pytest.param(500, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_step_after_an_interruption(two: Ranks, options: str, number: int) -> None:
    """An exception at any call of the package in forward or backward leaves a model whose next step is that of a clean
    one, bit for bit."""
    two.run(_interrupt, OPTIONS[options], number)
