"""What a step gathers for the next one's forward: taken if nothing has changed on any rank, else gathered anew."""

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import MODELS, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from weights import Block, D, Float8Block

from fsdp_compile import ModuleWrapPolicy, compile_step, fully_shard, summon_full_params
from fsdp_compile.comm import collectives, groups
from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.collectives import start_asking_ranks
from fsdp_compile.comm.direct import PrefetchedGather
from fsdp_compile.comm.groups import host_group
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager import next_forward

from .ranks import Ranks, on_ranks
from .test_compile_step import CLIP, adamw, batch, loss_of
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
    def edit_locally() -> None:  # one rank of two, and of what it stores itself
        if rank % 2 == 1:
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


SHARDINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "two_stages": {"reshard_after_forward": 2, "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
}
PREFETCHED = {"plain": torch.float32, "hybrid": torch.float32}  # in which dtype; else bfloat16


@contextmanager
def recorded() -> Iterator[Gathers]:
    """Every all-gather that is prefetched in this block; second stages come after all first ones."""
    next_forward.PrefetchedGather = gathers = Gathers()  # type: ignore[misc,assignment]
    try:
        yield gathers
    finally:
        next_forward.PrefetchedGather = PrefetchedGather  # type: ignore[misc]  # put back


def _trained(
    build: Callable[[], nn.Module], backend: str, options: dict[str, Any]
) -> tuple[list[nn.Module], list[Any]]:
    """Two equal models and what steps them: with prefetched all-gathers, and without.

    backend: of `torch.compile`; "eager": nothing is compiled; "blocks": each block is, by itself.
    """
    models, steps = [], []
    for prefetch in (2, 0):
        torch.manual_seed(0)
        model = fully_shard(build(), **options)
        for block in model.blocks if backend == "blocks" else ():
            block.compile(backend="aot_eager")
        in_parts = backend in ("eager", "blocks")
        compiler = "aot_eager" if in_parts else backend
        accumulate = 2 if in_parts else 1  # compiled, it would be a second program
        step = compile_step(model, adamw(model), loss_of, CLIP, accumulate, backend=compiler, prefetch=prefetch)
        step._run = model if in_parts else step._run
        models.append(model)
        steps.append(step)
    return models, steps


def _compare(rank: int, backend: str, name: str) -> None:
    options = dict(SHARDINGS[name])
    if name == "hybrid":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    models, steps = _trained(CASE.build, backend, options)
    happenings = [_between(model, rank) for model in models]
    expected = None
    with recorded() as gathers:
        for number, happening in enumerate([*happenings[0], "nothing"]):
            inputs, target = batch(CASE, number, 2)
            losses = [step(inputs, target=target) for step in steps]
            assert torch.equal(*losses)
            assert_bitwise(*models, f"before {happening}")
            seen = gathers.taken()
            assert seen == ([] if expected is None else [expected] * 2), (happening, seen)
            assert {each.dtype for each in gathers.made} == {PREFETCHED.get(name, torch.bfloat16)}
            for each in happenings:
                happen, expected = each[happening]
                happen()


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("aot_eager", "bf16"),
        ("eager", "bf16"),
        pytest.param("aot_eager", "plain", marks=LATE),
        pytest.param("blocks", "plain", marks=LATE),
        pytest.param("inductor", "plain", marks=LATE),
        pytest.param("inductor", "bf16", marks=LATE),
    ],
)
def test_taken_or_started_anew(two: Ranks, backend: str, name: str) -> None:
    """A forward takes both, cast to the dtype that it computes in, unless parameters were changed, loaded or replaced
    since, be it on one rank alone; either way parameters are, bit for bit, those of steps that prefetch nothing."""
    two.run(_compare, backend, name)


@LATE
def test_on_three_ranks(three: Ranks) -> None:
    """So it does on three ranks, of which one edits."""
    three.run(_compare, "aot_eager", "bf16")


@LATE
@pytest.mark.parametrize("backend", ["aot_eager", "eager", "inductor"])
@pytest.mark.parametrize("name", ["two_stages", "hybrid"])
def test_in_groups_of_ranks(four: Ranks, backend: str, name: str) -> None:
    """So it does on four ranks that gather in two stages, or that store two copies."""
    four.run(_compare, backend, name)


@LATE
@on_ranks(2)
def test_another_dtype() -> None:
    """A forward that computes in another dtype than the one before gathers for itself; the next one takes again."""
    with mock.patch.dict(os.environ, {"FSDP_COMPILE_FULL_PREC_IN_EVAL": "1"}):
        models, steps = _trained(CASE.build, "aot_eager", SHARDINGS["bf16"])
    low, full = torch.bfloat16, torch.float32
    with recorded() as gathers:
        for number, (trains, started) in enumerate(
            [(True, low), (True, low), (False, full), (False, full), (True, low)]
        ):
            for model in models:
                model.train(trains)
            inputs, target = batch(CASE, number, 2)
            assert torch.equal(*[step(inputs, target=target) for step in steps])
            assert_bitwise(*models, f"step {number}")
            assert [each.dtype for each in gathers.made[-2:]] == [started] * 2
    assert [each.is_taken for each in gathers.made] == [
        True,
        True,
        False,
        False,
        True,
        True,
        False,
        False,
        False,
        False,
    ]


class Blocks(nn.Module):
    """Two blocks that compute with weights of their own making."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float()


@LATE
@on_ranks(2)
def test_smaller_gathers(rank: int) -> None:
    """Weights that autocast casts are prefetched cast; those that a forward scales on the shard are not prefetched."""
    for make, is_taken in ((partial(Block, norm=False), [True] * 4), (Float8Block, [])):
        models, steps = _trained(lambda make=make: Blocks(make), "inductor", {})
        with recorded() as gathers:
            for number in range(3):
                inputs = torch.randn(4, D, generator=seeded(10 * number + rank))
                with torch.autocast("cpu", torch.bfloat16):
                    assert torch.equal(*[step(inputs, target=inputs) for step in steps])
                assert_bitwise(*models, f"{make}, step {number}")
        assert all(each.dtype == torch.bfloat16 for each in gathers.made)
        assert [each.is_taken for each in gathers.made[:-2]] == is_taken


class Reversed(nn.Module):
    """Three layers, of which the last one to run is the first one of `modules()`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@pytest.mark.parametrize("prefetch", [2, 0])
@pytest.mark.parametrize("compiled", [True, False])
@on_ranks(2)
def test_in_the_order_of_the_forward(compiled: bool, prefetch: int) -> None:
    """Units are gathered for the next forward, which takes them, in the order in which the forward gathers them,
    whatever that of `modules()` is; without a plan the first two are."""
    model = fully_shard(Reversed(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    step = compile_step(model, adamw(model), loss_of, backend="aot_eager", prefetch=prefetch)
    step._run = step._run if compiled else model
    expected = [layer._fsdp.units[0] for layer in reversed(model.layers)]
    begun: list[Unit] = []
    start = step._next_forward.start
    step._next_forward.start = lambda unit: [begun.append(unit), start(unit)]  # type: ignore[method-assign]
    with recorded() as gathers:
        for _ in range(2):
            begun.clear()
            step(torch.ones(4, D), target=torch.ones(4, D))
            assert begun == [each.unit for each in step._next_forward._started] == expected[:prefetch]
    assert [each.is_taken for each in gathers.made] == [True] * prefetch + [False] * prefetch


def _raise(*_: Tensor) -> None:
    raise ValueError("the forward fails")


@on_ranks(2)
def test_freed() -> None:
    """A unit's gradients are freed before it is gathered for the next forward; a forward that fails frees what was
    prefetched for it; nothing is prefetched if that is not wanted."""
    model = shard(CASE)
    step = compile_step(model, adamw(model), loss_of, backend="aot_eager")
    inputs, target = batch(CASE, 0)
    gradients: list[list[bool]] = []
    start = step._next_forward.start

    def recording(unit: Unit) -> None:
        gradients[-1].append(any(param.grad is not None for param in unit.params))
        start(unit)

    step._next_forward.start = recording  # type: ignore[method-assign]  # records, then starts
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
    end = time.monotonic() + 10  # gloo's thread lets go of a buffer just after a wait for it has returned
    while any(each() is not None for each in started):
        assert time.monotonic() < end
    without = compile_step(model, adamw(model), loss_of, prefetch=0, backend="aot_eager")
    without(inputs, target=target)
    assert without._next_forward._started == []
    with pytest.raises(ValueError, match="prefetch must be a number of units, at least 0, or 'auto', not -1"):
        compile_step(model, without.optimizer, prefetch=-1)


def _train_in(group: dist.ProcessGroup | None) -> None:
    """All-gathers are prefetched if ranks can compare in `group`, and compared there."""
    models, steps = _trained(CASE.build, "aot_eager", {})
    compared: list[str] = []
    asking = mock.patch.object(
        collectives, "start_asking_ranks", lambda *args: compared.append(args[1]) or start_asking_ranks(*args)
    )
    with asking, recorded() as gathers:
        for number in range(3):
            inputs, target = batch(CASE, number, 2)
            assert torch.equal(*[step(inputs, target=target) for step in steps])
            assert_bitwise(*models, f"step {number}")
    assert gathers.taken() == ([] if group is None else [True] * 4)
    assert compared == ([] if group is None else [group.group_name] * 2)


@on_ranks(2)
def test_group_of_another_device(rank: int) -> None:
    """Where a group does not send tensors on the CPU, as NCCL's, ranks compare in a group of gloo that is made once and
    goes with the other one; without gloo nothing is prefetched."""
    group = dist.new_group(backend="cuda:gloo")
    assert host_group(group, may_make=False) is None
    beside = host_group(group, may_make=True)
    assert beside is host_group(group, may_make=False) is not group
    assert beside.group_name != group.group_name and beside.size() == group.size()
    holds = [start_asking_ranks(each, beside.group_name, torch.device("cpu")) for each in (True, rank == 0)]
    assert [each() for each in holds] == [True, False]
    assert host_group(dist.group.WORLD, may_make=True) is dist.group.WORLD
    name, beside = beside.group_name, None
    dist.destroy_process_group(group)
    del group
    gc.collect()
    with pytest.raises(RuntimeError, match="destroyed"):
        group_named(name)
    with mock.patch.object(groups, "backends", lambda group: {"cuda": "nccl"}):  # and gloo, which sends the parameters
        with mock.patch.object(dist, "is_gloo_available", lambda: False):
            _train_in(None)
        _train_in(host_group(dist.group.WORLD, may_make=True))
