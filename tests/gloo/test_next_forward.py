"""What a step gathers for the next one's forward: taken if nothing has changed on any rank, else gathered anew."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import MODELS
from torch import Tensor, nn

from fsdp_compile import compile_step, summon_full_params
from fsdp_compile.comm.prefetched import PrefetchedGather
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager import next_forward

from .ranks import Ranks
from .test_compile_step import CLIP, Loop, adamw, batch, loss_of
from .training import assert_bitwise, shard

CASE = MODELS["mlp"]
LATE = pytest.mark.nightly


class Gathers:
    """Every prefetched all-gather of this process, in order; what stands in for the class."""

    def __init__(self) -> None:
        self.made: list[PrefetchedGather] = []

    def __call__(self, *args: Any) -> PrefetchedGather:
        self.made.append(PrefetchedGather(*args))
        return self.made[-1]

    def taken(self) -> list[bool]:
        """Since the last call: for each that was started before the last two, whether a forward has taken it."""
        self.made, seen = self.made[-2:], self.made[:-2]
        return [each.is_taken for each in seen]


def _between(model: nn.Module, rank: int) -> dict[str, tuple[Callable[[], Any], bool]]:
    """What may happen between two steps, and whether what was prefetched is used then."""
    first = next(model.parameters())

    @torch.no_grad()
    def edit() -> None:
        for param in model.parameters():
            param.mul_(0.99)

    @torch.no_grad()
    def edit_locally() -> None:  # rank 1 alone, and of what it stores itself
        if rank == 1:
            model.blocks[0].up.weight.to_local().mul_(1.01)

    @torch.no_grad()
    def replace() -> None:
        first.data = first.data.clone() * 0.9

    def evaluate() -> None:
        with torch.no_grad():
            model(batch(CASE, 50)[0])

    def load() -> None:
        model.load_state_dict(model.state_dict())

    def summon() -> None:
        with summon_full_params(model), torch.no_grad():
            model.head.bias.add_(0.1)

    return {
        "nothing": (lambda: None, True),
        "edit": (edit, False),
        "edit_locally": (edit_locally, False),
        "replace": (replace, False),
        "evaluate": (evaluate, True),
        "load": (load, False),
        "summon": (summon, False),
    }


def _compare(rank: int, backend: str, tolerance: float) -> None:
    next_forward.PrefetchedGather = gathers = Gathers()  # type: ignore[misc,assignment]
    try:
        models = [shard(CASE) for _ in range(2)]
        optimizers = [adamw(model) for model in models]
        step = compile_step(models[0], optimizers[0], loss_of, CLIP, backend=backend)
        loop = Loop(models[1], optimizers[1], CLIP, 1, backend)
        happenings = [_between(model, rank) for model in models]
        expected = None
        for number, name in enumerate([*happenings[0], "nothing"]):
            inputs, target = batch(CASE, number)
            losses = step(inputs, target=target), loop(inputs, target)
            torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)
            if tolerance == 0.0:
                assert_bitwise(*models, f"before {name}")
            seen = gathers.taken()
            assert seen == ([] if expected is None else [expected] * 2), (name, seen)
            for happening in happenings:
                happen, expected = happening[name]
                happen()
    finally:
        next_forward.PrefetchedGather = PrefetchedGather  # type: ignore[misc]


@pytest.mark.parametrize(("backend", "tolerance"), [("aot_eager", 0.0), pytest.param("inductor", 1e-5, marks=LATE)])
def test_taken_or_started_anew(two: Ranks, backend: str, tolerance: float) -> None:
    """A forward takes both, unless parameters were changed, loaded or replaced since, be it on one rank alone."""
    two.run(_compare, backend, tolerance)


@LATE
def test_on_three_ranks(three: Ranks) -> None:
    """So it does on three ranks, of which one edits."""
    three.run(_compare, "aot_eager", 0.0)


def _eager(rank: int) -> None:
    """A forward that gathers by the eager runtime takes nothing; nothing is started for it a second time."""
    next_forward.PrefetchedGather = gathers = Gathers()  # type: ignore[misc,assignment]
    try:
        models = [shard(CASE) for _ in range(2)]
        for block in models[0].blocks:
            block.compile(backend="aot_eager")
        optimizers = [adamw(model) for model in models]
        step = compile_step(models[0], optimizers[0], loss_of, CLIP, backend="aot_eager")
        step._run = models[0]
        loop = Loop(models[1], optimizers[1], CLIP, 1, "eager")
        for number in range(4):
            inputs, target = batch(CASE, number)
            assert torch.equal(step(inputs, target=target), loop(inputs, target))
            assert_bitwise(*models, f"step {number}")
        assert [each.is_taken for each in gathers.made] == [False, False]
    finally:
        next_forward.PrefetchedGather = PrefetchedGather  # type: ignore[misc]


def test_not_taken(two: Ranks) -> None:
    """Where the forward does not gather from the shard as it is stored, units are prefetched once and never again."""
    two.run(_eager)


def _freed(rank: int) -> None:
    model = shard(CASE)
    step = compile_step(model, adamw(model), loss_of, backend="aot_eager")
    inputs, target = batch(CASE, 0)
    gradients: list[list[bool]] = []
    start = step._next_forward.start

    def recording(unit: Unit) -> None:
        gradients[-1].append(any(param.grad is not None for param in unit.params))
        start(unit)

    step._next_forward.start = recording  # type: ignore[method-assign]
    for _ in range(3):
        gradients.append([])
        step(inputs, target=target)
        started = [weakref.ref(each.gather._filling.full) for each in step._next_forward._started]
        assert len(started) == 2
    assert not any(gradients[-1])
    step._run = _raise
    with pytest.raises(ValueError, match="forward fails"):
        step(inputs, target=target)
    gc.collect()
    assert [each() for each in started] == [None, None]
    without = compile_step(model, adamw(model), loss_of, prefetch=0, backend="aot_eager")
    without(inputs, target=target)
    assert without._next_forward._started == []
    with pytest.raises(ValueError, match="prefetch: expected a number of units, at least 0, found -1"):
        compile_step(model, without.optimizer, prefetch=-1)


def _raise(*_: Tensor) -> None:
    raise ValueError("the forward fails")


def test_freed(two: Ranks) -> None:
    """A unit's gradients are freed before it is gathered for the next forward; a forward that fails frees what was
    prefetched for it; nothing is prefetched if that is not wanted."""
    two.run(_freed)
