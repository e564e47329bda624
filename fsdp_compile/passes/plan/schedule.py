"""The planner: where to gather, wait, free and reduce, and which units to keep unsharded, so that the step is short.

    search_plan       the shortest plan within a budget
      _best_within    for a limit on memory: which units to keep, and preferences, one after the other
        Scheduler     a plan for them: before each task launch what is ready, gathers as early as memory allows
    order_of_blocks   the plan of a step for which no search was asked; the search tries it too

This is list scheduling of one computing stream and one link. Tasks compute in a fixed order, gathers are launched in
the order of their first readers and reduces in the order in which they get ready. The scheduler runs the machine of
`simulate` while it decides, so it knows the time and memory of every choice exactly.

Note [Why more memory is never slower]
A greedy scheduler within more memory may find a longer plan. So it is never given the caller's budget. Plans are made
within limits that depend on the workload alone, and the budget only says which of them count: a larger budget has all
the plans of a smaller one.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from dataclasses import dataclass
from itertools import accumulate, product
from math import inf
from statistics import median
from typing import Any, NamedTuple

from fsdp_compile.passes.plan.plan import Kind, Machine, Plan, PlanError, Step, simulate
from fsdp_compile.passes.plan.workload import Workload, least_memory, lower_bound, smallest_budget

TOLERANCE = 1e-4  # of the shortest step known: a plan this near to it, within less memory, is as good


@dataclass(frozen=True)
class PlannedStep:
    """A plan, which units it keeps unsharded, and the time and memory that it takes.

    Attributes:
        plan: the plan.
        keep_unsharded: names of the units whose gathered buffer stays from forward to backward.
        seconds: of the whole step, by the simulator.
        peak: bytes that live at most.
        bound: seconds below which no plan for this workload can be, whatever the budget.
    """

    plan: Plan
    keep_unsharded: tuple[str, ...]
    seconds: float
    peak: int
    bound: float


def search_plan(workload: Workload, budget: int | None = None, *, coalesce: int = 8) -> PlannedStep:
    """Return the shortest plan that is found for `workload`; of equally short ones that with the least memory.

    Args:
        workload: what the step computes.
        budget: bytes that may live at most; None: no limit.
        coalesce: how many units one launch may gather or reduce; 1: each unit has its own launch.

    Raises:
        PlanError: the budget is below the smallest one that has a plan; the message says which that is.
    """
    least = smallest_budget(workload)
    if budget is not None and budget < least:
        raise PlanError(f"budget: expected at least {least} bytes, which this step needs even if each unit is gathered "
                        f"when it is read and reduced when it is ready, found {budget}")  # fmt: skip
    coalesce = coalesce if workload.can_coalesce and workload.latency else 1
    bound = lower_bound(workload, coalesce)
    best = _shortest_plan(workload, budget, coalesce, bound)
    names = tuple(workload.units[unit].name for unit in sorted(best.keep))
    return PlannedStep(best.plan, names, best.seconds, best.peak, bound)


# --- what is tried ----------------------------------------------------------------------------------------------------


class Preference(NamedTuple):
    """What the scheduler launches first, and how early.

    Attributes:
        reduce_first: a reduce that is ready goes before a gather.
        forward, backward: how many gathers may be launched, in each, whose first reader has not been reached.
        patient: a gather may wait for reduces to make room for it.
        together: how many neighbors one launch may take.
        full: a reduce waits for others until its launch is full.
    """

    reduce_first: bool = True
    forward: float = inf
    backward: float = inf
    patient: bool = False
    together: int = 1
    full: bool = False


_CHANGES: list[dict[str, Any]] = [
    *({"reduce_first": a, "backward": b, "patient": c}
      for a, b, c in product((True, False), (inf, 1, 2), (False, True))),
    *({"together": count, "full": full} for count in (8, 4, 2) for full in (False, True)),
    {"together": 1, "full": False},
    *({"forward": ahead} for ahead in (inf, 1, 2)),
]  # fmt: skip


class _Candidate(NamedTuple):
    plan: Plan
    keep: frozenset[int]
    seconds: float
    peak: int
    preference: Preference | None  # that led to it; None: a rule did

    @property
    def cost(self) -> tuple[float, int]:
        return self.seconds, self.peak


def _shortest_plan(workload: Workload, budget: int | None, coalesce: int, bound: float) -> _Candidate:
    """The shortest plan within the budget, see Note [Why more memory is never slower].

    Limits are tried from the smallest on, up to the first within which a plan is as short as within the last.
    """
    timeline = simulate(workload, plan := order_of_blocks(workload))
    rule = _Candidate(plan, keep_by_rule(workload), timeline.makespan, timeline.peak, None)
    limits = limits_of(workload, {rule.peak})
    most = _sets_to_keep(workload, limits[-1])[-1]
    last = _best_within(workload, limits[-1], [most], coalesce, None, bound)
    target = min(last.seconds, rule.seconds) * (1 + TOLERANCE)
    best: _Candidate | None = None
    for limit in limits:
        if best is not None and ((budget is not None and limit > budget) or best.seconds <= target):
            break
        known = [each for each in (best, rule) if each is not None and each.peak <= limit]
        start = min(known, key=lambda each: each.cost, default=None)
        best = _best_within(workload, limit, _sets_to_keep(workload, limit), coalesce, start, target)
    assert best is not None
    return best


def limits_of(workload: Workload, peaks: set[int]) -> list[int]:
    """Limits on memory: the peaks of plans by rules, and room for more and more buffers, until all fit."""
    sizes = [unit.gathered for unit in workload.units]
    # Bytes of a buffer; if there are many small ones and a few large ones, so many that there are few limits.
    typical = max(1, int(median(sizes)), sum(sizes) // (4 * len(sizes))) if sizes else 1
    least, most = smallest_budget(workload), max((task.memory for task in workload.tasks), default=0)
    most += sum(2 * unit.gathered + unit.packed for unit in workload.units)
    is_small = len(sizes) <= 8
    typical = max(typical, (most - least) // 256 if is_small else 0)  # as where little is gathered, and much reduced
    rooms = [0.0, 0.25 if is_small else 0.9]  # a little below whole buffers, since activations differ by task
    while least + rooms[-1] * typical < most:
        rooms.append(rooms[-1] + 0.25 if is_small else rooms[-1] * 2)
    return sorted({*peaks, *(least + int(room * typical) for room in rooms)})


def _best_within(
    workload: Workload,
    limit: int,
    keeps: list[frozenset[int]],
    coalesce: int,
    best: _Candidate | None,
    enough: float,
) -> _Candidate:
    """The shortest plan within `limit` bytes that is found, or `best`; the search ends at `enough` seconds.

    Starts from the preference that led to `best`, and changes one thing after the other.
    """
    preference = (best and best.preference) or Preference(together=coalesce)
    for keep in keeps:
        scheduler, tried = Scheduler(workload, keep, limit), set[Preference]()
        for change in _CHANGES:
            each = preference._replace(**change)
            if each in tried or each.together > coalesce or (best is not None and best.seconds <= enough):
                continue
            tried.add(each)
            found = scheduler.run(each, best.seconds if best is not None else inf)
            if found is not None and (best is None or found.cost < best.cost):
                best, preference = found, each
    assert best is not None
    return best


def _sets_to_keep(workload: Workload, limit: int) -> list[frozenset[int]]:
    """Sets of units to keep unsharded: of those that backward reads first all that fit, or one."""
    units = sorted(workload.may_keep, key=lambda unit: workload.reads_in_backward[unit])
    firsts = [workload.must_keep | set(units[:count]) for count in range(len(units) + 1)]
    most = bisect_right(firsts, limit, key=lambda keep: smallest_budget(workload, keep)) - 1
    return [firsts[count] for count in sorted({most, min(most, 1)})]


# --- the scheduler ----------------------------------------------------------------------------------------------------


Gather = tuple[int, int, int]  # unit, first and last task that read it


class Scheduler:
    """Makes plans that keep `keep` unsharded, within `limit` bytes.

    Right before each task, the collectives that it needs and that have not been launched are launched, and reduces are
    waited for until there is room.
    """

    def __init__(self, workload: Workload, keep: frozenset[int], limit: float) -> None:
        self.workload, self.keep, self.limit, self.count = workload, keep, limit, len(workload.tasks)
        units, gathers, reduces = workload.units, workload.gathers(keep), workload.reduces()
        self.names: dict[Kind, list[str]] = {
            "gather": [units[unit].name for unit, _, _ in gathers],
            "reduce": [units[unit].name for unit, _, _ in reduces],
        }
        self.sizes = [units[unit].gathered for unit, _, _ in gathers]
        self.first = [first for _, first, _ in gathers]
        self.ready = [ready for _, _, ready in reduces]
        self.frees: list[list[str]] = [[] for _ in range(self.count + 1)]
        for unit, _, last in gathers:
            self.frees[last + 1].append(units[unit].name)
        self.need = [task.memory for task in workload.tasks]  # of each task, with the gradients that it begins to write
        for unit, first, _ in reduces:
            self.need[first] += units[unit].packed
        # Seconds that all tasks, gathers and reduces from each one on take.
        self.left = _sums_from_each([task.seconds for task in workload.tasks])
        self.unsent_gathers = _sums_from_each([units[unit].gather for unit, _, _ in gathers])
        self.unsent_reduces = _sums_from_each([units[unit].reduce for unit, _, _ in reduces])
        place = {unit: count for count, (unit, _, _) in enumerate(reduces, 1)}
        needed = (max((place.get(unit, 0) for unit in task.reduced), default=0) for task in workload.tasks)
        self.needed = [*accumulate(needed, max), len(place)]  # how many reduces have to be done before each task
        self.reads = [bisect_right(self.first, at) for at in range(self.count + 1)]  # likewise, gathers
        self.opens = self._launch_windows(gathers)

    def _launch_windows(self, gathers: list[Gather]) -> list[int]:
        """From which task on each gather may be launched.

        Each task in between must have room for its own buffers and for the gathers that are launched early.
        """
        sums = [0, *accumulate(self.sizes)]
        least = least_memory(self.workload, self.keep)
        rooms = [self.limit - size + sums[read] for size, read in zip(least, self.reads, strict=False)]
        lowest = list(accumulate(reversed(rooms), min))[::-1]  # from each task on
        return [max(bisect_left(lowest, sums[index + 1]), self.workload.first_issue(first))
                for index, (_, first, _) in enumerate(gathers)]  # fmt: skip

    def run(self, preference: Preference, most: float = inf) -> _Candidate | None:
        """The plan that a preference gives; None if it takes more than `most` seconds."""
        self.machine, self.steps = Machine(self.workload), list[Step]()
        self.waits = deque[tuple[int, tuple[str, ...]]]()  # of gathers: before which task, what
        self.pending = deque[tuple[float, tuple[str, ...]]]()  # reduces: when they are done, what
        self.ends = list[float]()  # of gathers
        self.gathered = self.reduced = self.waited = 0
        for at in range(self.count + 1):
            self.at = at
            self._before_task(preference)
            unsent = self.unsent_gathers[self.gathered] + self.unsent_reduces[self.reduced]
            if max(self.machine.now + self.left[at], self.machine.link + unsent) > most:
                return None
            if at < self.count:
                self.machine.task(at)
        timeline = self.machine.end()
        return _Candidate(Plan(tuple(self.steps)), self.keep, timeline.makespan, timeline.peak, preference)

    def _before_task(self, preference: Preference) -> None:
        self.read = self.reads[self.at]
        if self.frees[self.at]:
            self._issue("free", tuple(self.frees[self.at]))
        while self.pending and self.pending[0][0] <= self.machine.now:
            self._wait_reduce()
        while (launch := self._next_launch(preference)) is not None:
            self._launch(*launch)
        while self.gathered < self.read:
            self._launch("gather", 1)
        while self.reduced < self.needed[self.at]:
            self._launch("reduce", 1)
        while self.waits and self.waits[0][0] <= self.at:
            self._issue("wait", self.waits.popleft()[1])
        while self.waited < self.needed[self.at]:
            self._wait_reduce()
        if self.at < self.count:
            self._make_room(self.need[self.at])

    def _next_launch(self, preference: Preference) -> tuple[Kind, int] | None:
        """The next launch for which there is room; None if there is none, or the link is busy anyway."""
        lacks, idle = self.gathered < self.read, not self._is_busy()
        reduces = gathers = 0
        if idle:
            reduces = min(preference.together, bisect_left(self.ready, self.at) - self.reduced)
            if preference.full and reduces < min(preference.together, len(self.ready) - self.reduced):
                reduces = 0
        if self.gathered < len(self.first) and (lacks or idle):
            ahead = preference.forward if self.workload.is_forward(self.first[self.gathered]) else preference.backward
            most = max(int(lacks), min(preference.together, self.read + ahead - self.gathered))
            gathers = self._may_gather(most, preference.patient)
        if reduces and (preference.reduce_first or not gathers):
            return "reduce", reduces
        return ("gather", gathers) if gathers else None

    def _is_busy(self) -> bool:
        """Whether the link is busy until the end of the next task, so that a launch may as well wait for that."""
        if self.at == self.count:
            return False
        start = max(self.machine.now, self.ends[self.read - 1] if 0 < self.read <= self.gathered else 0.0)
        return self.machine.link >= start + self.workload.tasks[self.at].seconds

    def _may_gather(self, most: float, patient: bool) -> int:
        """How many gathers the next launch may take; if `patient`, reduces may be waited for to make room."""
        count = size = 0
        beneath = max(self.workload.between[self.at], self.need[self.at] if self.at < self.count else 0)
        room = inf if patient else self.limit - self.machine.live - beneath
        for index in range(self.gathered, len(self.first)):
            size += self.sizes[index]
            if count >= most or self.opens[index] > self.at or (size > room and index >= self.read):
                break
            count += 1
        return count

    def _issue(self, kind: Kind, names: tuple[str, ...]) -> None:
        step = Step(kind, names, self.at)
        self.steps.append(step)
        self.machine.step(step)

    def _launch(self, kind: Kind, count: int) -> None:
        start = self.gathered if kind == "gather" else self.reduced
        names = tuple(self.names[kind][start : start + count])
        if kind == "gather":
            self._make_room(sum(self.sizes[start : start + count]) + self.workload.between[self.at])
        self._issue(kind, names)
        if kind == "gather":
            self.waits.append((self.first[start], names))
            self.ends += [self.machine.link] * count
            self.gathered += count
        else:
            self.pending.append((self.machine.link, names))
            self.reduced += count

    def _wait_reduce(self) -> None:
        _, names = self.pending.popleft()
        self._issue("wait_reduce", names)
        self.waited += len(names)

    def _make_room(self, size: int) -> None:
        """Wait for reduces, the oldest first, until there is room for `size` bytes."""
        while self.machine.live + size > self.limit:
            if not self.pending:  # then one is ready: limits and launch windows have room for the rest
                self._launch("reduce", 1)
            self._wait_reduce()


def _sums_from_each(numbers: list[float]) -> list[float]:
    return list(accumulate(reversed(numbers), initial=0.0))[::-1]


# --- plans by rules ---------------------------------------------------------------------------------------------------

Position = tuple[int, int, int]  # before which task; 0: frees, 1: reduces, 2: gathers, 3: the end; order among these


# Note [Half a module ahead]
# Eager steps, and blocks compiled one by one, gather the next module before they wait for this one. A graph does so by
# flat parameters, until half of the bytes of the module that comes next are ahead. By simulation of a GPT whose blocks
# are three flat parameters each, with tasks off by up to 30 %, that exposes as little as whole modules ahead, at a peak
# of 96.3 MB in place of 103.4; one flat parameter ahead exposes up to a third more. Nor is one enough where a module is
# a large frozen flat parameter and a small trained one.


def order_of_blocks(workload: Workload, in_flight: int | None = None) -> Plan:
    """The plan of a step for which no search was asked; it needs no price. See Note [Half a module ahead].

    Of reduces `in_flight` may be under way at once; None: one is waited for when half a module, and half of its own
    bytes, have been launched behind it, so that a large head's is not waited for right behind the block's that follows.
    """
    gathers, reduces, units = workload.gathers(keep_by_rule(workload)), workload.reduces(), workload.units
    half = Counter[str]()  # bytes of half a module
    for each in units:
        half[each.of_module] += max(each.gathered, each.packed) / 2  # type: ignore[assignment]  # a float
    issued, split = list[Position](), sum(first < workload.backward for _, first, _ in gathers)
    for begin, end, start in ((0, split, 0), (split, len(gathers), workload.backward)):
        sums = [*accumulate((units[unit].gathered for unit, _, _ in gathers[begin:end]), initial=0)]
        for index in range(begin, end):  # what is read next: before the one before it is waited for
            place = (gathers[index - 1][1], 2, 4 * index - 5) if index > begin else None
            most = sums[index - begin] + half[units[gathers[index][0]].of_module]
            while len(issued) <= index or (len(issued) < end and sums[len(issued) - begin] < most):
                issued.append(place or (start, 2, len(issued) - end))
    waited, under_way = list[Position](), deque[int]()  # bytes
    for at, (unit, _, ready) in enumerate(reduces):
        under_way.append(units[unit].packed)
        while (len(under_way) > in_flight if in_flight is not None else
               sum(under_way) - under_way[0] > max(half[units[unit].of_module], under_way[0] / 2)):  # fmt: skip
            waited.append((ready + 1, 1, 2 * at + 2))  # behind the launch: its buffer is there already
            under_way.popleft()
    waited += [(len(workload.tasks), 3, each) for each in range(len(waited), len(reduces))]
    return plan_of(workload, gathers, issued, waited)


def keep_by_rule(workload: Workload) -> frozenset[int]:
    """The units that have to stay unsharded, and those of the root and of the last module, as in eager steps.

    Backward begins with them, so that nothing would hide a second gather, and little memory would be free for long.
    """
    units = sorted(workload.may_keep, key=lambda unit: workload.reads_in_backward[unit])
    modules = [*dict.fromkeys(workload.units[unit].of_module for unit in units)]
    kept = modules[: 2 if modules[:1] == ["root"] else 1]
    return workload.must_keep | {unit for unit in units if workload.units[unit].of_module in kept}


def plan_of(workload: Workload, gathers: list[Gather], issued: list[Position], waited: list[Position]) -> Plan:
    """Wait for gathers at their first reader, free them after the last, issue reduces when they are ready.

    Args:
        workload: the step.
        gathers: all of it, in order.
        issued: where each of them is issued.
        waited: where each reduce is waited for.
    """
    steps: list[tuple[Position, Kind, int]] = []
    for index, ((unit, first, last), position) in enumerate(zip(gathers, issued, strict=True)):
        steps += [(position, "gather", unit), ((first, 2, 4 * index), "wait", unit)]
        steps.append(((last + 1, 0, index), "free", unit))
    needed = {unit: at for at, task in reversed([*enumerate(workload.tasks)]) for unit in task.reduced}
    for index, ((unit, _, ready), latest) in enumerate(zip(workload.reduces(), waited, strict=True)):
        position = min(latest, (needed[unit], 1, 2 * index + 2)) if unit in needed else latest
        steps += [((ready + 1, 1, 2 * index + 1), "reduce", unit), (position, "wait_reduce", unit)]
    steps.sort(key=lambda step: step[0])
    return Plan(tuple(Step(kind, (workload.units[unit].name,), position[0]) for position, kind, unit in steps))
