"""The planner: where to gather, wait, free and reduce, and what to keep, so that the step is short within its memory.

Tasks compute in a fixed order and links are serial, so a plan is a choice, before each task, of what to launch.
search.py finds the best such choice for given units to keep; here it is decided which to keep, and within how much
memory to search.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from fsdp_compile.passes.plan.beam import Candidate, search
from fsdp_compile.passes.plan.bound import lower_bound, smallest_budget
from fsdp_compile.passes.plan.compact import compact
from fsdp_compile.passes.plan.launches import on_grid
from fsdp_compile.passes.plan.plan import Plan, PlanError
from fsdp_compile.passes.plan.rules import alternating, keep_by_rule, no_prefetch, prefetch
from fsdp_compile.passes.plan.workload import Workload

FEW = 8  # units up to which everything is tried: all subsets to keep, all neighbours to launch together
WIDTH = 8  # of many units, states that a search keeps from task to task at least
STATES = 2000  # and in all, more or less: to plan within a second
NEAR = 1e-5  # a plan no further than this from the best one within the last limit is as good as that
_RULES = ((1, 1, True, 2), (2, 1, False, 1), (2, 2, True, 2))  # see prefetch: one ahead, FSDP2's, two ahead
# Buffers of units beside what a plan needs at least: a little below whole and half ones, since activations differ.
_ROOMS = (0, 0.45, 0.9, 1.9, 2.9, 3.9)


@dataclass(frozen=True)
class PlannedStep:
    """A plan and what is known about it.

    Attributes:
        plan: the plan.
        keep_unsharded: names of the units whose gathered buffer stays from forward to backward.
        seconds: of the whole step, by the simulator.
        peak: bytes that live at most.
        bound: seconds below which no plan for this workload and budget can be.
        exact: whether no plan is shorter that launches gathers in the order of their first reader, reduces in the order
            in which they get ready, and no more than `merge` units together.
    """

    plan: Plan
    keep_unsharded: tuple[str, ...]
    seconds: float
    peak: int
    bound: float
    exact: bool

    @property
    def gap(self) -> float:
        """How far the plan may be from the shortest one, as a part of the bound; 0: it is the shortest."""
        return self.seconds / self.bound - 1 if self.bound else 0.0


def search_plan(workload: Workload, budget: int | None = None, *, merge: int = 2) -> PlannedStep:
    """The best plan found for `workload`.

    Args:
        workload: what the step computes.
        budget: bytes that may live at most; None: no limit.
        merge: of up to 8 units, how many one launch may gather or reduce; 1: of many units too each has its own, as
            where the workload says so.

    Raises:
        PlanError: the budget is below the smallest one that has a plan; the message says which that is.
    """
    merge = merge if workload.can_coalesce else 1
    least = smallest_budget(workload)
    if budget is not None and budget < least:
        raise PlanError(f"budget: expected at least {least} bytes, which this step needs even if each unit is gathered "
                        f"when it is read and reduced when it is ready, found {budget}")  # fmt: skip
    few, rounded = len(workload.units) <= FEW, on_grid(workload)
    found = min(_all(rounded, budget, merge) if few else _some(rounded, budget, merge), key=_rank)
    best = Candidate.of(workload, compact(workload, found.plan), found.keep)
    bound = lower_bound(workload, None, budget, 1 if merge == 1 else None)
    names = tuple(workload.units[unit].name for unit in sorted(best.keep))
    return PlannedStep(best.plan, names, best.seconds, best.peak, bound, exact=few)


def _all(workload: Workload, budget: int | None, merge: int) -> list[Candidate]:
    """The best plan for each choice of what to keep, unless a bound says that it is not the best of all."""
    attempts: list[Candidate] = []
    best = float("inf")
    for keep in _subsets(workload):
        if lower_bound(workload, keep, budget) > best or not _fits(workload, keep, budget):
            continue
        found = search(workload, keep, budget, merge=merge, incumbent=best)
        if found is not None:
            attempts.append(found)
            best = min(best, found.seconds)
    return attempts


def _subsets(workload: Workload) -> Iterator[frozenset[int]]:
    for count in range(len(workload.may_keep), -1, -1):
        yield from (workload.must_keep | set(chosen) for chosen in combinations(workload.may_keep, count))


def _some(workload: Workload, budget: int | None, merge: int) -> list[Candidate]:
    """Plans that do not depend on the budget, those that it allows: more memory is never slower.

    They are the plans by rules, and for each limit of a ladder what is found within that. Left out is what cannot be
    better than a plan that is known, and limits above the first one within which a plan is as good as within the last.
    """
    rules = list(_by_rule(workload))
    plans = [found for found in rules if budget is None or found.peak <= budget]
    ladder = _ladder(workload, rules)
    longest = max(found.seconds for found in rules)
    last = _within(workload, ladder[-1], longest, merge)
    near = min(found.seconds for found in (*last, *rules)) * (1 + NEAR)
    bounds = {limit: lower_bound(workload, None, limit) for limit in ladder if budget is None or limit <= budget}
    for limit in (limit for limit, bound in bounds.items() if bound <= near):
        incumbent = max(near, min(found.seconds for found in plans))
        found = last if limit == ladder[-1] else _within(workload, limit, incumbent, merge)
        plans += found
        if any(each.seconds <= near for each in found):
            return plans
    for limit, bound in reversed(bounds.items()):
        best = min(found.seconds for found in plans)
        if near < bound < best:
            plans += _within(workload, limit, best, merge)
    return plans


def _within(workload: Workload, limit: int, incumbent: float, merge: int) -> list[Candidate]:
    """Plans within `limit` bytes that take no more than `incumbent` seconds."""
    plans: list[Candidate] = []
    beam_width = max(WIDTH, STATES // len(workload.tasks))
    for keep, most in _choices(workload, limit, merge):
        if lower_bound(workload, keep, limit) > incumbent:
            continue
        found = search(workload, keep, limit, merge=most, beam_width=beam_width, incumbent=incumbent)
        if found is not None:
            plans.append(found)
            incumbent = min(incumbent, found.seconds)
    return plans


def _choices(workload: Workload, limit: int, merge: int) -> list[tuple[frozenset[int], int]]:
    """What to keep, and how many neighbours one launch may gather or reduce.

    The last units of forward are kept, which backward reads first: as many as fit, or half of them. Half of the room
    is for what is launched together, or less.
    """
    by_first_read = sorted(workload.may_keep, key=lambda unit: workload.reads_in_backward[unit])
    keep = [workload.must_keep | set(by_first_read[:count]) for count in range(len(by_first_read) + 1)]
    most = max(0, bisect_right(keep, limit, key=lambda each: smallest_budget(workload, each)) - 1)
    if merge == 1 or not workload.latency:
        return [(keep[count], 1) for count in sorted({most, most // 2}, reverse=True)]
    room = max(4, (limit - smallest_budget(workload)) // (2 * _typical(workload)))
    together = min(16, 1 << room.bit_length() - 1)  # a power of 2
    return [(keep[most], together), (keep[most], 2), *([(keep[most // 2], 2)] if most else [])]


def _typical(workload: Workload) -> int:
    """Bytes of a gathered buffer; of many small ones and a few large ones, enough that a ladder has few limits."""
    sizes = [unit.gathered for unit in workload.units]
    return max(1, int(median(sizes)), sum(sizes) // (4 * len(sizes)))


def _ladder(workload: Workload, rules: list[Candidate]) -> list[int]:
    """Limits on memory: what plans by rules need, and room for more and more buffers, up to where all are kept."""
    least, most = smallest_budget(workload), smallest_budget(workload, workload.must_keep | set(workload.may_keep))
    rooms, typical = list(_ROOMS), _typical(workload)
    while least + rooms[-1] * typical < most + 8 * typical:
        rooms.append(rooms[-2] * 2)
    peaks = {found.peak for found in rules}
    limits = [*(least + int(room * typical) for room in rooms), most + 32 * typical]  # the last: two launches of many
    return sorted(peaks.union(limit for limit in limits if all(abs(limit - peak) * 8 > typical for peak in peaks)))


def _rank(found: Candidate) -> tuple[float, int]:
    return found.seconds, found.peak


def _by_rule(workload: Workload) -> Iterator[Candidate]:
    """Plans that need no search: without any prefetch, and as other systems make them; ours is never slower."""
    yield Candidate.of(workload, no_prefetch(workload), workload.must_keep)
    for plan in (*(prefetch(workload, *rule) for rule in _RULES), alternating(workload)):
        yield Candidate.of(workload, plan, keep_by_rule(workload))


def _fits(workload: Workload, keep: frozenset[int], budget: int | None) -> bool:
    return budget is None or smallest_budget(workload, keep) <= budget
