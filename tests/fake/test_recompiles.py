"""Steps of any pattern make as many graphs as those of the unsharded model: nothing that the runtime counts is guarded
on."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fsdp_compile import fully_shard

STEPS = 20


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))


class _Net(nn.Module):
    """Blocks, a norm, and a head that its user calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def _inside(model: Any, x: Tensor, step: int) -> None:
    model(x).sum().backward()


def _head_outside(model: Any, x: Tensor, step: int) -> None:
    model.head(model(x)).square().sum().backward()


def _head_in_chunks(model: Any, x: Tensor, step: int) -> None:
    hidden = model(x)
    grads = []
    for chunk in hidden.detach().chunk(2):
        part = chunk.detach().requires_grad_()
        model.head(part).square().sum().backward()
        grads.append(part.grad)
    hidden.backward(torch.cat(grads))


def _toggled(model: Any, x: Tensor, step: int) -> None:
    sharded = hasattr(model, "_fsdp")
    if sharded:
        model.head.set_reshard_after_forward(False)
        model.head.set_reshard_after_backward(False)
        model.head.unshard()
    _head_in_chunks(model, x, step)
    if sharded:
        model.head.set_reshard_after_forward(True)
        model.head.set_reshard_after_backward(True)
        model.head.reshard()


def _evaluates_between(model: Any, x: Tensor, step: int) -> None:
    _inside(model, x, step)
    if step % 3 == 2:
        model.eval()
        with torch.no_grad():
            model.head(model(x))
        model.train()


def _accumulates(model: Any, x: Tensor, step: int) -> None:
    with model.no_sync() if hasattr(model, "_fsdp") and step % 2 else nullcontext():
        _head_outside(model, x, step)


def _fails_between(model: Any, x: Tensor, step: int) -> None:
    out = model.head(model(x))
    if step % 4 == 3:
        out.register_hook(lambda grad: _raise())
    with suppress(ArithmeticError):
        out.sum().backward()


def _raise() -> None:
    raise ArithmeticError


def _runs_twice(model: Any, x: Tensor, step: int) -> None:
    (model(x).sum() + model(2 * x).sum()).backward()


def _runs_backward_twice(model: Any, x: Tensor, step: int) -> None:
    loss = model.head(model(x)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


# `_toggled` has the head in chunks in it, `_evaluates_between` all inside, `_accumulates` the head outside.
PATTERNS = [_toggled, _accumulates, _fails_between, _runs_backward_twice]
AT_NIGHT = [pytest.param(each, marks=pytest.mark.nightly) for each in (_evaluates_between, _runs_twice)]


def _graphs(pattern: Callable[[Any, Tensor, int], None], shard: Callable[[Any], None], whole: bool) -> int:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = _Net()
    shard(model)
    counter = CompileCounterWithBackend("aot_eager")
    for module in [model] if whole else model.blocks:
        module.compile(backend=counter)
    for step in range(STEPS):
        pattern(model, torch.ones(4, 8), step)
        model.zero_grad()
    return counter.frame_count


def _apart(model: Any) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model.norm)
    fully_shard(model.head)
    fully_shard(model)


@pytest.mark.filterwarnings("ignore:a graph of a sharded model runs without the passes")
@pytest.mark.filterwarnings("ignore:.* has no effect on a compiled forward")
@pytest.mark.parametrize("pattern", PATTERNS + AT_NIGHT)
def test_as_many_graphs_as_unsharded(pattern: Callable[[Any, Tensor, int], None]) -> None:
    """Twenty steps, the whole model compiled, or each block by itself."""
    for whole in (True, False):
        # One that reduces, one under no_sync, and one that reduces what was accumulated with its own.
        kinds = 3 if pattern is _accumulates and whole else 1
        assert _graphs(pattern, _apart, whole) == kinds * _graphs(pattern, lambda model: None, whole)
