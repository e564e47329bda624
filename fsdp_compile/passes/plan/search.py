"""The planner: where to gather, wait, free and reduce, and which units to keep unsharded, so that the step is short.

Up to 8 units every subset to keep is searched exactly; of more units the plans by rules, and beam searches within
limits on memory. The shortest plan within the budget is taken, of equal ones that with the least memory.

    search_plan           the plan for a workload and a budget
      _all_subsets        few units: each subset to keep whose lower bound does not exceed the incumbent
      _within_limits      many units: rules, and for each of some limits on memory
        _choices          what to keep, and how many units one launch may take
          beam_search     (beam.py) the best plan for these
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import combinations
from math import frexp, inf
from statistics import median
from typing import Any

from fsdp_compile.passes.plan.beam import Candidate, beam_search
from fsdp_compile.passes.plan.bound import lower_bound, smallest_budget
from fsdp_compile.passes.plan.plan import Plan, PlanError
from fsdp_compile.passes.plan.rules import alternating, keep_by_rule, no_prefetch, prefetch
from fsdp_compile.passes.plan.workload import Workload

EXACT_UNITS = 8  # up to so many units every subset to keep is searched, without a beam width
BEAM_WIDTH = 8  # states that a beam search keeps from task to task at least,
STATES = 2000  # and in all, more or less: to plan within a second
TOLERANCE = 1e-5  # of the shortest step known: a plan this near to it, within less memory, is as good
_RULES = ((1, 1, True, 2), (2, 1, False, 1), (2, 2, True, 2))  # see `prefetch`: one unit, FSDP2's, two units
# Room beside the smallest budget, in buffers; a little below whole and half ones, since activations differ by task.
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
            in which they get ready, and no more than `coalesce` units together.
    """

    plan: Plan
    keep_unsharded: tuple[str, ...]
    seconds: float
    peak: int
    bound: float
    exact: bool

    @property
    def gap(self) -> float:
        """How far the plan may be from the shortest one, as a fraction of the bound; 0: it is the shortest."""
        return self.seconds / self.bound - 1 if self.bound else 0.0


def search_plan(workload: Workload, budget: int | None = None, *, coalesce: int = 2) -> PlannedStep:
    """The best plan that the search finds for `workload`.

    Args:
        workload: what the step computes.
        budget: bytes that may live at most; None: no limit.
        coalesce: of up to 8 units, how many one launch may gather or reduce; 1: of many units too each has its own, as
            where the workload says so.

    Raises:
        PlanError: the budget is below the smallest one that has a plan; the message says which that is.
    """
    coalesce = coalesce if workload.can_coalesce else 1
    least = smallest_budget(workload)
    if budget is not None and budget < least:
        raise PlanError(f"budget: expected at least {least} bytes, which this step needs even if each unit is gathered "
                        f"when it is read and reduced when it is ready, found {budget}")  # fmt: skip
    exact = len(workload.units) <= EXACT_UNITS
    candidates = (_all_subsets if exact else _within_limits)(_on_grid(workload), budget, coalesce)
    best = min(candidates, key=lambda each: (each.seconds, each.peak))
    best = Candidate.of(workload, best.plan, best.keep)
    bound = lower_bound(workload, None, budget, 1 if coalesce == 1 else None)
    names = tuple(workload.units[unit].name for unit in sorted(best.keep))
    return PlannedStep(best.plan, names, best.seconds, best.peak, bound, exact)


def _all_subsets(workload: Workload, budget: int | None, coalesce: int) -> list[Candidate]:
    """The best plan for each choice of what to keep, unless its lower bound exceeds the incumbent."""
    candidates: list[Candidate] = []
    incumbent = inf
    for count in range(len(workload.may_keep), -1, -1):
        for chosen in combinations(workload.may_keep, count):
            keep = workload.must_keep | set(chosen)
            fits = budget is None or smallest_budget(workload, keep) <= budget
            if not fits or lower_bound(workload, keep, budget) > incumbent:
                continue
            candidate = beam_search(workload, keep, budget, coalesce=coalesce, incumbent=incumbent)
            if candidate is not None:
                candidates.append(candidate)
                incumbent = min(incumbent, candidate.seconds)
    return candidates


# Note [Why more memory is never slower]
# A beam search within more memory may find a longer plan, as other states crowd out those that would have led to the
# shorter one. So no search is given the caller's budget. Plans are searched within limits that depend on the workload
# alone, and the budget only says which of them count: a larger budget has all the plans of a smaller one. For the same
# reason an incumbent ends a search early but changes none of its plans.
def _within_limits(workload: Workload, budget: int | None, coalesce: int) -> list[Candidate]:
    """Plans by rules, and for each limit on memory what a beam search finds within it.

    The limits are tried from the smallest to the first within which a plan is as short as within the last. Left out
    are those whose lower bound exceeds what is known.
    """
    keep = keep_by_rule(workload)
    rules = [Candidate.of(workload, no_prefetch(workload), workload.must_keep)]
    rules += [Candidate.of(workload, prefetch(workload, *rule), keep) for rule in _RULES]
    rules.append(Candidate.of(workload, alternating(workload), keep))
    candidates = [each for each in rules if budget is None or each.peak <= budget]
    limits = _limits(workload, {each.peak for each in rules})
    last = _within(workload, limits[-1], max(each.seconds for each in rules), coalesce)
    target = min(each.seconds for each in (*last, *rules)) * (1 + TOLERANCE)
    bounds = {limit: lower_bound(workload, None, limit) for limit in limits if budget is None or limit <= budget}
    for limit in (limit for limit, bound in bounds.items() if bound <= target):
        incumbent = max(target, min(each.seconds for each in candidates))
        added = last if limit == limits[-1] else _within(workload, limit, incumbent, coalesce)
        candidates += added
        if any(each.seconds <= target for each in added):
            return candidates
    for limit, bound in reversed(bounds.items()):
        incumbent = min(each.seconds for each in candidates)
        if target < bound < incumbent:
            candidates += _within(workload, limit, incumbent, coalesce)
    return candidates


def _limits(workload: Workload, peaks: set[int]) -> list[int]:
    """Limits on memory: what plans by rules need, and room for more and more buffers, up to where all are kept."""
    least, most = smallest_budget(workload), smallest_budget(workload, workload.must_keep | set(workload.may_keep))
    rooms, typical = list(_ROOMS), _typical(workload)
    while least + rooms[-1] * typical < most + 8 * typical:
        rooms.append(rooms[-2] * 2)
    limits = [*(least + int(room * typical) for room in rooms), most + 32 * typical]  # the last: two large launches
    return sorted(peaks.union(limit for limit in limits if all(abs(limit - peak) * 8 > typical for peak in peaks)))


def _typical(workload: Workload) -> int:
    """Bytes of a gathered buffer; of many small ones and a few large ones, enough that there are few limits."""
    sizes = [unit.gathered for unit in workload.units]
    return max(1, int(median(sizes)), sum(sizes) // (4 * len(sizes)))


def _within(workload: Workload, limit: int, incumbent: float, coalesce: int) -> list[Candidate]:
    """Plans within `limit` bytes that take no more than `incumbent` seconds."""
    candidates: list[Candidate] = []
    beam_width = max(BEAM_WIDTH, STATES // len(workload.tasks))
    for keep, most in _choices(workload, limit, coalesce):
        if lower_bound(workload, keep, limit) > incumbent:
            continue
        candidate = beam_search(workload, keep, limit, coalesce=most, beam_width=beam_width, incumbent=incumbent)
        if candidate is not None:
            candidates.append(candidate)
            incumbent = min(incumbent, candidate.seconds)
    return candidates


def _choices(workload: Workload, limit: int, coalesce: int) -> list[tuple[frozenset[int], int]]:
    """What to keep, and how many neighbours one launch may gather or reduce.

    The units that backward reads first are kept: as many as fit, or half of them. Half of the room or less is for
    coalesced launches.
    """
    by_first_read = sorted(workload.may_keep, key=lambda unit: workload.reads_in_backward[unit])
    keep = [workload.must_keep | set(by_first_read[:count]) for count in range(len(by_first_read) + 1)]
    most = max(0, bisect_right(keep, limit, key=lambda each: smallest_budget(workload, each)) - 1)
    if coalesce == 1 or not workload.latency:
        return [(keep[count], 1) for count in sorted({most, most // 2}, reverse=True)]
    room = max(4, (limit - smallest_budget(workload)) // (2 * _typical(workload)))
    together = min(16, 1 << room.bit_length() - 1)  # a power of 2
    return [(keep[most], together), (keep[most], 2), *([(keep[most // 2], 2)] if most else [])]


def _on_grid(workload: Workload) -> Workload:
    """`workload` with all seconds rounded to multiples of 2^-50 of the step: sums of them are exact in any order."""
    total = sum(task.seconds for task in workload.tasks)
    total += sum(2 * unit.gather + unit.reduce + unit.replicate + 4 * workload.latency for unit in workload.units)
    grid = 2.0 ** (frexp(total)[1] - 50)

    def rounded(each: Any, *names: str) -> Any:  # of the class of `each`
        return replace(each, **{name: round(getattr(each, name) / grid) * grid for name in names})

    tasks = tuple(rounded(task, "seconds") for task in workload.tasks)
    units = tuple(rounded(unit, "gather", "reduce", "replicate") for unit in workload.units)
    rounded_workload: Workload = rounded(replace(workload, tasks=tasks, units=units), "latency")
    return rounded_workload
