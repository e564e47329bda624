"""The best plan for given units to keep: a search from task to task.

Of the states before a task those are kept that no other one beats: it has launched as much, is no later and needs no
more memory. That is exact, but with a `beam_width`: then the most promising ones are kept, no gather is launched far
too early, and not every number of neighbours is launched together.

Three choices cost nothing, and make the search small. A launch that the link would only queue until after the next task
can as well be issued later. A reduce that is done can as well be waited for. One that is not need not be waited for
until its memory is needed, unless an all-reduce over replicas follows.

Tens of thousands of states are made for a deep model, within a second: they are tuples, sums are differences of sums
from the start, and a plan's waits for gathers and its frees, which follow from the rest, are left to the end.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from fsdp_compile.passes.plan.launches import gathers_of, opens_of, reaches, reaches_back, reduces_of, suffix_sums
from fsdp_compile.passes.plan.plan import Kind, Plan, Step
from fsdp_compile.passes.plan.simulate import simulate
from fsdp_compile.passes.plan.workload import Workload


@dataclass(frozen=True)
class Candidate:
    """A plan, the units that it keeps, its seconds and most live bytes."""

    plan: Plan
    keep: frozenset[int]
    seconds: float
    peak: int

    @classmethod
    def of(cls, workload: Workload, plan: Plan, keep: frozenset[int]) -> "Candidate":
        """What `plan` takes, by the simulator."""
        timeline = simulate(workload, plan)
        return cls(plan, keep, timeline.makespan, timeline.peak)


class _Steps(NamedTuple):
    """A list of launches and waits for reduces, last first, that states share: of units from a number to a number."""

    before: "_Steps | None"
    kind: Kind
    start: int
    stop: int
    at: int


class _State(NamedTuple):
    """Before some task: how many launches are issued, until when what is busy, what is not waited for, live bytes.

    `done` is when each gather ends that no task has read; `pending` holds end, first and last + 1 of each launch of
    reduces; before `least` no end can be.
    """

    gathers: int
    reduces: int
    now: float
    link: float
    replicas: float
    done: tuple[float, ...]
    pending: tuple[tuple[float, int, int], ...]
    live: int
    least: float
    steps: _Steps | None


SLACK = 8.0  # with a beam_width, how much earlier than they have to be gathers are launched: see opens_of
_Key = tuple[float, float, float, int]  # see _order


def search(
    workload: Workload,
    keep: frozenset[int],
    budget: int | None,
    *,
    merge: int = 1,
    beam_width: int | None = None,
    incumbent: float = inf,
) -> Candidate | None:
    """The shortest plan that keeps `keep`; None if all take longer than `incumbent` or exceed the budget.

    Args:
        workload: what the step computes.
        keep: units whose gathered buffers stay between forward and backward.
        budget: bytes that may live at most; None: no limit.
        merge: how many neighbours the search may make one launch.
        beam_width: states that are kept from task to task; None: all.
        incumbent: seconds of a plan that is known already; the search ends where it cannot find one as
            short, and else finds what it finds without.
    """
    machine = _Search(workload, keep, inf if budget is None else budget, merge, beam_width, incumbent)
    end = machine.run()
    return None if end is None else Candidate.of(workload, machine.plan_of(end), keep)


class _Search:
    def __init__(
        self,
        workload: Workload,
        keep: frozenset[int],
        budget: float,
        merge: int,
        beam_width: int | None,
        incumbent: float,
    ) -> None:
        self.workload, self.between, self.latency = workload, workload.between, workload.latency
        self.budget, self.merge, self.beam_width, self.incumbent = budget, merge, beam_width, incumbent * (1 + 1e-12)
        # How many one launch may take; of many, not every number.
        self.sizes = [size for size in range(1, merge + 1) if size <= 4 or beam_width is None or not size & (size - 1)]
        self.hybrid = any(unit.replicate for unit in workload.units)
        self.strict = budget < inf or self.hybrid  # whether memory, or when reduces are waited for, matters
        self.gathers, self.reduces = gathers_of(workload, keep), reduces_of(workload)
        # Without a limit on memory an idle link had better carry what there is: all gathers of a direction can be
        # launched at once, in one order, and a reduce that queues behind them has no reader to keep waiting.
        self.forced = not (self.strict or merge > 1)
        self.opens = [0] * len(self.gathers)
        if beam_width is not None:
            self.opens = opens_of(workload, self.gathers, self.reduces, SLACK)
        self._sum_launches()
        self._sum_tasks(keep)

    def _sum_launches(self) -> None:
        self.first = [launch.first for launch in self.gathers]
        self.ready = [launch.first for launch in self.reduces]
        self.read = [bisect_left(self.first, index) for index in range(len(self.workload.tasks) + 2)]
        self.gather_seconds = [0.0, *accumulate(launch.seconds for launch in self.gathers)]
        self.gather_bytes = [0, *accumulate(launch.bytes for launch in self.gathers)]
        self.reduce_seconds = [0.0, *accumulate(launch.seconds for launch in self.reduces)]
        self.reduce_bytes = [0, *accumulate(launch.bytes for launch in self.reduces)]
        self.replicate = [0.0, *accumulate(launch.replicate for launch in self.reduces)]
        launches = self._least_launches()
        sums = [suffix_sums(launch.seconds for launch in each) for each in (self.gathers, self.reduces)]
        self.unsent_gathers, self.unsent_reduces = (
            [seconds + self.latency * count for seconds, count in zip(*each, strict=True)]
            for each in zip(sums, launches, strict=True)
        )

    def _least_launches(self) -> tuple[list[int], list[int]]:
        """From each gather, and each reduce, how many launches follow at least."""
        gathers, reduces = [0] * (len(self.gathers) + 1), [0] * (len(self.reduces) + 1)
        stops = reaches(self.workload, self.gathers, self.budget, self.merge)
        for start in range(len(stops) - 1, -1, -1):
            gathers[start] = 1 + gathers[stops[start]]
        starts = reaches_back(self.workload, self.reduces, self.budget, self.merge)
        start = len(self.reduces)
        while start:  # as few as possible, the last ones first
            before = starts[start]
            reduces[before:start] = [1 + reduces[start]] * (start - before)
            start = before
        return gathers, reduces

    def _sum_tasks(self, keep: frozenset[int]) -> None:
        tasks, units = self.workload.tasks, self.workload.units
        self.frees: list[list[int]] = [[] for _ in tasks]
        for unit, _, last in self.workload.gathers(keep):
            self.frees[last].append(unit)
        self.freed = [sum(units[unit].gathered for unit in each) for each in self.frees]
        self.allocated = [0] * len(tasks)
        for unit, first, _ in self.workload.reduces():
            self.allocated[first] += units[unit].packed
        self.seconds = [task.seconds for task in tasks]
        self.needs = [task.memory + more for task, more in zip(tasks, self.allocated, strict=True)]
        self.left = suffix_sums(self.seconds)
        # The least that follows, from the first launch that is left: once the link is free; once all has computed.
        self.after_gathers, self.after_ready = [0.0], [0.0]
        for launch in reversed(self.gathers):
            self.after_gathers.append(launch.seconds + max(self.left[launch.first], self.after_gathers[-1]))
        for launch, tail in zip(reversed(self.reduces), reversed(self.unsent_reduces[:-1]), strict=True):
            self.after_ready.append(max(self.after_ready[-1], tail - self.left[launch.first + 1]))
        self.after_gathers.reverse()
        self.after_ready.reverse()

    def run(self) -> _State | None:
        states = [_State(0, 0, 0.0, 0.0, 0.0, (), (), 0, 0.0, None)]
        for index in range(len(self.seconds)):
            after = (self._compute(state, index) for state in self._before(index, states))
            states = self._prune((state for state in after if state is not None), index + 1)
        ends = [self._end(state) for state in self._before(len(self.seconds), states)]
        return min((end for end in ends if end is not None), key=lambda end: end.now, default=None)

    def plan_of(self, state: _State) -> Plan:
        steps: list[tuple[tuple[int, int], Step]] = []  # each by its task; frees first, then launches, then waits

        def add(kind: Kind, units: list[int], at: int, order: int) -> None:
            steps.append(((at, order), Step(kind, tuple(self.workload.units[unit].name for unit in units), at)))

        node = state.steps
        while node is not None:
            launches = self.gathers if node.kind == "gather" else self.reduces
            units = [launch.unit for launch in launches[node.start : node.stop]]
            add(node.kind, units, node.at, 1)
            if node.kind == "gather":
                add("wait", units, self.first[node.start], 2)
            node = node.before
        steps.reverse()
        for index, units in enumerate(self.frees):
            if units:
                add("free", units, index + 1, 0)
        return Plan(tuple(step for _, step in sorted(steps, key=lambda each: each[0])))

    # --- before a task: what to launch ---

    def _before(self, index: int, states: list[_State]) -> list[_State]:
        """All that can be reached from `states` by launches and waits before task `index`."""
        seen: set[tuple[object, ...]] = set()
        found: list[_State] = []
        while states:
            children: list[_State] = []
            for state in states:
                while state.pending and state.pending[0][0] <= state.now:
                    state = self._wait_oldest(state, index)
                key = state[:8]
                if key in seen:
                    continue
                seen.add(key)
                before = len(children)
                self._launch(state, index, children)
                if len(children) == before or not (self.forced and state.link <= state.now):
                    found.append(state)
            states = self._narrowed(children, index)
        return found

    def _launch(self, state: _State, index: int, out: list[_State]) -> None:
        """Add to `out` what one launch, or the wait for one reduce, makes of `state`."""
        if self.hybrid and state.pending:
            out.append(self._wait_oldest(state, index))
        gathers, reduces = state.gathers, state.reduces
        lacks = gathers < len(self.first) and self.first[gathers] <= index
        if not lacks and self._is_queued_past(state, index):
            return
        if reduces < len(self.ready) and self.ready[reduces] < index:
            self._launch_reduces(state, index, out)
        if gathers < len(self.first) and self.opens[gathers] <= index:
            self._launch_gathers(state, index, out)

    def _launch_reduces(self, state: _State, index: int, out: list[_State]) -> None:
        gathers, reduces, now, link, replicas, done, pending, live, least, steps = state
        link = (now if now > link else link) + self.latency - self.reduce_seconds[reduces]
        for size in self.sizes:
            stop = reduces + size
            if stop > len(self.ready) or self.ready[stop - 1] >= index:
                break
            end = link + self.reduce_seconds[stop]
            new = _Steps(steps, "reduce", reduces, stop, index)
            sent = (*pending, (end, reduces, stop))
            out.append(_State(gathers, stop, now, end, replicas, done, sent, live, least, new))

    def _launch_gathers(self, state: _State, index: int, out: list[_State]) -> None:
        start, between, budget = state.gathers, self.between[index], self.budget
        for size in self.sizes:
            stop = start + size
            if stop > len(self.first):
                break
            if self.first[stop - 1] >= self.workload.backward > index or self.opens[stop - 1] > index:
                break
            more = self.gather_bytes[stop] - self.gather_bytes[start]
            while state.live + more + between > budget:  # wait for as few reduces as leave room
                if not state.pending:
                    return
                state = self._wait_oldest(state, index)
            _, reduces, now, link, replicas, done, pending, live, least, steps = state
            end = (now if now > link else link) + self.latency + self.gather_seconds[stop] - self.gather_seconds[start]
            least = max(least, end + self.left[self.first[start]])
            new = _Steps(steps, "gather", start, stop, index)
            out.append(
                _State(
                    stop, reduces, now, end, replicas, done + (end,) * (stop - start), pending, live + more, least, new
                )
            )

    def _wait_oldest(self, state: _State, index: int) -> _State:
        gathers, reduces, now, link, replicas, done, pending, live, least, steps = state
        end, start, stop = pending[0]
        now = max(now, end)
        if self.hybrid:
            replicate = self.replicate[stop] - self.replicate[start]
            replicas = max(now, replicas) + replicate + self.latency if replicate else replicas
        live -= self.reduce_bytes[stop] - self.reduce_bytes[start]
        new = _Steps(steps, "wait_reduce", start, stop, index)
        return _State(gathers, reduces, now, link, replicas, done, pending[1:], live, least, new)

    def _is_queued_past(self, state: _State, index: int) -> bool:
        """Whether the link is busy beyond task `index`: what is launched now could as well be launched after it."""
        if index == len(self.seconds) or state.link <= state.now:
            return False
        roomy = self._room_for_task(state, index)
        return roomy is not None and state.link >= self._end_of(roomy, index)

    # --- a task ---

    def _room_for_task(self, state: _State, index: int) -> _State | None:
        """`state` after as few waits for reduces as task `index` needs; None if none are enough."""
        while state.live + self.needs[index] > self.budget:
            if not state.pending:
                return None
            state = self._wait_oldest(state, index)
        return state

    def _end_of(self, state: _State, index: int) -> float:
        reads = self.read[index + 1] - self.read[index]
        start = max(state.now, state.done[reads - 1]) if reads else state.now
        return start + self.seconds[index]

    def _compute(self, state: _State, index: int) -> _State | None:
        if state.gathers < self.read[index + 1]:
            return None
        roomy = self._room_for_task(state, index)
        if roomy is None:
            return None
        gathers, reduces, _, link, replicas, done, pending, live, least, steps = roomy
        now = self._end_of(roomy, index)
        done = done[self.read[index + 1] - self.read[index] :]
        live += self.allocated[index] - self.freed[index]
        return _State(gathers, reduces, now, link, replicas, done, pending, live, least, steps)

    def _end(self, state: _State) -> _State | None:
        while state.pending:
            state = self._wait_oldest(state, len(self.seconds))
        if state.reduces < len(self.ready):
            return None
        return state._replace(now=max(state.now, state.link, state.replicas))

    # --- which states to keep ---

    def _order(self, state: _State, index: int) -> _Key:
        """Seconds below which no end can be from here; and what else speaks for a state."""
        gathers, reduces, now, link, _, _, _, live, least, _ = state
        free = now if now > link else link
        unsent = self.unsent_gathers[gathers] + self.unsent_reduces[reduces]
        carried = free + unsent if unsent else link
        return (
            max(least, now + self.left[index] + self.after_ready[reduces], free + self.after_gathers[gathers], carried),
            free + unsent,
            now,
            live,
        )

    def _narrowed(self, states: list[_State], index: int) -> list[_State]:
        """The most promising states, and the one with the least memory: some plan fits if that one does."""
        if self.beam_width is None or len(states) <= self.beam_width:
            return states
        ordered = sorted(states, key=lambda state: self._order(state, index))
        return _with_least(ordered[: self.beam_width], ordered[self.beam_width :])

    def _prune(self, found: Iterable[_State], index: int) -> list[_State]:
        ordered = [(self._order(state, index), state) for state in found]
        ordered.sort(key=lambda each: each[0])
        if self.beam_width is None:
            ordered = [each for each in ordered if each[0][0] <= self.incumbent]
        elif ordered and ordered[0][0][0] > self.incumbent:  # `incumbent` changes no plan
            return []
        states: list[_State] = []
        for number, (_, state) in enumerate(ordered):
            if len(states) == self.beam_width:
                return _with_least(states, [each for _, each in ordered[number:]])
            if not any(self._beats(other, state) for other in states):
                states.append(state)
        return states

    def _beats(self, one: _State, other: _State) -> bool:
        """Whether nothing can end earlier or fit better from `other` than from `one`."""
        if one.now > other.now or one.gathers < other.gathers or one.reduces < other.reduces:
            return False
        if self.strict and (one.live > other.live or one.reduces != other.reduces):
            return False
        if max(one.link, one.now) > max(other.link, other.now):
            return False
        if max(one.replicas, one.now) > max(other.replicas, other.now):
            return False
        if one.done != other.done and any(
            mine > its and mine > other.now for mine, its in zip(one.done, other.done, strict=False)
        ):
            return False
        return not self.strict or _gives_back_earlier(one, other)


def _with_least(states: list[_State], others: list[_State]) -> list[_State]:
    """`states`, and of the others the one with the least memory."""
    return [*states, min(others, key=lambda state: (state.live, -state.reduces))]


def _gives_back_earlier(one: _State, other: _State) -> bool:
    """Whether `one` has no more reduces to wait for, the same launches, each done no later."""
    if one.pending == other.pending:
        return True
    more = len(other.pending) - len(one.pending)
    return more >= 0 and all(
        mine[1:] == its[1:] and mine[0] <= its[0] for mine, its in zip(one.pending, other.pending[more:], strict=True)
    )
