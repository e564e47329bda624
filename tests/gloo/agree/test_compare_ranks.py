"""Ranks that shard different models, or the same one with other options or values, learn that at the first forward."""

import copy
import gc
import re
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Ordered
from torch import nn

from fsdp_compile import MixedPrecision, ShardingStrategy, fully_shard, summon_full_params
from fsdp_compile.comm import comparison
from fsdp_compile.comm.waits import state_of

from ..ranks import Ranks, on_ranks
from ..training import executor

X = torch.ones(2, 8)
Kind = ShardingStrategy
SUBJECT = comparison.Subject("this", "the same", "the end", "let ranks agree")


def comparisons() -> Any:
    """A patch that counts them."""
    return mock.patch.object(comparison._Round, "verdict", autospec=True, side_effect=comparison._Round.verdict)


def _model(seed: int = 0, width: int = 4, turned: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)]
    return nn.Sequential(*(reversed(layers) if turned else layers))


def _sharded(seed: int = 0, width: int = 4, turned: bool = False, **options: object) -> nn.Module:
    return fully_shard(_model(seed, width, turned), auto_wrap_policy={nn.Linear}, **options)  # type: ignore[arg-type]  # options of a row


def _ordered(*order: int) -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(Ordered(order), auto_wrap_policy={nn.Linear})


Make = Callable[[], nn.Module]
DIFFERENT: dict[str, tuple[Make, Make, str]] = {  # what rank 0 and rank 1 have, and the text of both
    "shapes": (
        lambda: _sharded(width=4),
        lambda: _sharded(turned=True),
        r"eager forward: expected the same units .* rank 0: 0 \(Linear.*\): weight \(4, 8\); rank 1: .*\(8, 4\); build",
    ),
    "units": (
        lambda: _sharded(),
        lambda: fully_shard(_model(), auto_wrap_policy=None),
        r"rank 0: 0 \(Linear, FULL_SHARD\): over 2 .*; rank 1: root \(Sequential, FULL_SHARD\): over 2",
    ),
    "strategy": (
        lambda: _sharded(),
        lambda: _sharded(sharding_strategy=Kind.NO_SHARD),
        r"rank 0: 0 \(Linear, FULL_SHARD\).*; rank 1: 0 \(Linear, NO_SHARD\)",
    ),
    "precision": (
        lambda: _sharded(),
        lambda: _sharded(mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)),
        r"rank 0: .*reduced as torch.float32; rank 1: .*reduced as torch.bfloat16",
    ),
    "wire": (
        lambda: _sharded(wire="int8"),
        lambda: _sharded(wire="fp8"),
        r"rank 0: 0 \(Linear, FULL_SHARD\): .*int8.*; rank 1: 0 \(Linear, FULL_SHARD\): .*fp8",
    ),
    "values": (
        lambda: _sharded(seed=0, sharding_strategy=Kind.NO_SHARD),
        lambda: _sharded(seed=1, sharding_strategy=Kind.NO_SHARD),
        r"rank 0: 0 \(Linear, NO_SHARD\): replicated values of .*weight, .*bias with checksums \[-?\d+\]; rank 1",
    ),
    "executor": (
        lambda: _sharded(),
        lambda: torch.compile(_sharded(), backend="aot_eager"),  # type: ignore[return-value]  # a module
        r"ranks: expected all of them to run the same program, found rank 0: eager forward \(Seq.*; rank 1: compiled ",
    ),
    "order": (
        lambda: _ordered(0, 1),
        lambda: _ordered(1, 0),
        r"order of units: .* rank 0: all-gather of layers.0 \(Linear.*\); rank 1: all-gather of layers.1 \(.*; let",
    ),
}


@on_ranks(2)
def test_ranks_that_differ(rank: int) -> None:
    """Both raise within a second, with the first unit or setting that differs and which rank has what."""
    for name, (*makes, said) in DIFFERENT.items():
        run = makes[rank]()
        dist.barrier()
        before = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            run(X)
        assert re.search(said, str(caught.value), re.DOTALL), f"{name}: {caught.value}"
        assert time.monotonic() - before < 3, name
    function = torch.compile(lambda model: model(X))  # its units are compared while it is traced
    model = fully_shard(nn.Linear(8, 8))
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"rank 0: eager forward .*; rank 1: compiled forward"),
    ):
        model(X) if rank == 0 else function(model)
    _sharded()(X).sum().backward()  # the group is as it was


@on_ranks(2)
def test_ranks_that_agree(rank: int) -> None:
    """They compare once for each root, and a forward that communicates nothing compares nothing."""
    state_of(dist.group.WORLD).forget()  # of other tests
    with comparisons() as compare:
        torch.manual_seed(rank)
        model = fully_shard(nn.Linear(8, 8))  # each rank initializes its own slice
        with summon_full_params(model), torch.no_grad():
            if rank == 0:
                model(X)
        assert not compare.call_count
        for _ in range(3):
            model(X).sum().backward()
        assert compare.call_count == 5, "expected one comparison of units, and two of forward and backward each"
        copy.deepcopy(model)(X)
        assert compare.call_count == 8

        compare.reset_mock()
        model = _sharded(sharding_strategy=Kind.NO_SHARD)
        if rank == 0:
            with torch.no_grad():
                model(X)
                executor(model, "aot_eager")(X)
        assert not compare.call_count, "expected evaluation on one rank to wait for nobody"
        with torch.no_grad():
            model[0].weight.data = torch.full((4, 8), 2.0)
        model(X).sum().backward()
        assert compare.call_count == 3, "expected one of units and values, one of backward, one of the order of reduces"


@on_ranks(2)
def test_a_rank_that_ends_within_a_comparison(rank: int) -> None:
    """A rank that comes with another text, and dies before it says which, keeps others no longer than the limit."""
    group = dist.new_group()
    if rank == 1:
        board = comparison._Round(group).board
        board.count("same/another")
        board.count("outcome/came")
    dist.barrier()
    if rank == 0:
        before = time.monotonic()
        with pytest.raises(RuntimeError, match=r"^this: expected the same on all ranks, found others; let ranks agree"):
            comparison.compare([(group, "a\nb")], 1.0, SUBJECT)
        assert time.monotonic() - before < 10
    dist.barrier()


@on_ranks(2)
def test_ranks_that_were_interrupted_in_different_places(rank: int) -> None:
    """One within a comparison, the other before it: they go on with the next one, which both begin, within seconds."""
    group = dist.new_group()
    for ahead in (0, 1):
        if rank == ahead:
            interrupted = mock.patch.object(comparison._Round, "verdict", side_effect=KeyboardInterrupt)
            with interrupted, pytest.raises(KeyboardInterrupt):
                comparison.compare([(group, "a")], 60.0, SUBJECT)
        for text in "bc":
            before = time.monotonic()
            comparison.compare([(group, text)], 60.0, SUBJECT)
            assert time.monotonic() - before < 30
        assert state_of(group).rounds == 3 * (ahead + 1)


@on_ranks(2)
def test_the_timeout_of_the_group_holds_if_it_is_shorter(rank: int) -> None:
    """A forward on one rank alone raises after the group's timeout, not only after that of comparisons (600 s)."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = fully_shard(nn.Linear(8, 8), process_group=group)
    before = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="for 3 s, while rank 0"):
            model(X)
        assert time.monotonic() - before < 20
    dist.barrier()


def _in_a_hybrid(rank: int, seeds: tuple[int, ...], width: tuple[int, ...]) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    both = (groups[rank // 2], replicas[rank % 2])
    model = _sharded(seeds[rank], width[rank], process_group=both, sharding_strategy=Kind.HYBRID_SHARD)
    before = time.monotonic()
    try:
        model(X)
    except RuntimeError as error:
        assert time.monotonic() - before < 3
        return str(error)
    return ""


def test_replicas_that_differ(four: Ranks) -> None:
    """Another model on one rank, other values in one replica: all four ranks raise. Equal ones agree."""
    assert four.run(_in_a_hybrid, (0, 0, 0, 0), (4, 4, 4, 4)) == [""] * 4
    one = four.run(_in_a_hybrid, (0, 0, 0, 0), (4, 4, 4, 5))
    assert all("rank 2: 0 (Linear" in text and "rank 3: 0 (Linear" in text for text in one), one
    other = four.run(_in_a_hybrid, (0, 0, 1, 1), (4, 4, 4, 4))
    assert all("replicated values" in text for text in other), other


@on_ranks(4)
def test_groups_that_only_some_ranks_are_in(rank: int) -> None:
    """Where ranks are in different numbers of process groups, torch would name a new group differently on each, and
    they would wait for each other: they first join as many.
    """
    before = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
    model = fully_shard(nn.Linear(4, 4, bias=False), reshard_after_forward=2)
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    for group in before:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)
    assert model.weight.grad.full_tensor().mean().item() == 2.5


@on_ranks(2)
def test_groups_come_and_go() -> None:
    """Each process group owns its state. The state ends with the group, and a new group starts with an empty one."""
    for _ in range(2):
        groups: list[dist.ProcessGroup] = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        for number, group in enumerate(groups):
            model = fully_shard(nn.Linear(8, 8), process_group=group)
            for _ in range(number + 1):
                model(X).sum().backward()
        states = [state_of(group) for group in groups]
        assert [state.rounds for state in states] == [5, 5], "one of units, two of forward and backward each"
        assert [list(state.units.values()) for state in states] == [[{"root (Linear, FULL_SHARD)"}]] * 2
        left = [weakref.ref(state) for state in states]
        for group in groups:
            dist.destroy_process_group(group)
        del model, group, groups, states
        gc.collect()
        assert not any(state() for state in left)
