"""Lower bounds: the smallest memory and the shortest step that any plan can have.

The link is one machine and computing another; each bound is a chain of work that must follow in sequence, as in the
bounds of two-machine flow shops (Johnson: Optimal two- and three-stage production schedules, 1954).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import NamedTuple

from fsdp_compile.passes.plan.update import end_of_backward
from fsdp_compile.passes.plan.workload import Workload


class Launch(NamedTuple):
    """What may be launched for a unit: a gather before task `first`, its first reader; a reduce after it."""

    unit: int
    first: int
    bytes: int
    seconds: float  # on the link, without latency
    replicate: float = 0.0
    early: int = -1  # before which task a gather may be issued alone, behind updates; -1: before none
    free: int = 0  # from which task on it may be issued
    needed: int = -1  # by which task a reduce has to be done; -1: by none


def gathers_of(workload: Workload, keep: frozenset[int]) -> list[Launch]:
    """The gathers, by first reader. Behind updates each is issued after those before it, or none is."""
    launches, latest = list[Launch](), 0
    for unit, first, _ in workload.gathers(keep):
        cost, (early, free) = workload.units[unit], workload.first_issue(unit, first)
        if workload.forward and free:
            latest = max(early, latest) if early >= 0 and latest >= 0 else -1
            early = latest
        launches.append(Launch(unit, first, cost.gathered, cost.gather, early=early, free=free))
    return launches


def reduces_of(workload: Workload) -> list[Launch]:
    """The reduces, in the order in which they get ready."""
    costs = [(unit, ready, workload.units[unit]) for unit, _, ready in workload.reduces()]
    needed = {unit: at for at, task in reversed([*enumerate(workload.tasks)]) for unit in task.reduced}
    return [
        Launch(unit, ready, cost.packed, cost.reduce, cost.replicate, needed=needed.get(unit, -1))
        for unit, ready, cost in costs
    ]


def reaches(workload: Workload, gathers: list[Launch], budget: float, merge: int) -> list[int]:
    """Up to which of `gathers` each one can be launched at most: in their order, within `budget` bytes.

    Beside the first reader of each live all that are launched with it and read later.
    """
    sums = [0, *accumulate(launch.bytes for launch in gathers)]
    rooms = [room_for_gathers(workload, launch.first, budget) for launch in gathers]
    limits = [before + room for before, room in zip(sums, rooms, strict=False)]
    farthest, stop = [], 0
    for start in range(len(gathers)):
        stop = max(stop, start + 1)
        limit = min(limits[start:stop])
        while stop < min(start + merge, len(gathers)) and sums[stop + 1] <= min(limit, limits[stop]):
            limit = min(limit, limits[stop])
            stop += 1
        farthest.append(stop)
    return farthest


def reaches_back(workload: Workload, reduces: list[Launch], budget: float, merge: int) -> list[int]:
    """From which of `reduces` on those before each number can be one launch, at best: see `reaches`.

    Beside the last writer of each live all that are launched with it and were ready before, and what that task reads.
    """
    sums = [0, *accumulate(launch.bytes for launch in reduces)]
    earliest, start = [0], 0
    for stop, launch in enumerate(reduces, 1):
        task = workload.tasks[launch.first]
        beside = task.memory + sum(workload.units[unit].gathered for unit in task.reads)
        room = budget - beside
        while start < stop - 1 and (sums[stop] - sums[start] > room or stop - start > merge):
            start += 1
        earliest.append(start)
    return earliest


def room_for_gathers(workload: Workload, index: int, budget: float) -> float:
    """Bytes that gathered buffers can have beside a task and what it writes."""
    task = workload.tasks[index]
    return budget - task.memory - sum(workload.units[unit].packed for unit in task.writes)


def smallest_budget(workload: Workload, keep: frozenset[int] | None = None) -> int:
    """Bytes that live at once if each unit is gathered when it is read, reduced and waited for when it is ready.

    Every plan needs these: beside a task live what it reads and what it, or one before it, has begun to write.

    Args:
        workload: the step.
        keep: units whose gathered buffers stay between forward and backward; None: only those that have to.
    """
    return max(_least_memory(workload, workload.must_keep if keep is None else keep), default=0)


def _least_memory(workload: Workload, keep: frozenset[int]) -> list[int]:
    """The same for each task."""
    costs = [(workload.units[unit], first, last) for unit, first, last in workload.gathers(keep)]
    held = [(first if unit.arrives is None else 0, last, unit.gathered) for unit, first, last in costs]
    held += [(0, last, workload.units[unit].gathered) for unit, last in workload.held(keep).items()]
    held += [(first, last, workload.units[unit].packed) for unit, first, last in workload.reduces()]
    changes = [0] * (len(workload.tasks) + 1)
    for first, last, size in held:
        changes[first] += size
        changes[last + 1] -= size
    return [task.memory + more for task, more in zip(workload.tasks, accumulate(changes), strict=False)]


def lower_bound(
    workload: Workload, keep: frozenset[int] | None = None, budget: int | None = None, merge: int | None = None
) -> float:
    """Seconds below which no plan can be: backward follows forward, the link carries one launch at a time.

    With g1 the first gather, A all gathers, C all computing, R all reduces, r the last one to get ready, f and b for
    forward and backward, this is at least `g1 + max(Cf, Af - g1) + max(Cb, Ab + R - r) + r`.

    In a step with updates, of which the first needs the last reduce, it is at least `max(Cb, Ab + R - r) + r`, and what
    the updates and the forward behind them take: computing, and each gather from its unit's update on.

    A budget adds to that. What is read after a task of backward is gathered after it, unless it fits in beside it, kept
    or gathered early. And what one coalesced launch gathers lives at once, so that there are more launches than one.
    That much holds of plans that launch gathers in the order of their first reader, reduces in the order in which they
    get ready.

    Args:
        workload: the step.
        keep: units whose gathered buffers stay; None: whichever the planner may choose.
        budget: bytes that may live at once; None: no limit.
        merge: how many units one launch may gather or reduce; None: any number.
    """
    limit, most = inf if budget is None else budget, merge or len(workload.units)
    if workload.forward:
        return max(_of_repeated(workload, keep, limit, most))
    return _Bound(workload, keep, limit, most).seconds()


def _of_repeated(workload: Workload, keep: frozenset[int] | None, budget: float, merge: int) -> Iterator[float]:
    """Lower bounds of a step with updates: what precedes the first task that needs a reduce, and what follows it."""
    tasks, latency = workload.tasks, workload.latency
    keep = workload.must_keep | set(workload.may_keep) if keep is None else keep
    behind = range(end_of_backward(workload), len(tasks))
    begin = next((at for at in behind if tasks[at].reduced or tasks[at].updates), workload.forward)
    left = list(accumulate((task.seconds + task.all_reduce for task in reversed(tasks)), initial=0.0))[::-1]
    gathers, reduces = gathers_of(workload, keep), reduces_of(workload)
    before = _Bound(replace(workload, tasks=tasks[:begin], forward=0), keep, budget, merge)
    ends = before.ends()
    done, after = 0.0, left[begin]
    for launch in (each for each in gathers if each.first >= workload.forward):
        done = max(done, left[begin] - left[launch.free if launch.early < 0 else launch.early]) + launch.seconds
        done += latency if merge == 1 else 0.0
        after = max(after, done + (latency if merge > 1 else 0.0) + left[launch.first])
    needs_last = bool(reduces) and reduces[-1].needed == begin
    yield (max(before.of_backward()) if needs_last else ends[-1]) + after
    for launch in reduces:
        if launch.needed >= 0:
            last = launch.seconds + latency + (launch.replicate + latency if launch.replicate else 0.0)
            yield ends[launch.first + 1] + last + left[launch.needed]
    yield sum(launch.seconds for launch in (*gathers, *reduces)) + latency * bool(gathers or reduces)


class _Bound:
    def __init__(self, workload: Workload, keep: frozenset[int] | None, budget: float, merge: int) -> None:
        self.workload, self.units, self.latency, self.merge = workload, workload.units, workload.latency, merge
        self.budget, split = budget, workload.backward
        self.done = [0.0, *accumulate(task.seconds for task in workload.tasks)]
        stays = workload.must_keep if keep is None else keep
        gathers = gathers_of(workload, workload.must_keep | set(workload.may_keep) if keep is None else keep)
        self.forward = [launch for launch in gathers if launch.first < split]
        self.backward = [launch for launch in gathers if launch.first >= split]
        reduces = reduces_of(workload)
        self.ready, self.reduces = [launch.first for launch in reduces], reduces[::-1]
        back = reaches_back(workload, reduces, budget, merge)
        self.reaches_of_reduces = [len(self.reduces) - start for start in reversed(back[1:])]
        self.tails = self._tails()
        self.rooms = [budget - least for least in _least_memory(workload, stays)]
        beside = (room_for_gathers(workload, index, budget) for index in range(split, len(workload.tasks)))
        self.most_room = list(accumulate(beside, max))
        self.late = [(unit, first) for unit, (first, _) in workload.reads_in_backward.items() if unit not in stays]

    def seconds(self) -> float:
        return self._of_forward() + max(self.of_backward())

    def _of_forward(self) -> float:
        split = self.workload.backward
        after = [self.done[split] - self.done[launch.first] for launch in self.forward]
        least = self._least_end(self.forward, after, reaches(self.workload, self.forward, self.budget, self.merge))
        return max(self.done[split], least)

    def of_backward(self) -> Iterator[float]:
        ends = self.ends()
        yield ends[-1]
        split = self.workload.backward
        after = [ends[launch.first + 1 - split] for launch in self.reduces]
        replicas = min((launch.replicate for launch in self.reduces), default=0.0)
        least = self._least_end(self.reduces, after, self.reaches_of_reduces)
        yield least + (replicas + self.latency if replicas else 0.0)
        for index in range(split, len(self.done) - 1):
            unsent = len(self.reduces) - bisect_left(self.ready, index)
            yield ends[index + 1 - split] + self._forced(index) + self.tails[unsent]
        moved = sum(launch.seconds for launch in self.backward) + self.latency * bool(self.backward)
        yield moved + self.tails[-1]

    def _least_end(self, launches: list[Launch], after: list[float], reaches: list[int]) -> float:
        """When all ends at the earliest if `launches` follow each other, and `after` some seconds each: neighbours as
        one launch cost one latency, and are followed by what follows the first of them.
        """
        sums = [0.0, *accumulate(launch.seconds for launch in launches)]
        singly = [moved + least for moved, least in zip(sums[1:], after, strict=True)]
        least = max(singly, default=-self.latency) + self.latency
        most = max((each + self.latency * count for count, each in enumerate(singly, 1)), default=0.0)
        if _can_end(sums, after, reaches, self.latency, least):
            return least
        while most - least > 1e-6 * self.latency:
            middle = (least + most) / 2
            least, most = (least, middle) if _can_end(sums, after, reaches, self.latency, middle) else (middle, most)
        return least

    def ends(self) -> list[float]:
        """When backward, and each task of it, ends at the earliest after backward began: all gathers up to any one,
        then the tasks from its first reader on.
        """
        split, queue = self.workload.backward, self.backward[::-1]
        counts = _counts(reaches(self.workload, self.backward, self.budget, self.merge))
        ends, late, moved = [0.0], 0.0, 0.0
        for index in range(split, len(self.done) - 1):
            while queue and queue[-1].first <= index:
                launch = queue.pop()
                moved += launch.seconds
                latencies = self.latency * counts[len(self.backward) - len(queue)]
                late = max(late, moved + latencies - (self.done[launch.first] - self.done[split]))
            ends.append(late + self.done[index + 1] - self.done[split])
        return ends

    def _tails(self) -> list[float]:
        """For the last reduces, by their number: what the link takes, and the all-reduce over replicas that follows."""
        counts, tails, moved, after = _counts(self.reaches_of_reduces), [0.0], 0.0, inf
        for launch, count in zip(self.reduces, counts[1:], strict=True):
            moved += launch.seconds
            after = min(after, launch.replicate)
            tails.append(moved + self.latency * count + (after + self.latency if after else 0.0))
        return tails

    def _forced(self, index: int) -> float:
        """Seconds of gathers that cannot be launched before task `index` of backward is done: no room beside it."""
        left = [each for each in self.late if each[1] > index]
        sizes = [self.units[unit].gathered for unit, _ in left]
        if sum(sizes) <= self.rooms[index]:
            return 0.0
        costs = [self.units[unit].gather + self.latency * self._part(unit, first) for unit, first in left]
        return sum(costs) - _most_worth(costs, sizes, self.rooms[index])

    def _part(self, unit: int, first: int) -> float:
        """What part of a launch of backward a gather is at least, by its bytes beside the launch's first reader."""
        size, room = self.units[unit].gathered, self.most_room[first - self.workload.backward]
        return size / room if size < room and self.merge > 1 else 1.0


def _can_end(sums: list[float], after: list[float], reaches: list[int], latency: float, seconds: float) -> bool:
    """Whether launches can end within some seconds: each takes as many as it may, see `_least_end`."""
    start, moved = 0, 0.0
    while start < len(after):
        moved += latency
        stop = min(reaches[start], bisect_right(sums, seconds - moved - after[start]) - 1)
        if stop <= start:
            return False
        start = stop
    return True


def _counts(reaches: list[int]) -> list[int]:
    """How many launches the first units take at least, by their number."""
    counts, start = [0], 0
    while start < len(reaches):
        counts += [counts[-1] + 1] * (reaches[start] - start)
        start = reaches[start]
    return counts


def _most_worth(worths: list[float], sizes: list[int], room: float) -> float:
    """The most that things of these sizes within `room` can be worth: at most, by fractions and by their count."""
    fractional, rest = 0.0, room
    for worth, size in sorted(zip(worths, sizes, strict=True), key=lambda each: -each[0] / max(each[1], 1)):
        fractional += worth * min(1.0, rest / size) if size else worth
        rest -= size
        if rest <= 0:
            break
    count = bisect_right([*accumulate(sorted(sizes))], room)
    return min(fractional, sum(sorted(worths, reverse=True)[:count]))
