"""The planner: where to gather, wait, free and reduce, and which units to keep unsharded, so that the step is short.

Up to 8 units every subset to keep is searched exactly; of more units the plans by rules, and beam searches within
limits on memory. The shortest plan within the budget is taken, of equal ones that with the least memory.

    search_plan           the plan for a workload and a budget
      _all_subsets        few units: each subset to keep whose lower bound does not exceed the incumbent
      _within_limits      many units: rules, and for each of some limits on memory
        _choices          what to keep, and how many units one launch may take
          beam_search     (beam.py) the best plan for these

Plans by a fixed rule need no search; other systems follow one, and so do graphs for which no link is named:

    no_prefetch    gather when a unit is read, reduce when its gradients are ready, wait at once: the least memory
    prefetch       gather so many units before they are read; FSDP2's plan is one of these
    alternating    one unit before; in backward the link carries either a gather or a reduce, never both
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, groupby, pairwise
from math import frexp, inf
from statistics import median
from typing import Any

from fsdp_compile.passes.plan.beam import Candidate, beam_search
from fsdp_compile.passes.plan.bound import lower_bound, smallest_budget
from fsdp_compile.passes.plan.plan import Kind, Plan, PlanError, Step
from fsdp_compile.passes.plan.update import repeated, without_update
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
    keep, apart = keep_by_rule(workload), without_update(workload) if workload.forward else workload
    by_rule = [(no_prefetch(apart), workload.must_keep)]
    by_rule += [(plan, keep) for plan in (*(prefetch(apart, *rule) for rule in _RULES), alternating(apart))]
    if workload.forward:
        by_rule = [(repeated(workload, plan), stays) for plan, stays in by_rule]
    rules = [Candidate.of(workload, plan, stays) for plan, stays in by_rule]
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

    tasks = tuple(rounded(task, "seconds", "all_reduce") for task in workload.tasks)
    units = tuple(
        rounded(unit, "gather", "reduce", "replicate", *(["arrives"] if unit.arrives is not None else []))
        for unit in workload.units
    )
    rounded_workload: Workload = rounded(replace(workload, tasks=tasks, units=units), "latency")
    return rounded_workload


# --- plans by rules ---------------------------------------------------------------------------------------------------

# The units of one module (of two dtypes, or frozen beside trained parameters) are gathered together. A rule that looked
# one such unit ahead would reach the unit that is read next, and nothing would hide the module after that.

_Position = tuple[int, int, int]  # before which task; 0: frees, 1: reduces, 2: gathers, 3: the end; order among these
_Gather = tuple[int, int, int]  # unit, first and last task that read it


def no_prefetch(workload: Workload) -> Plan:
    """The plan that needs the least memory: gather when a unit is read, reduce when it is ready, wait at once."""
    gathers = workload.gathers(workload.must_keep)
    issued: list[_Position] = [(first, 2, index - len(gathers)) for index, (_, first, _) in enumerate(gathers)]
    waited: list[_Position] = [(ready + 1, 1, 2 * each + 2) for each, (_, _, ready) in enumerate(workload.reduces())]
    return _plan(workload, gathers, issued, waited)


def prefetch(workload: Workload, forward: int, backward: int, before_wait: bool, in_flight: int) -> Plan:
    """The plan with a fixed prefetch distance: gathers so many units ahead, reduces as they get ready.

    The last unit of forward stays for backward, which reads it first, where the step leaves that open.

    Args:
        workload: the step.
        forward: how many units ahead of the one that is waited for a gather is issued in forward.
        backward: the same in backward.
        before_wait: whether that gather is issued before the wait.
        in_flight: reduces that may be under way at once, the one that is issued included.
    """
    gathers, reduces = workload.gathers(keep_by_rule(workload)), workload.reduces()
    split = sum(first < workload.backward for _, first, _ in gathers)
    issued = _ahead(workload, gathers[:split], 0, 0, forward, before_wait)
    issued += _ahead(workload, gathers[split:], split, workload.backward, backward, before_wait)
    # Each reduce is waited for before there would be more than `in_flight` under way, the rest at the end.
    waited: list[_Position] = [(ready + 1, 1, 2 * each) for each, (_, _, ready) in enumerate(reduces)][in_flight:]
    waited += [_at_the_end(workload, each) for each in range(len(waited), len(reduces))]
    return _plan(workload, gathers, issued, waited)


def alternating(workload: Workload) -> Plan:
    """The plan by which a backward has one gathered buffer beside the one that it reads, or one reduce: not both.

    Reduces and gathers share a link. While a unit computes its backward, first the reduce of the unit before is under
    way, then the gather of the next one, each for a part of that time as large as its part of the bytes. If they take
    less time than computing does, no more is exposed than with both at once, and a buffer less is alive.
    """
    gathers, reduces = workload.gathers(keep_by_rule(workload)), workload.reduces()
    split = sum(first < workload.backward for _, first, _ in gathers)
    back = gathers[split:]
    modules = _modules(workload, back)
    issued = _ahead(workload, gathers[:split], 0, 0, 1, True)
    issued += [(workload.backward, 2, each - len(modules[0])) for each in modules[0]] if modules else []
    waits = {each: ready + 1 for each, (_, _, ready) in enumerate(reduces[1:])}  # at the latest: with the next one
    for module, following in pairwise(modules):
        first, end = back[module[0]][1], back[following[0]][1]
        due = [each for each, (_, _, ready) in enumerate(reduces) if ready < first < waits.get(each, end)]
        sent = sum(workload.units[reduces[each][0]].packed for each in due)
        gathered = sum(workload.units[back[each][0]].gathered for each in following)
        # The task before which about that part of the computing is done that `sent` has among all bytes.
        done = [0.0, *accumulate(task.seconds for task in workload.tasks[first:end])]
        share = done[-1] * sent / ((sent + gathered) or 1)
        switch = first + min(range(len(done)), key=lambda each: abs(done[each] - share))
        # Never after the module's own reduce: the switch goes by this device's costs, and launches have one order.
        units = [back[each][0] for each in module]
        own = [workload.writes[unit][1] for unit in units if unit in workload.writes]
        switch = max(first, min([switch, *own]))
        waits.update((each, min(switch, waits.get(each, switch))) for each in due)
        issued += [_beside_wait(switch, split + module[0], True)] * len(following)
    waited = [
        (waits[each], 1, 2 * each + 4) if each in waits else _at_the_end(workload, each) for each in range(len(reduces))
    ]
    return _plan(workload, gathers, issued, waited)


def keep_by_rule(workload: Workload) -> frozenset[int]:
    """What has to be kept unsharded, and the unit that forward reads last, if it may be."""
    forward = sorted(workload.reads_in_forward, key=lambda unit: workload.reads_in_forward[unit])
    return workload.must_keep | (set(forward[-1:]) & set(workload.may_keep))


def _modules(workload: Workload, gathers: list[_Gather]) -> list[Sequence[int]]:
    """Which of `gathers` are of one module and follow each other."""
    names = [workload.units[unit].module or workload.units[unit].name for unit, _, _ in gathers]
    return [list(group) for _, group in groupby(range(len(gathers)), key=names.__getitem__)]


def _ahead(
    workload: Workload, gathers: list[_Gather], offset: int, start: int, distance: int, before_wait: bool
) -> list[_Position]:
    """Where `gathers`, the first of which is number `offset`, are issued: of the first `distance` modules before task
    `start`, of others beside the first wait of the module so many before.
    """
    modules, positions = _modules(workload, gathers), list[_Position]()
    for index, module in enumerate(modules):
        if index < distance:
            positions += [(start, 2, each - len(gathers)) for each in module]
        else:
            beside = modules[index - distance][0]
            positions += [_beside_wait(gathers[beside][1], offset + beside, before_wait)] * len(module)
    return positions


def _beside_wait(at: int, index: int, before_wait: bool) -> _Position:
    """Before task `at`, and where gather `index` is waited for there, before or after that."""
    return at, 2, 4 * index - 1 if before_wait else 4 * index + 1


def _at_the_end(workload: Workload, index: int) -> _Position:
    return len(workload.tasks), 3, index


def _plan(workload: Workload, gathers: list[_Gather], issued: list[_Position], waited: list[_Position]) -> Plan:
    """Gathers are waited for at their first reader and freed after the last, reduces issued when they are ready.

    Args:
        workload: the step.
        gathers: all of it, in order.
        issued: where each of them is issued.
        waited: where each reduce is waited for.
    """
    steps: list[tuple[_Position, Kind, int]] = []
    for index, ((unit, first, last), position) in enumerate(zip(gathers, issued, strict=True)):
        if workload.units[unit].arrives is not None:
            position = 0, 2, index - 2 * len(gathers)  # before all others, for it was launched before them
        steps += [(position, "gather", unit), ((first, 2, 4 * index), "wait", unit)]
        steps.append(((last + 1, 0, index), "free", unit))
    needed = {unit: at for at, task in reversed([*enumerate(workload.tasks)]) for unit in task.reduced}
    for index, ((unit, _, ready), latest) in enumerate(zip(workload.reduces(), waited, strict=True)):
        position = min(latest, (needed[unit], 1, 2 * index + 2)) if unit in needed else latest
        steps += [((ready + 1, 1, 2 * index + 1), "reduce", unit), (position, "wait_reduce", unit)]
    steps.sort(key=lambda step: step[0])
    return Plan(tuple(Step(kind, (workload.units[unit].name,), position[0]) for position, kind, unit in steps))
