"""Measured seconds in place of estimated ones: what profile_tasks.py has written, read for another graph.

What is measured is kept by stretch: all that computes from one matrix product to the next. Where a plan gathers, and
which units it keeps, cuts stretches into other tasks, but makes no other stretches: what was measured under one plan
serves another. Within a stretch its tasks share the seconds as they would by estimates.
"""

import json
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from torch import fx

from fsdp_compile.config import CompileConfig
from fsdp_compile.passes._torch import direction
from fsdp_compile.passes.graph.node_kinds import is_product
from fsdp_compile.passes.graph.reading import Reading
from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.plan.workload import Task, Workload

Table = dict[str, list[float]]  # by name of a graph, seconds of each stretch


def stretches(tasks: Sequence[Sequence[fx.Node]]) -> list[int]:
    """The stretch of each task: 0 before the first matrix product; each product begins one."""
    return list(accumulate(int(is_product(nodes[0])) for nodes in tasks))


def graph_name(heading: str, tasks: Sequence[Sequence[fx.Node]]) -> str:
    """What files of times call a graph: its direction, and how many matrix products begin a stretch of it."""
    return f"{heading} of {max(stretches(tasks), default=0)} products"


def timed(reading: Reading, config: CompileConfig) -> Workload:
    """The workload of the graph that is being compiled, with the seconds that were measured, if they were.

    Raises:
        PlanError: the file has none for a graph of this direction and so many products.
    """
    if config.profile is None:
        return reading.workload
    table, name = _load(config.profile), graph_name(direction(), reading.tasks)
    if name not in table:
        raise _not_measured(config.profile, repr(name), table)
    return _with_tasks(reading.workload, _share(reading.workload.tasks, stretches(reading.tasks), table[name]))


def timed_step(reading: Reading, config: CompileConfig) -> Workload:
    """The workload of a whole step, with the seconds that were measured in each direction, if they were.

    Products that backward repeats are none of the step's graph before it is parted. Where the numbers of products are
    not equal, the whole direction is one stretch, measured in the graph whose number is nearest.

    Raises:
        PlanError: the file lacks a direction.
    """
    workload, split = reading.workload, reading.workload.backward
    if config.profile is None:
        return workload
    table, tasks = _load(config.profile), []
    for heading, part in (("forward", slice(0, split)), ("backward", slice(split, None))):
        places = stretches(reading.tasks[part])
        graphs = [seconds for name, seconds in table.items() if name.startswith(heading)]
        if not graphs:
            raise _not_measured(config.profile, f"a {heading}", table)
        expected = max(places, default=0) + 1
        _, seconds = min((abs(len(each) - expected), each) for each in graphs)
        if len(seconds) != expected:
            places, seconds = [0] * len(places), [sum(seconds)]
        tasks += _share(workload.tasks[part], places, seconds)
    return _with_tasks(workload, tasks)


def _share(tasks: Sequence[Task], places: Sequence[int], seconds: Sequence[float]) -> list[Task]:
    """`tasks` with the seconds of their stretches, shared in proportion to what they had."""
    estimated, number = [0.0] * len(seconds), [0] * len(seconds)
    for task, place in zip(tasks, places, strict=True):
        estimated[place] += task.seconds
        number[place] += 1
    parts = (
        task.seconds / estimated[place] if estimated[place] else 1 / number[place]
        for task, place in zip(tasks, places, strict=True)
    )
    return [replace(task, seconds=seconds[at] * part) for task, at, part in zip(tasks, places, parts, strict=True)]


def _with_tasks(workload: Workload, tasks: Sequence[Task]) -> Workload:
    return replace(workload, tasks=tuple(tasks))


def _load(path: str) -> Table:
    table = json.loads(pathlib.Path(path).read_text())
    return {name: [float(each) for each in seconds] for name, seconds in table.items()}


def _not_measured(path: str, what: str, table: Table) -> PlanError:
    return PlanError(f"profile: expected {path} to have {what}, found {', '.join(table) or 'nothing'}; measure this "
                     "model with these inputs again")  # fmt: skip
