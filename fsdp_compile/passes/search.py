"""The best plan for given units to keep: a search from task to task.

Of the states before a task those are kept that no other one beats: it has launched as much, is no later and needs no
more memory. That is exact, until more than `width` states are left.

Three choices cost nothing, and make the search small. A launch that the link would only queue until after the next task
can as well be issued later. A reduce that is done can as well be waited for. One that is not need not be waited for
until its memory is needed, unless an all-reduce over replicas follows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import le
from typing import Any, NamedTuple

from fsdp_compile.passes.launches import gathers_of, opens_of, reduces_of, suffix_sums, units_of
from fsdp_compile.passes.plan import Kind, Plan, Step
from fsdp_compile.passes.simulate import task_end
from fsdp_compile.passes.workload import Workload


@dataclass(frozen=True)
class Found:
    """The best plan of a search: its seconds, most live bytes, kept units; and whether nothing was left out."""

    plan: Plan
    kept: frozenset[int]
    seconds: float
    peak: int
    exact: bool


class _Sent(NamedTuple):
    """A launch that was issued and not waited for: when it is done, and up to which launch it goes, from which."""

    done: float
    start: int
    stop: int


class _Steps(NamedTuple):
    """A list of steps, last first, that states share."""

    before: "_Steps | None"
    kind: Kind
    units: tuple[int, ...]
    at: int


class _State(NamedTuple):
    """Before some task: how many launches are issued, until when what is busy, what is not waited for, live bytes."""

    gathers: int
    reduces: int
    now: float
    link: float
    replicas: float
    arriving: tuple[_Sent, ...]
    pending: tuple[_Sent, ...]
    live: int
    peak: int
    steps: _Steps | None


def search(
    workload: Workload,
    kept: frozenset[int],
    budget: int | None,
    *,
    merge: int = 1,
    together: float = 0.0,
    width: int | None = None,
    beat: float = float("inf"),
    slack: float | None = None,
) -> Found | None:
    """The shortest plan for `workload` that keeps `kept`; None if all are longer than `beat` seconds or over budget.

    Args:
        workload: what the step computes.
        kept: units whose gathered buffers stay between forward and backward.
        budget: bytes that may live at most; None: no limit.
        merge: how many launches the search may make into one.
        together: neighbours are one launch from the start, if it takes the link no longer than this, in seconds.
        width: states that are kept from task to task; None: all.
        beat: seconds of a plan that is known already.
        slack: launch what there is whenever the link is idle, but a gather no earlier than it has to be if everything
            computes without a stop, and so many times what it takes. None: try every place.
    """
    machine = _Search(workload, kept, budget, merge, together, width, beat, slack)
    end = machine.run()
    if end is None:
        return None
    return Found(machine.plan_of(end), kept, end.now, end.peak, not machine.cut)


class _Search:
    def __init__(
        self,
        workload: Workload,
        kept: frozenset[int],
        budget: int | None,
        merge: int,
        together: float,
        width: int | None,
        beat: float,
        slack: float | None,
    ) -> None:
        self.workload, self.tasks, self.between = workload, workload.tasks, workload.between
        self.merge, self.width, self.beat, self.cut = merge, width, beat, False
        self.budget = float("inf") if budget is None else budget
        self.bounded = budget is not None
        self.gathers, self.reduces = gathers_of(workload, kept, together), reduces_of(workload, together)
        self.hybrid = any(unit.replicate for unit in workload.units)
        self.frees: dict[int, tuple[int, ...]] = {}
        for unit, _, last in workload.gathers(kept):
            self.frees[last] = (*self.frees.get(last, ()), unit)
        self.allocates: dict[int, int] = {}
        for unit, first, _ in workload.reduces():
            self.allocates[first] = self.allocates.get(first, 0) + workload.units[unit].packed
        self.left = suffix_sums(task.seconds for task in self.tasks)
        self.unsent = [suffix_sums(launch.seconds for launch in each) for each in (self.gathers, self.reduces)]
        # The least that follows, from the first launch that is left: once the link is free; once all has computed.
        self.after_gathers, self.after_ready = [0.0], [0.0]
        for launch in reversed(self.gathers):
            self.after_gathers.append(launch.seconds + max(self.left[launch.first], self.after_gathers[-1]))
        for launch, tail in zip(reversed(self.reduces), reversed(self.unsent[1][:-1]), strict=True):
            self.after_ready.append(max(self.after_ready[-1], tail - self.left[launch.first + 1]))
        self.after_gathers.reverse()
        self.after_ready.reverse()
        self.hasty = slack is not None
        self.opens = [0] * len(self.gathers) if slack is None else opens_of(workload, self.gathers, self.reduces, slack)

    def run(self) -> _State | None:
        states = [_State(0, 0, 0.0, 0.0, 0.0, (), (), 0, 0, None)]
        for index in range(len(self.tasks)):
            states = self._prune(self._after(index, states), index + 1)
        ends = [self._end(state) for state in self._before(len(self.tasks), states)]
        return min((end for end in ends if end is not None), key=lambda end: (end.now, end.peak), default=None)

    def plan_of(self, state: _State) -> Plan:
        steps, node = [], state.steps
        while node is not None:
            steps.append(Step(node.kind, tuple(self.workload.units[unit].name for unit in node.units), node.at))
            node = node.before
        return Plan(tuple(reversed(steps)))

    # --- before a task: what to launch ---

    def _before(self, index: int, states: list[_State]) -> Iterator[_State]:
        """All that can be reached from `states` by launches and waits before task `index`."""
        seen: set[Any] = set()
        while states:
            fresh = {}
            for state in states:
                while state.pending and state.pending[0].done <= state.now:
                    state = self._wait_oldest(state, index)
                if state[:-1] not in seen:
                    fresh[state[:-1]] = state
            seen |= fresh.keys()
            children = []
            for state in fresh.values():
                launched = list(self._launches(state, index))
                if not (launched and self._is_forced(state)):
                    yield state
                children += launched
            states = self._narrowed(children, index)

    def _narrowed(self, states: list[_State], index: int) -> list[_State]:
        """The most promising states, and the one with the least memory: some plan fits if that one does."""
        if self.width is None or len(states) <= self.width:
            return states
        self.cut = True
        states = sorted(states, key=lambda state: self._order(state, index))
        return [*states[: self.width], min(states[self.width :], key=lambda state: (state.live, -state.reduces))]

    def _is_forced(self, state: _State) -> bool:
        """Whether an idle link had better carry what there is.

        Without a limit on memory that is never worse: all gathers of a direction can be launched at once, in one order,
        and a reduce that has to queue behind them has no reader to keep waiting.
        """
        return (self.hasty or not (self.bounded or self.hybrid or self.merge > 1)) and state.link <= state.now

    def _launches(self, state: _State, index: int) -> Iterator[_State]:
        if state.pending and self.hybrid:
            yield self._wait_oldest(state, index)
        needed = self._lacks(state, index)
        if not needed and self._is_queued_past(state, index):
            return
        for stop in range(state.reduces + 1, min(state.reduces + self.merge, len(self.reduces)) + 1):
            if self.reduces[stop - 1].first >= index:
                break
            yield self._reduce(state, index, stop)
        for stop in range(state.gathers + 1, min(state.gathers + self.merge, len(self.gathers)) + 1):
            if self.gathers[stop - 1].first >= self.workload.backward > index or self.opens[stop - 1] > index:
                break
            size = sum(launch.bytes for launch in self.gathers[state.gathers : stop])
            roomy = self._make_room(state, index, size + self.between[index])
            if roomy is None:
                break
            yield self._gather(roomy, index, stop)

    def _make_room(self, state: _State, index: int, size: int) -> _State | None:
        """`state` after as few waits for reduces as leave `size` bytes beside what lives; None if none are enough."""
        while state.live + size > self.budget:
            if not state.pending:
                return None
            state = self._wait_oldest(state, index)
        return state

    def _room_for_task(self, state: _State, index: int) -> _State | None:
        return self._make_room(state, index, self.allocates.get(index, 0) + self.tasks[index].memory)

    def _lacks(self, state: _State, index: int) -> bool:
        """Whether task `index` reads what is not gathered yet."""
        return state.gathers < len(self.gathers) and self.gathers[state.gathers].first <= index

    def _is_queued_past(self, state: _State, index: int) -> bool:
        """Whether the link is busy beyond task `index`: what is launched now could as well be launched after it."""
        if index == len(self.tasks) or state.link <= state.now:
            return False
        roomy = self._room_for_task(state, index)
        return roomy is not None and state.link >= self._end_of(roomy, index)

    def _gather(self, state: _State, index: int, stop: int) -> _State:
        gathers, reduces, now, link, replicas, arriving, pending, live, peak, steps = state
        sent = self.gathers[gathers:stop]
        link = max(now, link) + self.workload.latency + sum(launch.seconds for launch in sent)
        live += sum(launch.bytes for launch in sent)
        peak = max(peak, live + self.between[index])
        steps = _Steps(steps, "gather", units_of(sent), index)
        arriving = (*arriving, _Sent(link, gathers, stop))
        return _State(stop, reduces, now, link, replicas, arriving, pending, live, peak, steps)

    def _reduce(self, state: _State, index: int, stop: int) -> _State:
        gathers, reduces, now, link, replicas, arriving, pending, live, peak, steps = state
        sent = self.reduces[reduces:stop]
        link = max(now, link) + self.workload.latency + sum(launch.seconds for launch in sent)
        steps = _Steps(steps, "reduce", units_of(sent), index)
        pending = (*pending, _Sent(link, reduces, stop))
        return _State(gathers, stop, now, link, replicas, arriving, pending, live, peak, steps)

    def _wait_oldest(self, state: _State, index: int) -> _State:
        gathers, reduces, now, link, replicas, arriving, pending, live, peak, steps = state
        sent = self.reduces[pending[0].start : pending[0].stop]
        now = max(now, pending[0].done)
        replicate = sum(launch.replicate for launch in sent)
        if replicate:
            replicas = max(now, replicas) + replicate + self.workload.latency
        live -= sum(launch.bytes for launch in sent)
        steps = _Steps(steps, "wait_reduce", units_of(sent), index)
        return _State(gathers, reduces, now, link, replicas, arriving, pending[1:], live, peak, steps)

    # --- a task ---

    def _after(self, index: int, states: list[_State]) -> Iterator[_State]:
        for state in self._before(index, states):
            roomy = None if self._lacks(state, index) else self._room_for_task(state, index)
            if roomy is not None:
                after = self._compute(roomy, index)
                if self._bound(after, index + 1) <= self.beat:
                    yield after

    def _arrivals(self, state: _State, index: int) -> list[_Sent]:
        """The gathers that task `index` has to wait for."""
        return [sent for sent in state.arriving if self.gathers[sent.start].first <= index]

    def _end_of(self, state: _State, index: int) -> float:
        start = max([state.now, *(sent.done for sent in self._arrivals(state, index))])
        busy = max(state.link, state.replicas)
        return task_end(start, self.tasks[index].seconds, self.workload.contention, busy)

    def _compute(self, state: _State, index: int) -> _State:
        arrivals = self._arrivals(state, index)
        live = state.live + self.allocates.get(index, 0)
        peak = max(state.peak, live + self.tasks[index].memory)
        steps = state.steps
        for sent in arrivals:
            steps = _Steps(steps, "wait", units_of(self.gathers[sent.start : sent.stop]), index)
        if freed := self.frees.get(index):
            steps = _Steps(steps, "free", freed, index + 1)
            live -= sum(self.workload.units[unit].gathered for unit in freed)
        return state._replace(
            now=self._end_of(state, index),
            arriving=state.arriving[len(arrivals) :],
            live=live,
            peak=peak,
            steps=steps,
        )

    def _end(self, state: _State) -> _State | None:
        while state.pending:
            state = self._wait_oldest(state, len(self.tasks))
        if state.reduces < len(self.reduces):
            return None
        return state._replace(now=max(state.now, state.link, state.replicas))

    # --- which states to keep ---

    def _bound(self, state: _State, index: int) -> float:
        """Seconds below which no end can be from here."""
        left, free = self.left[index], max(state.link, state.now)
        bounds = [state.now + left + self.after_ready[state.reduces], free + self.after_gathers[state.gathers]]
        bounds += [sent.done + self.left[self.gathers[sent.start].first] for sent in state.arriving]
        unsent = self.unsent[0][state.gathers] + self.unsent[1][state.reduces]
        return max(*bounds, free + unsent if unsent else state.link)

    def _order(self, state: _State, index: int) -> tuple[float, ...]:
        unsent = self.unsent[0][state.gathers] + self.unsent[1][state.reduces]
        return self._bound(state, index), max(state.link, state.now) + unsent, state.now, state.live

    def _prune(self, found: Iterator[_State], index: int) -> list[_State]:
        states: list[_State] = []
        for state in sorted(found, key=lambda state: self._order(state, index)):
            if not any(self._beats(other, state) for other in states):
                states.append(state)
        return self._narrowed(states, index)

    def _beats(self, one: _State, other: _State) -> bool:
        """Whether nothing can end earlier or fit better from `other` than from `one`."""
        if one.now > other.now or one.gathers < other.gathers or one.reduces < other.reduces:
            return False
        if max(one.link, one.now) > max(other.link, other.now):
            return False
        if max(one.replicas, one.now) > max(other.replicas, other.now) or not _arrives_earlier(one, other):
            return False
        return not (self.bounded or self.hybrid) or self._fits_better(one, other)

    def _fits_better(self, one: _State, other: _State) -> bool:
        """Whether memory that is live, and when reduces give some back, is no worse."""
        if one.live > other.live or one.reduces != other.reduces or len(one.pending) > len(other.pending):
            return False
        last = other.pending[len(other.pending) - len(one.pending) :]
        return all(mine[1:] == its[1:] and mine.done <= its.done for mine, its in zip(one.pending, last, strict=True))


def _arrives_earlier(one: _State, other: _State) -> bool:
    """Whether each gather that `other` has launched is done no later; one that was waited for is done by now."""
    if one.arriving == other.arriving:
        return True
    mine, its = _done(one, other.gathers), _done(other, other.gathers)
    longer = max(len(mine), len(its))
    mine, its = [one.now] * (longer - len(mine)) + mine, [other.now] * (longer - len(its)) + its
    return all(map(le, mine, its))


def _done(state: _State, stop: int) -> list[float]:
    """When the launches before `stop` that are under way are done."""
    return [sent.done for sent in state.arriving for at in range(sent.start, sent.stop) if at < stop]
