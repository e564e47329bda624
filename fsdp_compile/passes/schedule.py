"""The planner: where to gather, wait, free and reduce, and what to keep, so that the step is short within its memory.

Tasks compute in a fixed order and links are serial, so a plan is a choice, before each task, of what to launch.
search.py finds the best such choice for given units to keep; here it is decided which to keep, and what small units to
launch together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from statistics import median

from fsdp_compile.passes.bound import lower_bound, smallest_budget
from fsdp_compile.passes.compact import compact
from fsdp_compile.passes.plan import Plan, PlanError, Step
from fsdp_compile.passes.rules import kept_by_rule, prefetch
from fsdp_compile.passes.search import Found, search
from fsdp_compile.passes.simulate import simulate
from fsdp_compile.passes.workload import Workload

MANY = 64  # units beyond which less is tried, to plan within a second
FEW = 8  # units up to which everything is tried: all subsets to keep, all neighbours to launch together
SLACK = 2.0  # of many units, how much earlier than they have to be gathers are launched: see search
_RULES = ((1, 1, True, 2), (2, 1, False, 1), (2, 2, True, 2))  # see prefetch: one ahead, FSDP2's, two ahead
# Buffers of units beside what a plan needs at least: a little below whole and half ones, since activations differ.
_ROOMS = (5.8, 3.8, 2.8, 2.4, 1.9, 1.4, 0.9, 0.45, 0.2, 0)
_ROOMS_OF_MANY = (2.8, 1.9, 1.4, 0.9, 0.45, 0)
_MERGES = (0.0, 2.0, 8.0, 32.0)  # of many units: neighbours are launched together up to so many latencies of transfer


@dataclass(frozen=True)
class Schedule:
    """A plan and what is known about it.

    Attributes:
        plan: the plan.
        kept: names of the units whose gathered buffer stays from forward to backward.
        seconds: of the whole step, by the simulator.
        peak: bytes that live at most.
        bound: seconds below which no plan for this workload and budget can be.
        exact: whether no plan is shorter that launches gathers in the order of their first reader, reduces in the order
            in which they get ready, and no more than `merge` units together.
    """

    plan: Plan
    kept: tuple[str, ...]
    seconds: float
    peak: int
    bound: float
    exact: bool

    @property
    def gap(self) -> float:
        """How far the plan may be from the shortest one, as a part of the bound; 0: it is the shortest."""
        return self.seconds / self.bound - 1 if self.bound else 0.0


def schedule(workload: Workload, budget: int | None = None, *, merge: int = 2, width: int | None = None) -> Schedule:
    """The best plan found for `workload`.

    Args:
        workload: what the step computes.
        budget: bytes that may live at most; None: no limit.
        merge: of up to 8 units, how many one launch may gather or reduce.
        width: states that the search keeps from task to task; None: all of up to 8 units, fewer of many.

    Raises:
        PlanError: the budget is below the smallest one that has a plan; the message says which that is.
    """
    least = smallest_budget(workload)
    if budget is not None and budget < least:
        raise PlanError(f"budget: expected at least {least} bytes, which this step needs even if each unit is gathered "
                        f"when it is read and reduced when it is ready, found {budget}")  # fmt: skip
    few = len(workload.units) <= FEW
    attempts = _all(workload, budget, merge, width) if few else _some(workload, budget, merge, width)
    attempts = attempts or [lean(workload)]
    best = _compacted(workload, min(attempts, key=_rank))
    bound = lower_bound(workload, None, budget)
    exact = few and all(found.exact for found in attempts)
    names = tuple(workload.units[unit].name for unit in sorted(best.kept))
    return Schedule(best.plan, names, best.seconds, best.peak, bound, exact)


def _compacted(workload: Workload, found: Found) -> Found:
    plan = compact(workload, found.plan)
    timeline = simulate(workload, plan)
    return replace(found, plan=plan, seconds=timeline.makespan, peak=timeline.peak)


def lean(workload: Workload) -> Found:
    """The plan that needs the least memory: gather when a unit is read, reduce when it is ready, wait at once."""
    steps = []
    for unit, first, last in workload.gathers(workload.always_kept):
        name = (workload.units[unit].name,)
        steps += [(first, 2, Step("gather", name, first)), (first, 3, Step("wait", name, first))]
        steps += [(last + 1, 0, Step("free", name, last + 1))]
    for unit, _, ready in workload.reduces():
        name = (workload.units[unit].name,)
        steps += [(ready + 1, 1, Step(kind, name, ready + 1)) for kind in ("reduce", "wait_reduce")]
    plan = Plan(tuple(step for _, _, step in sorted(steps, key=lambda each: each[:2])))
    timeline = simulate(workload, plan)
    return Found(plan, workload.always_kept, timeline.makespan, timeline.peak, False)


def _all(workload: Workload, budget: int | None, merge: int, width: int | None) -> list[Found]:
    """The best plan for each choice of what to keep, unless a bound says that it is not the best of all."""
    attempts: list[Found] = []
    best = float("inf")
    for kept in _subsets(workload):
        if lower_bound(workload, kept) > best or not _fits(workload, kept, budget):
            continue
        found = search(workload, kept, budget, merge=merge, width=width, beat=best)
        if found is not None:
            attempts.append(found)
            best = min(best, found.seconds)
    return attempts


def _subsets(workload: Workload) -> Iterator[frozenset[int]]:
    for count in range(len(workload.keepable), -1, -1):
        yield from (workload.always_kept | set(chosen) for chosen in combinations(workload.keepable, count))


def _some(workload: Workload, budget: int | None, merge: int, width: int | None) -> list[Found]:
    """The best plan of some that do not depend on the budget, of those that it allows: more memory is never slower.

    For each choice of what to keep, plans are searched for within what that needs at least, and somewhat more.
    """
    width = width or max(2, 800 // len(workload.tasks))
    best = min((found for found in _by_rule(workload) if budget is None or found.peak <= budget), key=_rank)
    merges = sorted({_together(workload), 0.0}, reverse=True)
    for kept in _last_ones(workload):
        if lower_bound(workload, kept) >= best.seconds:
            continue
        for limit, together in product(_limits(workload, kept, budget), merges):
            found = search(
                workload, kept, limit,
                merge=merge, together=together, width=width, beat=best.seconds, slack=SLACK,
            )  # fmt: skip
            found = found and _compacted(workload, found)
            if found and (budget is None or found.peak <= budget):
                best = min(best, found, key=_rank)
    return [best]


def _rank(found: Found) -> tuple[float, int]:
    return found.seconds, found.peak


def _by_rule(workload: Workload) -> Iterator[Found]:
    """Plans that need no search: without any prefetch, and as other systems make them; ours is never slower."""
    yield lean(workload)
    for forward, backward, before_wait, in_flight in _RULES:
        plan = prefetch(workload, forward, backward, before_wait, in_flight)
        timeline = simulate(workload, plan)
        found = Found(plan, kept_by_rule(workload), timeline.makespan, timeline.peak, False)
        yield _compacted(workload, found)


def _limits(workload: Workload, kept: frozenset[int], budget: int | None) -> Iterator[int | None]:
    """Within what memory to search: what keeping `kept` needs, and room for some more buffers, up to the budget."""
    least = smallest_budget(workload, kept)
    typical = median(unit.gathered for unit in workload.units)
    if budget is None or least <= budget:
        yield None  # launches nothing early without need, and may fit
    for room in _ROOMS if len(workload.units) <= MANY else _ROOMS_OF_MANY:
        limit = least + int(room * typical)
        if budget is None or limit <= budget:
            yield limit


def _together(workload: Workload) -> float:
    """Up to how many seconds of transfer neighbours had better be launched together, if memory is no limit."""
    if not workload.latency:
        return 0.0
    tried = [(search(workload, workload.always_kept, None, together=merges * workload.latency, width=1, slack=SLACK),
              merges) for merges in _MERGES]  # fmt: skip
    return min((found.seconds, merges) for found, merges in tried if found is not None)[1] * workload.latency


def _last_ones(workload: Workload) -> Iterator[frozenset[int]]:
    """The last units of forward, which backward reads first: all of them, some, none."""
    by_last_read = sorted(workload.keepable, key=lambda unit: workload.reads_in_backward[unit])
    step = 1 if len(workload.units) <= MANY else 2
    counts = [1 << power for power in range(0, len(by_last_read).bit_length(), step)]
    for count in (len(by_last_read), *reversed(counts), 0):
        yield workload.always_kept | set(by_last_read[:count])


def _fits(workload: Workload, kept: frozenset[int], budget: int | None) -> bool:
    return budget is None or smallest_budget(workload, kept) <= budget
