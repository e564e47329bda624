"""What a plan may launch: gathers and reduces in their order, small neighbours together."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from fsdp_compile.passes.workload import Workload


class Launch(NamedTuple):
    """What may be launched: units from `first` on, before it for gathers (their reader), after it for reduces."""

    units: tuple[int, ...]
    first: int
    bytes: int
    seconds: float  # on the link, without latency
    replicate: float = 0.0


def gathers_of(workload: Workload, kept: frozenset[int], together: float) -> list[Launch]:
    """The gathers, by first reader; neighbours of one direction together, up to `together` seconds of transfer."""
    launches: list[Launch] = []
    for unit, first, _ in workload.gathers(kept):
        cost = workload.units[unit]
        launch = Launch((unit,), first, cost.gathered, cost.gather)
        if launches and (launches[-1].first < workload.backward) == (first < workload.backward):
            launch = _joined(launches, launch, launches[-1].first, together)
        launches.append(launch)
    return launches


def reduces_of(workload: Workload, together: float) -> list[Launch]:
    """The reduces, in the order in which they get ready; neighbours likewise."""
    launches: list[Launch] = []
    for unit, _, ready in workload.reduces():
        cost = workload.units[unit]
        launch = Launch((unit,), ready, cost.packed, cost.reduce, cost.replicate)
        launches.append(_joined(launches, launch, ready, together) if launches else launch)
    return launches


def _joined(launches: list[Launch], launch: Launch, first: int, together: float) -> Launch:
    """`launch`, joined by the last of `launches`, whose place it takes, if both fit into `together` seconds."""
    if launches[-1].seconds + launch.seconds > together:
        return launch
    last = launches.pop()
    return Launch(
        (*last.units, *launch.units),
        first,
        last.bytes + launch.bytes,
        last.seconds + launch.seconds,
        last.replicate + launch.replicate,
    )


def opens_of(workload: Workload, gathers: list[Launch], reduces: list[Launch], slack: float) -> list[int]:
    """The task before which each gather may be issued first, see `slack` of search."""
    starts = [0.0, *accumulate(task.seconds for task in workload.tasks)]
    jobs = [(starts[launch.first], number, launch) for number, launch in enumerate(gathers)]
    jobs += [(starts[launch.first + 1] + launch.seconds, -1, launch) for launch in reduces]
    opens, latest = [0] * len(gathers), float("inf")
    for until, number, launch in sorted(jobs, key=lambda job: job[:2], reverse=True):
        latest = min(latest, until) - launch.seconds
        if number >= 0:
            split = workload.backward if launch.first >= workload.backward else 0
            opens[number] = max(split, bisect_right(starts, latest - slack * launch.seconds) - 1)
            if number and gathers[number - 1].first < workload.backward <= launch.first:
                latest = float("inf")  # nothing of backward is launched in forward
    return opens


def units_of(launches: list[Launch]) -> tuple[int, ...]:
    """Numbers of the units of several launches."""
    return tuple(unit for launch in launches for unit in launch.units)


def suffix_sums(numbers: Iterable[float]) -> list[float]:
    """The sum from each number on, and 0 at the end."""
    return list(accumulate(reversed(list(numbers)), initial=0.0))[::-1]
