"""Plans that learn on real ranks: all change together or none does, and no value changes."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fsdp_compile import fully_shard
from fsdp_compile.learning import graphs, install, trial
from fsdp_compile.learning.meeting import Meeting
from fsdp_compile.learning.replan import replanned
from fsdp_compile.passes import agreement, inductor
from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.plan.safe import by_block
from fsdp_compile.passes.plan.schedule import alternating

from .ranks import Ranks

LINK = "custom:1e-5,1e9"
SOON = graphs.Schedule(first=2, records=1, meet=1, poll=2, block=2, trial=0.0, every=6)


class _AtOnce:
    """In place of a copy of the process: does the work before anything else."""

    def __init__(self, work: Callable[[], str]) -> None:
        self.status, self.result = "ready", ""
        try:
            self.result = work()
        except RuntimeError:
            self.status = "failed"

    def stop(self) -> None:
        """Nothing is left to end."""


def _block() -> nn.Module:
    """Forward and backward are matrix products alone: no kernel to build."""
    return nn.Sequential(nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False))


@contextmanager
def _soon() -> Iterator[None]:
    """Everything happens within few calls, from nothing learned on; other plans than the one that runs are worth it."""
    before, graphs.schedule = graphs.schedule, SOON
    beside, graphs._start_child = graphs._start_child, _AtOnce  # type: ignore[assignment]  # it is used alike
    install.learned.clear()
    torch._dynamo.reset()
    try:
        yield
    finally:
        graphs.schedule, graphs._start_child = before, beside
        for key in install.learned:
            agreement.forget(f"learning/{key}")
        install.learned.clear()
        torch._dynamo.reset()


@contextmanager
def _asking_for(plan_of: Any, seconds: tuple[float, float] = (2.0, 1.0)) -> Iterator[None]:
    """Recorded prices ask for this plan of each graph."""

    def forced(known: Any, records: Any, budget: Any = None, is_lean: bool = False) -> Any:
        found = replanned(known, records, budget, is_lean)
        plans = {name: plan_of(each.workload) for name, each in known.items()}
        return found._replace(plans=plans, seconds=seconds)

    before, graphs.replanned = graphs.replanned, forced  # type: ignore[assignment]  # another function of ours
    try:
        yield
    finally:
        graphs.replanned = before


def _train(rank: int, steps: int, plain: bool = False, **options: Any) -> list[Tensor]:
    """Losses of all steps, then parameters."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(*(_block() for _ in range(3))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    chosen: Any = {} if plain else {"backend": "fsdp_compile", "options": {"link": LINK, **options}}
    run = torch.compile(model, fullgraph=True, **chosen)
    losses = []
    for number in range(steps):
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * number + rank))
        loss = run(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(param.full_tensor().detach().clone() for param in model.parameters())]


def _learned() -> graphs.Learning:
    (found,) = install.learned.values()
    return found


def _change(rank: int, plain: bool) -> tuple[list[str], int]:
    """The same training with and without learning; what was done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_COMPILE_LINK", LINK)
        with _soon():
            expected = _train(rank, 64, plain)
            assert not install.learned
        patch.setenv("FSDP_COMPILE_LEARN", "1")
        inductor.install()
        install.install()
        with _soon(), _asking_for(by_block):
            found = _train(rank, 64, plain, learn=True)
            assert all(map(torch.equal, expected, found))
            (graph,) = _learned().graphs
            plans = [plan for plan in graph._runs if plan]
            assert len(plans) == 1 and Plan.parse(plans[0].partition("backward:\n")[2]) == by_block(
                graph.noted("")["backward"].workload  # type: ignore[index]  # it has run
            )
            history = _learned().history
    inductor.install()
    install.install()
    return [line.rpartition(", ")[2] for line in history], len(graph._runs)


@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_values_are_equal_while_plans_change(two: Ranks, plain: bool) -> None:
    """Losses of 64 steps of AdamW and the parameters after them are equal bit for bit to those without learning, while
    a step is recorded, another plan takes turns with the first one, and is kept or taken back on both ranks alike.
    """
    (one, count), (other, _) = two.run(_change, plain)
    assert one == other and one[0] in ("kept", "taken back") and count == 2


def _cannot(rank: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, _soon(), _asking_for(by_block):
        if rank == 1:
            compile_again = graphs.LearnedGraph._compile_again

            def fail(graph: Any, plan: str) -> Any:
                raise RuntimeError("no memory") if plan else compile_again(graph, plan)

            patch.setattr(graphs.LearnedGraph, "_compile_again", fail)
        _train(rank, 12, learn=True)
        assert _learned().in_force == "" and _learned()._trial is None
        return _learned().history


def test_a_rank_that_cannot_compile(two: Ranks) -> None:
    """Nobody follows a plan that one rank could not compile, and it is not tried again."""
    one, other = two.run(_cannot)
    assert one == other and one[0].endswith("a rank could not compile it")


def _again(rank: int) -> tuple[list[str], str]:
    """A second start in the same process: what the first one has kept counts from the first call on."""
    with pytest.MonkeyPatch.context() as patch, _soon(), _asking_for(by_block):
        patch.setattr(trial, "PAYS", math.inf)  # any new plan is taken
        _train(rank, 20, learn=True, link="auto")
        learning, kept = _learned(), _learned().in_force
        assert kept
    dist.barrier()  # both have forgotten it
    learning._keep_result()
    with _soon():
        asked, compiled = list[Any](), counters["inductor"]["fxgraph_cache_miss"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inductor, "measured_link", lambda *given: asked.append(given))
            _train(rank, 4, learn=True, link="auto")
        (graph,) = _learned().graphs
        assert not asked and list(graph._runs) == [kept] and counters["inductor"]["fxgraph_cache_miss"] == compiled
        return _learned().history, kept


@pytest.mark.nightly
def test_a_second_start_begins_with_what_was_learned(two: Ranks) -> None:
    """It measures nothing and compiles nothing twice; both ranks begin with the same plan."""
    (one, kept), (other, same) = two.run(_again)
    assert kept == same and one == other and one[-1] == "kept for this run"


def _late(rank: int) -> tuple[str | None, str | None, float]:
    board = Meeting("late")
    together = board.meet("a", str(rank), "+".join, 30.0)
    if rank == 1:
        time.sleep(1.5)
    begin = time.monotonic()
    return together, board.meet("b", str(rank), "+".join, 0.5), time.monotonic() - begin


def test_a_rank_that_comes_too_late(two: Ranks) -> None:
    """All ranks read one answer; if one is late, none has an answer, and nobody waits for longer than it says."""
    (one, *after, waited), (other, *late, _) = two.run(_late)
    assert one == other == "0+1" and after == late == [None] and waited < 5


def _ends(rank: int) -> tuple[list[str], float]:
    with pytest.MonkeyPatch.context() as patch, _soon(), _asking_for(alternating):
        patch.setattr(graphs, "PATIENCE", 0.5)
        if rank == 1:  # calls graphs as often, but counts one more
            begin = graphs.Learning.begin_call

            def ahead(learning: Any, graph: Any) -> Any:
                learning.calls += learning.calls == 0
                return begin(learning, graph)

            patch.setattr(graphs.Learning, "begin_call", ahead)
        started = time.monotonic()
        _train(rank, 12, learn=True)
        return _learned().history, time.monotonic() - started


@pytest.mark.nightly
def test_ranks_that_do_not_call_alike(two: Ranks) -> None:
    """Ranks that count calls otherwise give up, once, with the plan that they have, and train on."""
    for history, _ in two.run(_ends):
        assert len(history) == 1 and "ends, as a rank has not come" in history[0]


def _off(rank: int) -> None:
    with _soon():
        _train(rank, 4)
        assert not install.learned
        _train(rank, 4, learn=True, plan=None, record_profile=True)
        assert not install.learned  # what somebody else times is left alone


@pytest.mark.nightly
def test_without_learning_nothing_is_there(two: Ranks) -> None:
    """By default no graph is wrapped, counted or compiled in another way."""
    two.run(_off)
