"""Seconds of the tasks of compiled graphs, measured while they run: the file that `CompileConfig.profile` names.

    compiled = torch.compile(model, backend="fsdp_compile", options={"record_profile": True})
    step(compiled)                                   compiles
    with TaskProfile() as profile:
        for _ in range(5):
            step(compiled)
    profile.save("profile.json")                     then options={"link": ..., "profile": "profile.json"}, where all
                                                     ranks read the same file

The pass puts an operator before and one after the nodes of each task, outside of the collectives that are started and
waited for before it. On CUDA the operators record events, so that the stream is timed and not the host.
"""

import json
import pathlib
import statistics
import time
from collections import defaultdict
from typing import ClassVar

import torch

from fsdp_compile.core.ops import RECORD_TIME
from fsdp_compile.passes.cost import graph_name
from fsdp_compile.passes.graph.nodes import tagged
from fsdp_compile.passes.graph.reading import stretches_of
from fsdp_compile.passes.pipeline import GraphContext

Moment = float | torch.cuda.Event


def record_times(context: GraphContext) -> None:
    """Put a `fsdp_flat::record_time` before and after each task, if the configuration asks for a profile."""
    starts = tagged(context.graph, "gather", "reduce")
    if not context.config.record_profile or not starts:
        return
    graph, tasks, value = context.graph, context.reading.tasks, starts[0].meta["val"]
    stretches = stretches_of(tasks)
    name = graph_name(context.direction, stretches)

    def record(stretch: int, moment: int) -> None:
        arguments = (name, stretch, moment, value.device)
        node = graph.create_node("call_function", RECORD_TIME, arguments, name=f"record_time_{moment}")
        with value.fake_mode:
            node.meta["val"] = RECORD_TIME(*node.args)

    for index, (nodes, stretch) in enumerate(zip(tasks, stretches, strict=True)):
        with graph.inserting_before(nodes[0]):
            record(stretch, 2 * index)
        with graph.inserting_after(nodes[-1]):
            record(stretch, 2 * index + 1)


class TaskProfile:
    """Records when the tasks of compiled graphs begin and end, in a `with` statement.

    There is one for all threads at a time, as backward may run in a thread of its own.
    """

    _active: ClassVar["TaskProfile | None"] = None

    def __init__(self) -> None:
        self._moments: defaultdict[tuple[str, int, int], list[Moment]] = defaultdict(list)  # by graph, stretch, moment

    def __enter__(self) -> "TaskProfile":
        TaskProfile._active = self
        return self

    def __exit__(self, *_: object) -> None:
        TaskProfile._active = None

    @property
    def seconds(self) -> dict[str, list[float]]:
        """By name of a graph, the seconds of each of its stretches: the sum of the medians of its tasks."""
        table: dict[str, list[float]] = {}
        for (graph, stretch, moment), begins in self._moments.items():
            stretches = table.setdefault(graph, [])
            stretches += [0.0] * (stretch + 1 - len(stretches))
            if moment % 2 == 0:
                ends = self._moments[graph, stretch, moment + 1]
                stretches[stretch] += statistics.median(map(_seconds_between, begins, ends))
        return table

    def save(self, path: str | pathlib.Path) -> None:
        """Write what was measured to `path`, as JSON."""
        pathlib.Path(path).write_text(json.dumps(self.seconds, indent=1) + "\n")


@torch.library.impl("fsdp_flat::record_time", "default")
def _record_time(graph: str, stretch: int, moment: int, device: torch.device) -> torch.Tensor:
    if TaskProfile._active is not None:
        now: Moment = time.perf_counter()
        if device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        TaskProfile._active._moments[graph, stretch, moment].append(now)
    return torch.empty(0, device=device)


def _seconds_between(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]  # both are floats
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
