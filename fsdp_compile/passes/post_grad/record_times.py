"""Record seconds of tasks while graphs run, for plans by these seconds."""

import json
import os
import pathlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import torch

from fsdp_compile.comm.collectives import broadcast_object
from fsdp_compile.core.ops import RECORD_TIME
from fsdp_compile.passes.cost.roofline import graph_name
from fsdp_compile.passes.graph.nodes import tagged
from fsdp_compile.passes.graph.prices import stretches_of
from fsdp_compile.passes.pipeline import GraphContext, log
from fsdp_compile.passes.plan.plan import FAR, simulate

# `CompileConfig.profile` names a file that `profile_step` has saved.
#
# The pass puts an operator before and after the nodes of each task, without the collectives that are started and waited
# for before it. On CUDA the operators record events, which time the stream and not the host.

Moment = float | torch.cuda.Event


def record_times(context: GraphContext) -> None:
    """Put a `fsdp_flat::record_time` before and after each task, if the configuration asks for a profile."""
    starts = tagged(context.graph, "gather", "reduce")
    if not context.config.record_profile or not starts:
        return
    graph, tasks, value = context.graph, context.info.tasks, starts[0].meta["val"]
    stretches = stretches_of(tasks)
    name, expected = graph_name(context.direction, stretches), tuple[float, ...]()
    if context.config.link is not None:
        spans = simulate(context.workload, context.plan).compute
        expected = (spans[-1].end - spans[0].start,)

    def record(stretch: int, moment: int) -> None:
        arguments = (name, stretch, moment, value.device, *(expected if moment == 0 else ()))
        node = graph.create_node("call_function", RECORD_TIME, arguments, name=f"record_time_{moment}")
        with value.fake_mode:
            node.meta["val"] = RECORD_TIME(*node.args)

    for index, (nodes, stretch) in enumerate(zip(tasks, stretches, strict=True)):
        with graph.inserting_before(nodes[0]):
            record(stretch, 2 * index)
        with graph.inserting_after(nodes[-1]):
            record(stretch, 2 * index + 1)


class TaskProfile:
    """Context manager: record when tasks of compiled graphs, and updates of `compile_step`, begin and end.

    One is active for all threads at a time, as backward may run in a thread of its own.

    Args:
        clock: returns seconds on the CPU.
    """

    _active: ClassVar["TaskProfile | None"] = None

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._moments: defaultdict[tuple[str, int, int], list[Moment]] = defaultdict(list)  # by graph, stretch, moment
        self._expected: dict[str, float] = {}  # of planned graphs, seconds from the first task to the last one

    def __enter__(self) -> "TaskProfile":
        TaskProfile._active = self
        return self

    def __exit__(self, *_: object) -> None:
        TaskProfile._active = None

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Name of a graph -> seconds of each of its stretches: the sum of the medians of its tasks."""
        table: dict[str, list[float]] = {}
        for (graph, stretch, moment), begins in self._moments.items():
            stretches = table.setdefault(graph, [])
            stretches += [0.0] * (stretch + 1 - len(stretches))
            if moment % 2 == 0:
                ends = self._moments[graph, stretch, moment + 1]
                stretches[stretch] += statistics.median(map(_seconds_between, begins, ends))
        return table

    def surprises(self) -> Iterator[str]:
        """A sentence for each planned graph whose seconds differ by more than `FAR` from those of its plan."""
        for graph, expected in self._expected.items():
            moments = sorted((moment, stretch) for name, stretch, moment in self._moments if name == graph)
            begins, ends = (self._moments[graph, stretch, moment] for moment, stretch in (moments[0], moments[-1]))
            took = statistics.median(map(_seconds_between, begins, ends))
            if not 1 / FAR <= took / expected <= FAR:
                yield (f"{graph.split()[0]}: {took * 1e3:.1f} ms measured, and {expected * 1e3:.1f} expected by its "
                       f"plan; with the option profile, plans are made for measured seconds")  # fmt: skip


def profile_step(step: Callable[[], object], path: str | pathlib.Path, steps: int = 5) -> None:
    """Measure what the tasks of a compiled step take, and save it for the option `profile`; on all ranks together.

    A graph that takes a fifth more or less than its plan expects is named in the log.

        run = torch.compile(model, backend="fsdp_compile", options={"record_profile": True})
        profile_step(lambda: run(x).sum().backward(), "profile.json")
        run = torch.compile(model, backend="fsdp_compile", options={"profile": "profile.json"})

    Args:
        step: runs forward and backward once, or a step of `compile_step`, of a model that is compiled with
            `record_profile`; what it does to gradients and parameters stays.
        path: of the file, which each rank writes; the first rank's seconds count for all.
        steps: how many steps are measured, beside two before them that compile.

    Raises:
        ValueError: `steps` is below 1, or no graph has recorded anything, on any rank.
    """
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, found {steps}")
    for _ in range(2):  # the second call of `compile_step` compiles the update
        step()
    with TaskProfile() as profile:
        for _ in range(steps):
            step()
    for text in profile.surprises():
        log.warning(text)
    text = broadcast_object(json.dumps(profile.seconds, indent=1) + "\n" if profile.seconds else "", None)
    if not text:
        raise ValueError("step: expected a compiled step whose graphs record times, found none; compile the model with "
                         "backend='fsdp_compile', options={'record_profile': True}")  # fmt: skip
    replace_text(pathlib.Path(path), text)


@torch.library.impl("fsdp_flat::record_time", "default")
def _record_time(graph: str, stretch: int, moment: int, device: torch.device, expected: float = 0.0) -> torch.Tensor:
    profile = TaskProfile._active
    if profile is not None and expected:
        profile._expected[graph] = expected
    if profile is not None and (moment % 2 == 0 or (graph, stretch, moment - 1) in profile._moments):
        now: Moment = profile.clock()
        if device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        profile._moments[graph, stretch, moment].append(now)
    return torch.empty(0, device=device)


def _seconds_between(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]  # both are floats
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def replace_text(path: Path, text: str) -> None:
    """Write a file of text, whole or not at all. OSError if it cannot be written."""
    staged = path.with_name(f"{path.name}.{os.getpid()}.partial")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)
