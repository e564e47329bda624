"""The handle of a unit's unsharded parameters: its declared states, and the roads to a gather and to a reduce."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import Residual, mlp
from refusing import units
from tiers import all_strategies
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_compile
from fsdp_compile import ShardingStrategy, fully_shard
from fsdp_compile.core._torch import set_version_counters
from fsdp_compile.eager import streams
from fsdp_compile.eager.forward_pass import ForwardPass
from fsdp_compile.eager.unsharded import TRANSITIONS, State, UnshardedUnit

_PACKAGE = str(Path(fsdp_compile.__file__).parent)
_enter = UnshardedUnit.enter


@contextmanager
def _noted() -> Iterator[set[tuple[State, State]]]:
    """All changes of state of all handles within the block."""
    seen: set[tuple[State, State]] = set()

    def enter(gathered: UnshardedUnit, state: State) -> None:
        before = gathered.state
        _enter(gathered, state)
        seen.add((before, state))

    with mock.patch.object(UnshardedUnit, "enter", enter):
        yield seen


def _blocks() -> Any:
    return fully_shard(nn.Sequential(Residual(7, 9), Residual(7, 9), nn.Linear(7, 2)), auto_wrap_policy={Residual})


def _loss(model: nn.Module) -> Tensor:
    return model(torch.randn(3, 7)).square().mean()


def _trains() -> None:
    _loss(_blocks()).backward()


def _gathers_for_nothing() -> None:
    model = _blocks()
    model[0].unshard()
    model[0].reshard()


class _TwoParts(nn.Module):
    """A unit whose two outputs have nothing in common but the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


def _runs_parts_backward_one_by_one() -> None:
    one, other = fully_shard(_TwoParts())(torch.randn(3, 7))
    one.sum().backward()
    other.sum().backward()


def _uses_both_parts() -> None:
    one, other = fully_shard(_TwoParts())(torch.randn(3, 7))
    (one.sum() + other.sum()).backward()


class _Box:
    """An output that torch's containers do not know."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class _Boxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, _Box]:
        return self.up(x), _Box(self.up(x))


def _returns_what_cannot_be_seen() -> None:
    seen, unseen = fully_shard(nn.Sequential(_Boxing()), auto_wrap_policy={_Boxing})[0](torch.randn(3, 7))
    unseen.value.sum().backward()
    del seen


def _recomputed(model: nn.Module, x: Tensor, reentrant: bool = False) -> Tensor:
    return checkpoint(lambda x: model(x).sin(), x, use_reentrant=reentrant)


def _recomputes() -> None:
    model, x = _blocks(), torch.randn(3, 7, requires_grad=True)
    _recomputed(model[0], x).sum().backward()
    _recomputed(model[1], _recomputed(model[0], x)).sum().backward()
    around = checkpoint(lambda x: _recomputed(model[0], x).sin(), x, use_reentrant=True)
    (around.sum() + model[0](x).sum()).backward()


def _recomputes_what_gets_no_gradient() -> None:
    model, x, kept = _blocks(), torch.randn(3, 7, requires_grad=True), list[Tensor]()

    def run(x: Tensor) -> Tensor:
        kept.append(model[0](x))
        return (kept[-1].detach() * x).sin()

    for follow in (lambda hidden: hidden, model[1]):
        loss = follow(checkpoint(run, x, use_reentrant=False)).sum()
        for _ in range(2):
            loss.backward(retain_graph=True)


class _TwoModules(nn.Module):
    """Two modules that are one unit, of which one is within two checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: _recomputed(self.other, x).sin(), self.one(x), use_reentrant=True)


def _recomputes_in_a_pass_within() -> None:
    model = _TwoModules()
    fully_shard([model.one, model.other])
    fully_shard(model)
    model(torch.randn(3, 7)).sum().backward()


def _fails_in_a_recomputed_forward() -> None:
    model, x = _blocks(), torch.randn(3, 7, requires_grad=True)
    out = _recomputed(model[0], x)
    hook = model[0].up.register_forward_pre_hook(lambda *_: _raise())
    with suppress(ArithmeticError):
        out.sum().backward()
    hook.remove()


def _raise() -> None:
    raise ArithmeticError


SCENES = [
    _trains,
    _gathers_for_nothing,
    _runs_parts_backward_one_by_one,
    _uses_both_parts,
    _returns_what_cannot_be_seen,
    _recomputes,
    _recomputes_what_gets_no_gradient,
    _recomputes_in_a_pass_within,
    _fails_in_a_recomputed_forward,
]


@pytest.mark.filterwarnings("ignore:.*stay unsharded until backward")
def test_each_declared_transition_happens() -> None:
    """What `TRANSITIONS` allows is what these scenes do: no more is declared. No other happens, or it would raise."""
    with _noted() as seen:
        for scene in SCENES:
            scene()
    declared = {(now, after) for now, allowed in TRANSITIONS.items() for after in allowed}
    assert {f"{a.name} -> {b.name}" for a, b in declared - seen} == set()


@pytest.mark.parametrize(("now", "after"), [(now, after) for now in State for after in State])
def test_other_transitions_raise(now: State, after: State) -> None:
    """A transition that is not in `TRANSITIONS` raises and changes nothing."""
    model = fully_shard(nn.Linear(7, 2))
    gathered = UnshardedUnit(units(model)[0], False, ForwardPass(model._fsdp_runtime))
    gathered.state = now
    if after in TRANSITIONS[now]:
        gathered.enter(after)
        assert gathered.state is after
    else:
        with pytest.raises(AssertionError, match=f"cannot change from {now.value} to {after.value}"):
            gathered.enter(after)
        assert gathered.state is now


class _PassesOn(nn.Module):
    """Returns its input, which is computed elsewhere, beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.up(x), x


@all_strategies
def test_a_late_gradient_opens_nothing(strategy: str) -> None:
    """A unit whose gradients are there stays closed when a gradient reaches an output that it only passed on, whether
    its memory was freed or not."""
    model = nn.Sequential(nn.Linear(7, 7), _PassesOn())
    fully_shard(model, auto_wrap_policy={_PassesOn}, sharding_strategy=ShardingStrategy[strategy])
    hidden = model[0].weight.new_zeros(3, 7, requires_grad=True).sin()
    states: list[State] = []
    out, same = model[1](hidden)
    (gathered,) = units(model[1])[0].awaiting_backward
    hidden.grad_fn.register_hook(lambda *_: states.append(gathered.state))
    (out.sum() + same.sum()).backward()
    assert states == [State.ENDED]
    assert units(model[1])[0].describe_phase() == "idle"


@pytest.mark.parametrize(
    ("strategy", "of_shard", "named"),
    [
        ("FULL_SHARD", False, r"0\.down\.weight of 0 "),
        ("FULL_SHARD", True, r"0\.up\.weight or another one of 0 "),
        ("NO_SHARD", False, r"0\.up\.weight or another one of 0 "),  # plain parameters have their shard's counter
    ],
)
def test_a_change_between_forward_and_backward_is_named(strategy: str, of_shard: bool, named: str) -> None:
    """Backward raises with the parameter that was changed in place, or with the first one of a shard that was; the
    next step runs."""
    model = fully_shard(
        nn.Sequential(Residual(7, 9), nn.Linear(7, 2)),
        auto_wrap_policy={Residual}, sharding_strategy=ShardingStrategy[strategy],
    )  # fmt: skip
    loss = _loss(model)
    with torch.no_grad():
        (units(model[0])[0].flats[0].shard if of_shard else model[0].down.weight).mul_(2)
    with pytest.raises(RuntimeError, match=f"^parameter {named}.*was changed in place between forward and backward"):
        loss.backward()
    _loss(model).backward()


@pytest.mark.parametrize("follow", [torch.clone, torch.sin])
def test_a_unit_that_runs_twice_in_a_checkpoint(follow: Callable[[Tensor], Tensor]) -> None:
    """What was recomputed of both forwards reads the buffer of the second one, which stays until both have had their
    backward, whether that reached the second one's output before it recomputed or not. The first one's is freed when
    its gradients are there."""
    model, x = _blocks(), torch.randn(3, 7, requires_grad=True).sin()
    out = checkpoint(lambda x: follow(model[0](model[0](x))), x, use_reentrant=False)
    (unit,), stays = units(model[0]), list[bool]()
    buffers = [gathered.buffers[0] for gathered in unit.awaiting_backward]
    x.grad_fn.register_hook(lambda *_: stays.extend(not buffer.is_free for buffer in buffers))
    out.sum().backward()
    assert stays == [False, True]
    assert unit.describe_phase() == "idle" and all(buffer.is_free for buffer in buffers)


def test_views_of_a_buffer_share_a_counter() -> None:
    """What lets autograd refuse memory that is not there costs one counter for each buffer, however many parameters
    lie in it."""
    model, counted = _blocks(), list[int]()

    def counting(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
        counted.append(len(tensors))
        set_version_counters(tensors, versions)

    with mock.patch.object(streams, "set_version_counters", counting):
        _loss(model).backward()
    assert len(counted) >= 2 * len(units(model)) and set(counted) == {1}


def test_the_handle_stays_small() -> None:
    """It has few attributes, and the four methods that tell a unit's story are short."""
    model = _blocks()
    loss = _loss(model)
    (gathered,) = units(model[0])[0].awaiting_backward
    assert len(vars(gathered)) <= 14 and loss.requires_grad
    for name in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
        assert len(inspect.getsource(getattr(UnshardedUnit, name)).splitlines()) <= 30, name


@pytest.mark.parametrize(
    ("last", "first"),
    [("start_all_gather", ("forward", "__call__")), ("start_reduce_scatter", ("unsharded", "backward"))],
)
def test_the_road_to_a_collective(last: str, first: tuple[str, str]) -> None:
    """From a module's call to its gather, and from its backward to its reduce, few functions of the package run, in
    few files."""
    model = fully_shard(mlp())
    _loss(model).backward()
    roads: list[list[tuple[str, str]]] = []
    start = getattr(fsdp_compile.comm.collectives, last)

    def starting(*args: Any, **kwargs: Any) -> Any:
        road, frame = [], sys._getframe(1)
        while not road or road[-1] != first:
            if frame.f_code.co_filename.startswith(_PACKAGE):
                road.append((Path(frame.f_code.co_filename).stem, frame.f_code.co_name))
            frame = frame.f_back  # type: ignore[assignment]  # a module's call, or its backward, is below
        roads.append(road)
        return start(*args, **kwargs)

    with mock.patch.object(fsdp_compile.comm.collectives, last, starting):
        loss = _loss(model)
        loss.backward() if last == "start_reduce_scatter" else None
    assert len(roads) == len(units(model))
    for road in roads:
        assert len(road) <= 8 and len({file for file, _ in road}) <= 4, road
