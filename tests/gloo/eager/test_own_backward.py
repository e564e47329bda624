"""A forward that runs backward and the optimizer itself, as steps of frameworks do with manual optimization."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import seeded
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard

from ..ranks import on_ranks


class Trainer(nn.Module):
    """Its forward is a training step, one of `STEPS`."""

    optimizers: Any

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step
        self.first, self.second = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor | None:
        """The loss that is left to the caller, if any."""
        return STEPS[self.step](self, x)

    def add_optimizers(self) -> None:
        """One of all parameters, and one of each part."""
        of = [self.parameters(), self.first.parameters(), self.second.parameters()]
        vars(self)["optimizers"] = [torch.optim.SGD(params, lr=0.1) for params in of]

    def update(self, loss: Tensor | None, which: int = 0) -> None:
        """A step of one optimizer."""
        optimizer = self.optimizers[which]
        if loss is not None:
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()


def _loss(model: Trainer, x: Tensor) -> Tensor:
    return F.mse_loss(model.second(model.first(x)), x)


def _once(model: Trainer, x: Tensor) -> None:
    model.update(_loss(model, x))


def _clipped(model: Trainer, x: Tensor) -> None:
    _loss(model, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    model.update(None)
    model.optimizers[0].zero_grad()


def _twice(model: Trainer, x: Tensor) -> Tensor:
    """Each forward computes with the parameters of the update before it."""
    for _ in range(2):
        model.update(_loss(model, x))
    return _loss(model, x)


def _adversaries(model: Trainer, x: Tensor) -> None:
    """The second backward goes through what was computed before the first one."""
    made = model.second(x)
    model.update(model.first(made.detach()).square().mean() + model.first(x).mean(), 1)
    model.update(-model.first(made).mean(), 2)


def _retained(model: Trainer, x: Tensor) -> None:
    out = model.first(model.second(x))
    out.mean().backward(retain_graph=True)
    out.square().mean().backward()
    model.update(None)
    model.optimizers[0].zero_grad()


def _accumulated(model: Trainer, x: Tensor) -> None:
    for part in x.chunk(2):
        _loss(model, part).backward()
    model.update(None)
    model.optimizers[0].zero_grad()


def _checkpointed(model: Trainer, x: Tensor) -> None:
    hidden = checkpoint(model.first, x, use_reentrant=False)
    model.update(F.mse_loss(checkpoint(model.second, hidden, use_reentrant=False), x))


def _half(model: Trainer, x: Tensor) -> Tensor:
    """What it returns was computed before its own backward."""
    left = model.second(x).square().mean()
    model.first(x).mean().backward()
    return left


def _of_inputs(model: Trainer, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model.first(x).square().sum(), x, create_graph=True)
    model.update(grad.square().mean())


STEPS: dict[str, Callable[[Trainer, Tensor], Tensor | None]] = {
    "once": _once,
    "clipped": _clipped,
    "twice": _twice,
    "adversaries": _adversaries,
    "retained": _retained,
    "accumulated": _accumulated,
    "checkpointed": _checkpointed,
    "half": _half,
    "of_inputs": _of_inputs,
}


def _train(model: Any, call: Any) -> None:
    for step in range(2):
        left = call(torch.randn(8, 6, generator=seeded(step)))  # the same on all ranks, so that their mean is this
        if left is not None:
            model.update(left)


ROWS: dict[str, tuple[tuple[str, ...], dict[str, Any], bool]] = {
    "one unit": (("",), {}, False),
    "units within": (("first", "second", ""), {}, False),
    "no resharding": (("first", ""), {"reshard_after_forward": False}, False),
    "replicas": (("",), {"sharding_strategy": ShardingStrategy.NO_SHARD}, False),
    "compiled": (("",), {}, True),
}


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.nightly) if row == "compiled" else row for row in ROWS]
)
@on_ranks(2)
def test_forwards_that_run_backward(row: str) -> None:
    """They train as on one process: what is computed later in the same forward has the updated parameters."""
    shards, options, compiled = ROWS[row]
    for step in STEPS:
        if compiled and step in ("adversaries", "half", "of_inputs"):
            continue  # backward runs twice through one graph, or through a backward, which torch.compile cannot
        torch.manual_seed(0)
        plain = Trainer(step)
        model = copy.deepcopy(plain)
        plain.add_optimizers()
        _train(plain, plain)
        for name in shards:
            fully_shard(model.get_submodule(name), **options)
        model.add_optimizers()
        _train(model, torch.compile(model, backend="aot_eager") if compiled else model)
        for (name, param), same in zip(model.named_parameters(), plain.parameters(), strict=True):
            full = param.full_tensor()  # type: ignore[attr-defined]  # a sharded tensor
            torch.testing.assert_close(full, same, msg=lambda text, at=(step, name): f"{at}: {text}")
