"""What a plan may launch: gathers and reduces in their order, and up to which neighbours together."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from math import frexp, inf
from typing import NamedTuple

from fsdp_compile.passes.plan.workload import Workload


class Launch(NamedTuple):
    """What may be launched for a unit: a gather before task `first`, its first reader; a reduce after it."""

    unit: int
    first: int
    bytes: int
    seconds: float  # on the link, without latency
    replicate: float = 0.0


def gathers_of(workload: Workload, keep: frozenset[int]) -> list[Launch]:
    """The gathers, by first reader."""
    costs = [(unit, first, workload.units[unit]) for unit, first, _ in workload.gathers(keep)]
    return [Launch(unit, first, cost.gathered, cost.gather) for unit, first, cost in costs]


def reduces_of(workload: Workload) -> list[Launch]:
    """The reduces, in the order in which they get ready."""
    costs = [(unit, ready, workload.units[unit]) for unit, _, ready in workload.reduces()]
    return [Launch(unit, ready, cost.packed, cost.reduce, cost.replicate) for unit, ready, cost in costs]


def reaches(workload: Workload, gathers: list[Launch], budget: float, merge: int) -> list[int]:
    """Up to which of `gathers` each one can be launched at most: in their order, within `budget` bytes.

    Beside the first reader of each live all that are launched with it and read later.
    """
    sums = [0, *accumulate(launch.bytes for launch in gathers)]
    rooms = [room_for_gathers(workload, launch.first, budget) for launch in gathers]
    limits = [before + room for before, room in zip(sums, rooms, strict=False)]
    found, stop = [], 0
    for start in range(len(gathers)):
        stop = max(stop, start + 1)
        limit = min(limits[start:stop])
        while stop < min(start + merge, len(gathers)) and sums[stop + 1] <= min(limit, limits[stop]):
            limit = min(limit, limits[stop])
            stop += 1
        found.append(stop)
    return found


def reaches_back(workload: Workload, reduces: list[Launch], budget: float, merge: int) -> list[int]:
    """From which of `reduces` on those before each number can be one launch, at best: see `reaches`.

    Beside the last writer of each live all that are launched with it and were ready before, and what that task reads.
    """
    sums = [0, *accumulate(launch.bytes for launch in reduces)]
    found, start = [0], 0
    for stop, launch in enumerate(reduces, 1):
        task = workload.tasks[launch.first]
        beside = task.memory + sum(workload.units[unit].gathered for unit in task.reads)
        room = budget - beside
        while start < stop - 1 and (sums[stop] - sums[start] > room or stop - start > merge):
            start += 1
        found.append(start)
    return found


def room_for_gathers(workload: Workload, index: int, budget: float) -> float:
    """Bytes that gathered buffers can have beside a task and what it writes."""
    task = workload.tasks[index]
    return budget - task.memory - sum(workload.units[unit].packed for unit in task.writes)


def opens_of(workload: Workload, gathers: list[Launch], reduces: list[Launch], slack: float) -> list[int]:
    """The task before which each gather may be issued first.

    That is no earlier than it has to be if everything computes without a stop, and so many times what it takes.
    """
    starts = [0.0, *accumulate(task.seconds for task in workload.tasks)]
    jobs = [(starts[launch.first], number, launch) for number, launch in enumerate(gathers)]
    jobs += [(starts[launch.first + 1] + launch.seconds, -1, launch) for launch in reduces]
    opens, latest = [0] * len(gathers), inf
    for until, number, launch in sorted(jobs, key=lambda job: job[:2], reverse=True):
        latest = min(latest, until) - launch.seconds - workload.latency
        if number >= 0:
            split = workload.backward if launch.first >= workload.backward else 0
            opens[number] = max(split, bisect_right(starts, latest - slack * (launch.seconds + workload.latency)) - 1)
            if number and gathers[number - 1].first < workload.backward <= launch.first:
                latest = inf  # nothing of backward is launched in forward
    return opens


def on_grid(workload: Workload) -> Workload:
    """`workload` with all seconds rounded to multiples of 2^-50 of the step: sums of them are exact in any order."""
    total = sum(task.seconds for task in workload.tasks)
    total += sum(2 * unit.gather + unit.reduce + unit.replicate + 4 * workload.latency for unit in workload.units)
    grid = 2.0 ** (frexp(total)[1] - 50)

    def rounded(seconds: float) -> float:
        return round(seconds / grid) * grid

    return replace(
        workload,
        tasks=tuple(replace(task, seconds=rounded(task.seconds)) for task in workload.tasks),
        units=tuple(
            replace(unit, gather=rounded(unit.gather), reduce=rounded(unit.reduce), replicate=rounded(unit.replicate))
            for unit in workload.units
        ),
        latency=rounded(workload.latency),
    )


def suffix_sums(numbers: Iterable[float]) -> list[float]:
    """The sum from each number on, and 0 at the end."""
    return list(accumulate(reversed(list(numbers)), initial=0.0))[::-1]
