"""What a recorded step says about prices: seconds of tasks, and how many times as long the link takes as it is priced.

Note [What a record holds]
Nothing is put into a graph to be timed. What generated code calls by name can be: collectives are launched and waited
for, and matrix products and attention begin. Between two such marks loops run that Inductor has fused, so the tasks
that lie there share the seconds in proportion to their prices until then.

    marks    gather a  wait a  product   product    gather b  wait b    end
    tasks             |  0    |    1    |    2  3  |        |     4  5 |

The launches and waits must be those of the plan, in its order. If other products are seen between two of them than the
plan has tasks for, as where Inductor computes one product in loops, those tasks share what lies between.

Note [How the link is priced]
A wait says when its collective has ended only if it lasts. So the link is not read off single waits: the plan is
simulated with the recorded seconds of tasks, on links that take some times as long as priced, and the one counts whose
waits are most like the recorded ones. All but the first gather and the last reduce may be hidden: these two tell.
Forward and backward go over one link, and what one of them hides the other may show, so both are simulated together.
Waits for ranks that are late are noise: unless another link explains some of the step better, it stays as priced.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

from fsdp_compile.passes.plan.plan import Machine, Plan, held_units
from fsdp_compile.passes.plan.workload import UnitCost, Workload

WAITS: tuple[Literal["wait", "wait_reduce"], ...] = (
    "wait",
    "wait_reduce",
)  # kinds of marks and of steps of plans that wait
FARTHEST = 32.0  # how many times as long, or as short, as priced a link may take
_COARSE = 1.25  # ratios of links that are tried, then finer ones between the two beside the best
_FINE = 16  # thirds that are cut off of that interval
_SAYS = 0.01, 0.7  # of the step, and of how unlike waits are as priced: what another link has to explain better


class Mark(NamedTuple):
    """What generated code has called.

    Attributes:
        kind: "gather" or "reduce" (launched), "wait", "wait_reduce", "product" (began), "begin" or "end" of the graph.
        begin: seconds.
        end: seconds, when the call returned; on a GPU, when the stream went on.
    """

    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Record:
    """What one step of a graph took.

    Attributes:
        seconds: of each task.
        link: how many times as long the link takes as it is priced.
        exposed: seconds of all waits.
        step: seconds from the first mark to the end.
    """

    seconds: tuple[float, ...]
    link: float
    exposed: float
    step: float

    def to_json(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return {"seconds": [float(f"{each:.5g}") for each in self.seconds], "link": self.link,
                "exposed": self.exposed, "step": self.step}  # fmt: skip

    @classmethod
    def from_json(cls, table: dict[str, Any], tasks: int) -> "Record":
        """Read what `to_json` gave. ValueError, TypeError or KeyError if it is none of a graph with so many tasks."""
        seconds = tuple(map(float, table["seconds"]))
        figures = *seconds, float(table["link"]), float(table["exposed"]), float(table["step"])
        if len(seconds) != tasks or not all(0 <= each < 1e9 for each in figures) or not figures[-3] > 0:
            raise ValueError(f"record: expected {tasks} finite seconds and figures, found {table!r:.200}")
        return cls(seconds, *figures[-3:])


class Unlike(ValueError):
    """Marks that are not those of the plan."""


class Called(NamedTuple):
    """One call of a graph.

    Attributes:
        workload: the graph, with the prices by which its plan was made.
        plan: the plan that the graph follows.
        products: whether each task begins with a matrix product.
        marks: in order, "end" last.
    """

    workload: Workload
    plan: Plan
    products: Sequence[bool]
    marks: Sequence[Mark]


def records_of(calls: Mapping[str, Called]) -> dict[str, Record]:
    """What the marks of one step say, by direction.

    Raises:
        Unlike: a graph has launched or waited for something else than its plan.
    """
    seconds, waits = dict[str, list[float]](), dict[str, list[float]]()
    for direction, (workload, plan, products, marks) in calls.items():
        took = seconds[direction] = [0.0] * len(workload.tasks)
        for tasks, together in _seconds_between_marks(workload, plan, products, marks):
            priced = sum(workload.tasks[task].seconds for task in tasks)
            for task in tasks:
                took[task] += together * (workload.tasks[task].seconds / priced if priced else 1 / len(tasks))
        waits[direction] = [mark.end - mark.begin for mark in marks if mark.kind in WAITS]
    link = _link_ratio(
        [(priced_by(each.workload, seconds[name]), each.plan, waits[name]) for name, each in calls.items()]
    )
    return {
        name: Record(tuple(seconds[name]), link, sum(waits[name]), each.marks[-1].end - each.marks[0].begin)
        for name, each in calls.items()
    }


def priced_by(workload: Workload, seconds: Sequence[float], link: float = 1.0) -> Workload:
    """`workload` whose tasks take these seconds, on a link that takes so many times as long as priced."""

    def scaled(unit: UnitCost) -> UnitCost:
        return replace(unit, gather=unit.gather * link, reduce=unit.reduce * link, replicate=unit.replicate * link)

    tasks = tuple(
        replace(task, seconds=each, all_reduce=task.all_reduce * link)
        for task, each in zip(workload.tasks, seconds, strict=True)
    )
    return replace(workload, tasks=tasks, units=tuple(map(scaled, workload.units)), latency=workload.latency * link)


def median_of(records: Sequence[Record]) -> Record:
    """The median of each figure."""
    seconds = map(statistics.median, zip(*(record.seconds for record in records), strict=True))
    figures = zip(*((record.link, record.exposed, record.step) for record in records), strict=True)
    return Record(tuple(seconds), *map(statistics.median, figures))


def of_all_ranks(records: Sequence[Record]) -> Record:
    """Prices that all ranks share: medians of their tasks, and the shortest link.

    Who comes late to a collective sees how long it takes; the others wait for that rank, too.
    """
    return replace(median_of(records), link=min(record.link for record in records))


def _seconds_between_marks(
    workload: Workload, plan: Plan, products: Sequence[bool], marks: Sequence[Mark]
) -> list[tuple[list[int], float]]:
    """The tasks between two marks, and the seconds that they share; see Note [What a record holds]."""
    stretches = _between_collectives(marks)
    gaps: list[tuple[list[int], float]] = []
    left = 0.0  # seconds between marks without a task, which those that follow take
    for tasks, expected in _planned_calls(workload, plan):
        begin, between, end = next(stretches, (0.0, [], Mark("end", 0.0, 0.0)))
        if end.kind != expected:
            raise Unlike(f"marks: expected a {expected} by the plan, found {end.kind}")
        starts = [task for task in tasks if products[task]]
        cuts = [mark.begin for mark in between] if len(starts) == len(between) else []
        times, parts = [begin, *cuts, end.begin], [[]] if cuts else [list(tasks)]
        for task in tasks if cuts else ():
            if products[task]:
                parts.append([])
            parts[-1].append(task)
        for part, first, last in zip(parts, times, times[1:], strict=False):
            if part:
                gaps.append((part, max(0.0, last - first) + left))
                left = 0.0
            elif gaps:  # what comes before all tasks is none's
                left += max(0.0, last - first)
    if next(stretches, None) is not None:
        raise Unlike("marks: expected the end by the plan, found more collectives")
    if left and gaps:
        gaps[-1] = gaps[-1][0], gaps[-1][1] + left
    return gaps


def _between_collectives(marks: Sequence[Mark]) -> Iterator[tuple[float, list[Mark], Mark]]:
    """When the collective before has let computing go on, the products that follow, and the next collective."""
    begin, between = marks[0].begin, list[Mark]()
    for mark in marks:
        if mark.kind in ("begin", "product"):
            between += [mark] if mark.kind == "product" else []
            continue
        yield begin, between, mark
        begin, between = (mark.end if mark.kind.startswith("wait") else mark.begin), []


def _planned_calls(workload: Workload, plan: Plan) -> Iterator[tuple[list[int], str]]:
    """What generated code calls by the plan, each with the tasks since the call before; "end" last."""
    tasks, done = list[int](), 0
    for at, steps in groupby((step for step in plan.steps if step.kind != "free"), key=lambda step: step.at):
        tasks += range(done, at)
        done = at
        for step in steps:
            is_one = step.kind in ("gather", "reduce") and workload.can_coalesce
            for _ in range(1 if is_one else len(step.units)):
                yield tasks, step.kind
                tasks = []
    yield [*tasks, *range(done, len(workload.tasks))], "end"


def _link_ratio(graphs: Sequence[tuple[Workload, Plan, Sequence[float]]]) -> float:
    """How many times as long the link takes as priced; see Note [How the link is priced].

    Args:
        graphs: of a step: with recorded seconds of tasks, the plan, and how long each of its waits took.
    """
    recorded = list[list[float]]()
    for _, plan, waits in graphs:
        rest = iter(waits)
        recorded.append([sum(next(rest) for _ in step.units) for step in plan.of(*WAITS)])

    def unlike(ratio: float) -> float:
        found = 0.0
        for (workload, plan, _), those in zip(graphs, recorded, strict=True):
            on_link = priced_by(workload, [task.seconds for task in workload.tasks], ratio)
            found += sum(abs(one - other) for one, other in zip(_predicted_waits(on_link, plan), those, strict=True))
        return found

    ratios = [1.0]
    while ratios[-1] < FARTHEST:
        ratios = [1 / (ratios[-1] * _COARSE), *ratios, ratios[-1] * _COARSE]
    best = min(ratios, key=lambda ratio: (unlike(ratio), abs(ratio - 1)))
    low, high = best / _COARSE, best * _COARSE
    for _ in range(_FINE):  # of what is nearly a valley
        one, other = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, other) if unlike(one) <= unlike(other) else (one, high)
    fine = (low + high) / 2
    best = fine if unlike(fine) < unlike(best) else best
    as_priced = unlike(1.0)
    step = sum(sum(waits) + sum(task.seconds for task in workload.tasks) for workload, _, waits in graphs)
    return best if unlike(best) <= min(as_priced - _SAYS[0] * step, _SAYS[1] * as_priced) else 1.0


def _predicted_waits(workload: Workload, plan: Plan) -> list[float]:
    """Seconds for which each wait of the plan holds up the tasks, by the simulator's machine."""
    machine, waits, tasks = Machine(workload, held_units(workload, plan)), list[float](), 0
    for step in plan.steps:
        while tasks < step.at:
            machine.task(tasks)
            tasks += 1
        before = machine.now
        machine.step(step)
        if step.kind in WAITS:
            waits.append(machine.now - before)
    return waits
