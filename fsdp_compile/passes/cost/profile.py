"""Measured seconds in place of estimated ones: what post_grad/profile_tasks.py has recorded, for another graph.

A profile has seconds by stretch: all that computes from one matrix product to the next. A plan cuts stretches into
tasks, and other plans cut them elsewhere, but none makes other stretches: what was measured under one plan serves
another. The tasks of a stretch share its seconds in proportion to their estimates.
"""

import json
import math
import pathlib
from collections.abc import Sequence
from dataclasses import replace

from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.plan.workload import Task, Workload

Profile = dict[str, list[float]]  # by `graph_name`, the seconds of each stretch


def graph_name(direction: str, stretches: Sequence[int]) -> str:
    """What profiles call a graph: its direction, and how many matrix products begin a stretch of it."""
    return f"{direction} of {max(stretches, default=0)} products"


def with_profile(workload: Workload, stretches: Sequence[int], direction: str, path: str) -> Workload:
    """`workload`, of a graph in one direction, with the seconds that were measured.

    Args:
        workload: the graph's, with estimated seconds.
        stretches: the stretch of each task: 0 before the first matrix product, each product begins one.
        direction: "forward" or "backward".
        path: of the profile.

    Raises:
        PlanError: the profile lacks a graph of this direction and as many products.
    """
    profile, name = _load(path), graph_name(direction, stretches)
    if name not in profile:
        raise _not_measured(path, repr(name), profile)
    return replace(workload, tasks=tuple(_share(workload.tasks, stretches, profile[name])))


def step_with_profile(workload: Workload, stretches: Sequence[int], path: str) -> Workload:
    """`workload`, of a whole step, with the seconds that were measured in each direction.

    Matrix products that backward repeats are not in the graph of the step before it is split in two. Where the
    numbers of products differ, the whole direction is one stretch, as measured in the graph whose number is nearest.

    Raises:
        PlanError: the profile lacks a direction.
    """
    profile, split, tasks = _load(path), workload.backward, list[Task]()
    before = stretches[split - 1] if split else 0
    for direction, part, numbers in (
        ("forward", workload.tasks[:split], list(stretches[:split])),
        ("backward", workload.tasks[split:], [each - before for each in stretches[split:]]),
    ):
        graphs = [seconds for name, seconds in profile.items() if name.startswith(direction)]
        if not graphs:
            raise _not_measured(path, f"a {direction}", profile)
        expected = max(numbers, default=0) + 1
        seconds = min(graphs, key=lambda each: abs(len(each) - expected))
        if len(seconds) != expected:
            numbers, seconds = [0] * len(numbers), [sum(seconds)]
        tasks += _share(part, numbers, seconds)
    return replace(workload, tasks=tuple(tasks))


def _share(tasks: Sequence[Task], stretches: Sequence[int], seconds: Sequence[float]) -> list[Task]:
    """`tasks` with the seconds of their stretches, in proportion to what each had; equally where none had any."""
    estimated, count = [0.0] * len(seconds), [0] * len(seconds)
    for task, stretch in zip(tasks, stretches, strict=True):
        estimated[stretch] += task.seconds
        count[stretch] += 1
    return [
        replace(
            task,
            seconds=seconds[stretch]
            * (task.seconds / estimated[stretch] if estimated[stretch] else 1 / count[stretch]),
        )
        for task, stretch in zip(tasks, stretches, strict=True)
    ]


def _load(path: str) -> Profile:
    profile = {
        name: [float(each) for each in seconds] for name, seconds in json.loads(pathlib.Path(path).read_text()).items()
    }
    for name, seconds in profile.items():
        if not all(0 <= each < math.inf for each in seconds):
            raise PlanError(f"profile: expected finite seconds of at least 0 in {path}, found {seconds} for {name}")
    return profile


def _not_measured(path: str, expected: str, profile: Profile) -> PlanError:
    return PlanError(f"profile: expected {path} to have {expected}, found {', '.join(profile) or 'nothing'}; measure "
                     "this model with these inputs again")  # fmt: skip
