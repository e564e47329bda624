"""The best plan for given units to keep unsharded: a search from task to task.

This is list scheduling of one computing stream and one link within a budget of memory. Tasks compute in a fixed order,
gathers are launched in the order of their first readers and reduces in the order in which they get ready, so a plan is
a choice, before each task, of how many gathers and reduces to launch, several as one if that saves latency.

    run            states before task 0, 1, 2, ...
      _expand      every launch that makes sense before the task
      _compute     the task itself: wait for what it reads, take memory, free what is not read again
      _prune       drop dominated states and those whose lower bound exceeds the incumbent; keep the best

A state is dominated if another has launched as much, is no later on any resource and needs no more memory. Without a
beam width the search is exact. With one, the states of the least lower bound stay, which is a beam search (Lowerre:
The Harpy speech recognition system, 1976), and gathers are launched within a limited prefetch distance.

Three choices cost nothing and make the search small. A launch that the link would only queue until after the next task
may as well be issued later. A reduce that is done may as well be waited for. A reduce that is not done is not waited
for until its memory is needed, unless an all-reduce over replicas follows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from fsdp_compile.passes.plan.bound import Launch, gathers_of, reaches, reaches_back, reduces_of
from fsdp_compile.passes.plan.plan import Kind, Plan, Step, simulate
from fsdp_compile.passes.plan.workload import Workload

PREFETCH_DISTANCE = 8.0  # with a beam width, gathers are launched so many times their duration early at most


@dataclass(frozen=True)
class Candidate:
    """A plan, the units that it keeps unsharded, its seconds and most live bytes."""

    plan: Plan
    keep: frozenset[int]
    seconds: float
    peak: int

    @classmethod
    def of(cls, workload: Workload, plan: Plan, keep: frozenset[int]) -> "Candidate":
        """What `plan` takes, by the simulator."""
        timeline = simulate(workload, plan)
        return cls(plan, keep, timeline.makespan, timeline.peak)


class _Launches(NamedTuple):
    """A linked list, last first, that states share: a launch or wait of units `start` to `stop` before task `at`."""

    before: "_Launches | None"
    kind: Kind
    start: int
    stop: int
    at: int


class _State(NamedTuple):
    """What has happened before some task. Tens of thousands are made for a deep model: tuples are the cheapest."""

    gathers: int  # launched
    reduces: int  # launched
    now: float  # until when the computing stream is busy
    link: float  # likewise
    replicas: float  # likewise, the link between replicas
    done: tuple[float, ...]  # when each gather ends that no task has read yet
    pending: tuple[tuple[float, int, int], ...]  # end, first and last + 1 of each launch of reduces not waited for
    live: int  # bytes of gathered buffers and reduce-scatter inputs
    least: float  # seconds before which no step can end, by the gathers that are launched
    launches: _Launches | None


def beam_search(
    workload: Workload,
    keep: frozenset[int],
    budget: int | None,
    *,
    coalesce: int = 1,
    beam_width: int | None = None,
    incumbent: float = inf,
) -> Candidate | None:
    """The shortest plan that keeps `keep`; None if all take longer than `incumbent` or exceed the budget.

    Args:
        workload: what the step computes.
        keep: units whose gathered buffers stay between forward and backward.
        budget: bytes that may live at most; None: no limit.
        coalesce: how many neighbours one launch may take.
        beam_width: states that are kept from task to task; None: all that are not dominated.
        incumbent: seconds of a plan that is known; the search ends where it cannot find one as
            short, and else finds what it finds without.
    """
    search = _BeamSearch(workload, keep, inf if budget is None else budget, coalesce, beam_width, incumbent)
    end = search.run()
    return None if end is None else Candidate.of(workload, search.plan_of(end), keep)


class _BeamSearch:
    def __init__(
        self,
        workload: Workload,
        keep: frozenset[int],
        budget: float,
        coalesce: int,
        beam_width: int | None,
        incumbent: float,
    ) -> None:
        self.workload, self.between, self.latency = workload, workload.between, workload.latency
        self.budget, self.beam_width, self.incumbent = budget, beam_width, incumbent * (1 + 1e-12)
        # How many units one launch may take; of many, powers of 2 alone.
        self.sizes = [each for each in range(1, coalesce + 1) if each <= 4 or beam_width is None or not each & each - 1]
        self.hybrid = any(unit.replicate for unit in workload.units)
        # Whether memory, or when reduces are waited for, matters.
        self.strict = budget < inf or self.hybrid or workload.forward > 0
        gathers, reduces = gathers_of(workload, keep), reduces_of(workload)
        self.gathers, self.reduces = gathers, reduces
        self.opens = [0] * len(gathers) if beam_width is None else _opens(workload, gathers, reduces)

        # Sums, so that those of neighbours are differences.
        self.first = [launch.first for launch in gathers]
        self.early = [launch.early for launch in gathers]
        self.free = [launch.free for launch in gathers]
        self.ready = [launch.first for launch in reduces]
        self.read = [bisect_left(self.first, index) for index in range(len(workload.tasks) + 2)]
        self.gather_seconds = [0.0, *accumulate(launch.seconds for launch in gathers)]
        self.gather_bytes = [0, *accumulate(launch.bytes for launch in gathers)]
        self.reduce_seconds = [0.0, *accumulate(launch.seconds for launch in reduces)]
        self.reduce_bytes = [0, *accumulate(launch.bytes for launch in reduces)]
        self.replicate = [0.0, *accumulate(launch.replicate for launch in reduces)]

        # What each task takes, needs, allocates and frees.
        tasks, units = workload.tasks, workload.units
        self.frees: list[list[int]] = [[] for _ in tasks]
        held = workload.held(keep)
        freed = [(unit, last) for unit, _, last in workload.gathers(keep) if unit not in held]
        for unit, last in (*held.items(), *freed):
            self.frees[last].append(unit)
        self.freed = [sum(units[unit].gathered for unit in each) for each in self.frees]
        self.allocated = [0] * len(tasks)
        for unit, first, _ in workload.reduces():
            self.allocated[first] += units[unit].packed
        self.needs = [task.memory + more for task, more in zip(tasks, self.allocated, strict=True)]
        self.seconds = [task.seconds for task in tasks]
        self.norms = [task.all_reduce for task in tasks]
        self.needed = [0] * len(tasks)  # how many reduces have to be done
        for count, launch in enumerate(reduces, 1):
            if launch.needed >= 0:
                self.needed[launch.needed] = count
        self.needed = list(accumulate(self.needed, max))
        self.begin = self._begin(gathers, sum(units[unit].gathered for unit in held))

        # What follows at least: all computing; the link from each gather and reduce on; all from their tasks on.
        self.left = _suffix_sums(map(sum, zip(self.seconds, self.norms, strict=True)))
        stops = reaches(workload, gathers, budget, coalesce)
        counts = [0] * (len(gathers) + 1)  # launches from each gather on
        for start in range(len(stops) - 1, -1, -1):
            counts[start] = 1 + counts[stops[start]]
        self.unsent_gathers = self._unsent(gathers, counts)
        starts, stop = reaches_back(workload, reduces, budget, coalesce), len(reduces)
        counts = [0] * (len(reduces) + 1)
        while stop:  # as few as possible, the last ones first
            counts[starts[stop] : stop] = [1 + counts[stop]] * (stop - starts[stop])
            stop = starts[stop]
        self.unsent_reduces = self._unsent(reduces, counts)
        self.after_gathers, self.after_ready = [0.0], [0.0]
        for launch in reversed(gathers):
            self.after_gathers.append(launch.seconds + max(self.left[launch.first], self.after_gathers[-1]))
        after = 0.0
        for launch, tail in zip(reversed(reduces), reversed(self.unsent_reduces[:-1]), strict=True):
            if launch.needed >= 0:  # the tasks from there on follow it
                after = launch.seconds + max(after, self.left[launch.needed])
                tail = max(tail, after)
            self.after_ready.append(max(self.after_ready[-1], tail - self.left[launch.first + 1]))
        self.after_gathers.reverse()
        self.after_ready.reverse()

    def _begin(self, gathers: list[Launch], held: int) -> _State:
        """What has happened before the first task: the first gathers may have been launched before the step."""
        link, done, live, launches = 0.0, list[float](), held, None
        for index, launch in enumerate(gathers):
            arrives = self.workload.units[launch.unit].arrives
            if arrives is None:
                break
            link = max(link, arrives)
            done.append(link)
            live += launch.bytes
            launches = _Launches(launches, "gather", index, index + 1, 0)
        return _State(len(done), 0, 0.0, link, 0.0, tuple(done), (), live, 0.0, launches)

    def _unsent(self, launches: list[Launch], counts: list[int]) -> list[float]:
        sums = _suffix_sums(launch.seconds for launch in launches)
        return [seconds + self.latency * count for seconds, count in zip(sums, counts, strict=True)]

    def run(self) -> _State | None:
        """The state after the last task and collective of the shortest plan."""
        states = [self.begin]
        for index in range(len(self.seconds)):
            after = (self._compute(state, index) for state in self._expand(index, states))
            states = self._prune((state for state in after if state is not None), index + 1)
        ends = [self._end(state) for state in self._expand(len(self.seconds), states)]
        return min((end for end in ends if end is not None), key=lambda end: end.now, default=None)

    def plan_of(self, state: _State) -> Plan:
        """The plan that leads to `state`. Before a task, frees come first, then launches, then waits for gathers."""
        steps: list[tuple[tuple[int, int], Step]] = []

        def add(kind: Kind, units: Iterable[int], at: int, order: int) -> None:
            steps.append(((at, order), Step(kind, tuple(self.workload.units[unit].name for unit in units), at)))

        node = state.launches
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

    def _expand(self, index: int, states: list[_State]) -> list[_State]:
        """All that can be reached from `states` by launches and waits before task `index`."""
        seen: set[tuple[object, ...]] = set()
        reached: list[_State] = []
        while states:
            children: list[_State] = []
            for state in states:
                while state.pending and state.pending[0][0] <= state.now:
                    state = self._wait_oldest(state, index)
                if state[:8] not in seen:
                    seen.add(state[:8])
                    reached.append(state)
                    children.extend(self._launch(state, index))
            if self.beam_width is not None and len(children) > self.beam_width:
                children.sort(key=lambda state: self._order(state, index))
                children = self._best(children)
            states = children
        return reached

    def _launch(self, state: _State, index: int) -> Iterator[_State]:
        """What one launch, or the wait for one reduce, makes of `state`."""
        if self.hybrid and state.pending:
            yield self._wait_oldest(state, index)
        lacks = state.gathers < len(self.first) and self.first[state.gathers] <= index
        lacks |= state.gathers < len(self.first) and self.early[state.gathers] == index
        if not lacks and index < len(self.seconds) and state.link > state.now and not self._waits(state, index):
            roomy = self._room_for(state, self.needs[index], index)
            if roomy is not None and state.link >= self._end_of(roomy, index):
                return  # the link is busy beyond the task: what is launched now may as well be launched after it
        for size in self.sizes:
            stop = state.reduces + size
            if stop > len(self.ready) or self.ready[stop - 1] >= index:
                break
            yield self._launch_reduces(state, stop, index)
        for size in self.sizes:
            stop = state.gathers + size
            if stop > len(self.first) or self.opens[stop - 1] > index:
                break
            if index < self.free[stop - 1] and (size > 1 or index != self.early[stop - 1]):
                break
            more = self.gather_bytes[stop] - self.gather_bytes[state.gathers]
            roomy = self._room_for(state, more + self.between[index], index)
            if roomy is None:
                break
            yield self._launch_gathers(roomy, stop, more, index)

    def _launch_reduces(self, state: _State, stop: int, index: int) -> _State:
        gathers, start, now, link, replicas, done, pending, live, least, launches = state
        seconds = self.latency + self.reduce_seconds[stop] - self.reduce_seconds[start]
        end = (now if now > link else link) + seconds
        launches = _Launches(launches, "reduce", start, stop, index)
        return _State(gathers, stop, now, end, replicas, done, (*pending, (end, start, stop)), live, least, launches)

    def _launch_gathers(self, state: _State, stop: int, more: int, index: int) -> _State:
        start, reduces, now, link, replicas, done, pending, live, least, launches = state
        seconds = self.latency + self.gather_seconds[stop] - self.gather_seconds[start]
        end = (now if now > link else link) + seconds
        done += (end,) * (stop - start)
        least = max(least, end + self.left[self.first[start]])
        launches = _Launches(launches, "gather", start, stop, index)
        return _State(stop, reduces, now, end, replicas, done, pending, live + more, least, launches)

    def _wait_oldest(self, state: _State, index: int) -> _State:
        gathers, reduces, now, link, replicas, done, pending, live, least, launches = state
        end, start, stop = pending[0]
        now = max(now, end)
        replicate = self.replicate[stop] - self.replicate[start]
        if replicate:
            replicas = max(now, replicas) + replicate + self.latency
        live -= self.reduce_bytes[stop] - self.reduce_bytes[start]
        launches = _Launches(launches, "wait_reduce", start, stop, index)
        return _State(gathers, reduces, now, link, replicas, done, pending[1:], live, least, launches)

    def _room_for(self, state: _State, more: int, index: int) -> _State | None:
        """`state` after as few waits for reduces as leave room for `more` bytes; None if there is none."""
        while state.live + more > self.budget:
            if not state.pending:
                return None
            state = self._wait_oldest(state, index)
        return state

    # --- a task ---

    def _waits(self, state: _State, index: int) -> bool:
        """Whether a task waits for reduces."""
        needed = self.needed[index]
        return state.reduces < needed or any(start < needed for _, start, _ in state.pending)

    def _end_of(self, state: _State, index: int) -> float:
        reads = self.read[index + 1] - self.read[index]
        return (max(state.now, state.done[reads - 1]) if reads else state.now) + self.seconds[index]

    def _compute(self, state: _State, index: int) -> _State | None:
        if state.gathers < self.read[index + 1]:
            return None
        if state.reduces < self.needed[index]:
            return None
        while state.pending and state.pending[0][1] < self.needed[index]:
            state = self._wait_oldest(state, index)
        roomy = self._room_for(state, self.needs[index], index)
        if roomy is None:
            return None
        if self.norms[index]:
            ready = max(roomy.now, roomy.link) + self.norms[index]
            roomy = roomy._replace(now=ready, link=ready)
        if self.hybrid and self.needed[index]:
            roomy = roomy._replace(now=max(roomy.now, roomy.replicas))
        done = roomy.done[self.read[index + 1] - self.read[index] :]
        live = roomy.live + self.allocated[index] - self.freed[index]
        return roomy._replace(now=self._end_of(roomy, index), done=done, live=live)

    def _end(self, state: _State) -> _State | None:
        while state.pending:
            state = self._wait_oldest(state, len(self.seconds))
        if state.reduces < len(self.ready):
            return None
        return state._replace(now=max(state.now, state.link, state.replicas))

    # --- which states to keep ---

    def _order(self, state: _State, index: int) -> tuple[float, float, float, int]:
        """Seconds below which no step can end from here; and what else speaks for a state."""
        gathers, reduces, now, link, _, _, _, live, least, _ = state
        free = now if now > link else link
        unsent = self.unsent_gathers[gathers] + self.unsent_reduces[reduces]
        computed = now + self.left[index] + self.after_ready[reduces]
        carried = free + unsent if unsent else link
        return max(least, computed, free + self.after_gathers[gathers], carried), free + unsent, now, live

    def _prune(self, reached: Iterable[_State], index: int) -> list[_State]:
        ordered = sorted(((self._order(state, index), state) for state in reached), key=lambda each: each[0])
        if self.beam_width is None:
            ordered = [each for each in ordered if each[0][0] <= self.incumbent]
        elif ordered and ordered[0][0][0] > self.incumbent:  # see Note [Why more memory is never slower]
            return []
        states: list[_State] = []
        for rank, (_, state) in enumerate(ordered):
            if len(states) == self.beam_width:
                return self._best([*states, *(each for _, each in ordered[rank:])])
            if not any(self._dominates(other, state) for other in states):
                states.append(state)
        return states

    def _best(self, ordered: list[_State]) -> list[_State]:
        """The first states, and of the others the one with the least memory: some plan fits if that one does."""
        return [
            *ordered[: self.beam_width],
            min(ordered[self.beam_width :], key=lambda state: (state.live, -state.reduces)),
        ]

    def _dominates(self, one: _State, other: _State) -> bool:
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
        if not self.strict or one.pending == other.pending:
            return True
        more = len(other.pending) - len(one.pending)  # no more reduces to wait for, the same launches, none done later
        return more >= 0 and all(
            mine[1:] == its[1:] and mine[0] <= its[0]
            for mine, its in zip(one.pending, other.pending[more:], strict=True)
        )


def _opens(workload: Workload, gathers: list[Launch], reduces: list[Launch]) -> list[int]:
    """The task before which each gather may be issued first.

    That is no earlier than it has to be if everything computes without a stop, and the prefetch distance.
    """
    starts = [0.0, *accumulate(task.seconds for task in workload.tasks)]
    jobs = [(starts[launch.first], index, launch) for index, launch in enumerate(gathers)]
    jobs += [(starts[launch.first + 1] + launch.seconds, -1, launch) for launch in reduces]
    opens, latest = [0] * len(gathers), inf
    for until, index, launch in sorted(jobs, key=lambda job: job[:2], reverse=True):
        seconds = launch.seconds + workload.latency
        latest = min(latest, until) - seconds
        if index >= 0:
            opens[index] = bisect_right(starts, latest - PREFETCH_DISTANCE * seconds) - 1
            if opens[index] < launch.free:
                opens[index] = launch.early if launch.early >= 0 else launch.free
            if launch.early < 0 and index and gathers[index - 1].first < launch.free <= launch.first:
                latest = inf  # nothing of backward is launched in forward
    return opens


def _suffix_sums(numbers: Iterable[float]) -> list[float]:
    """The sum from each number on, and 0 at the end."""
    return list(accumulate(reversed(list(numbers)), initial=0.0))[::-1]
