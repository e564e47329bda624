"""Seconds of the tasks of a compiled graph, measured while it runs: what `CompileConfig.profile` reads.

    compiled = torch.compile(model, backend="fsdp_compile", options={"record_profile": True})
    for _ in range(5): step(compiled)
    save("profile.json")        then options={"link": ..., "profile": "profile.json"}, the same file on all ranks

Two operators stand around the nodes of each task, outside of what is started and waited for before it. On CUDA they
record events, so the stream is timed, not the host.
"""

import json
import pathlib
import statistics
import time
from collections import defaultdict

import torch
from torch import fx

from fsdp_compile.core.ops import RECORD_TIME
from fsdp_compile.passes._torch import direction
from fsdp_compile.passes.cost.profile import graph_name
from fsdp_compile.passes.graph.reading import stretches_of
from fsdp_compile.passes.graph.tags import tagged

Moment = float | torch.cuda.Event

_moments: defaultdict[tuple[str, int, int], list[Moment]] = defaultdict(list)  # by graph, stretch, number of the mark


def mark_tasks(graph: fx.Graph, tasks: list[list[fx.Node]]) -> None:
    """Put a mark before and one after each task."""
    stretches = stretches_of(tasks)
    name = graph_name(direction(), stretches)
    for number, (nodes, stretch) in enumerate(zip(tasks, stretches, strict=True)):
        with graph.inserting_before(nodes[0]):
            _mark(graph, name, stretch, 2 * number)
        with graph.inserting_after(nodes[-1]):
            _mark(graph, name, stretch, 2 * number + 1)


def _mark(graph: fx.Graph, name: str, stretch: int, number: int) -> None:
    value = tagged(graph, "gather", "reduce")[0].meta["val"]
    arguments = (name, stretch, number, value.device)
    mark = graph.create_node("call_function", RECORD_TIME, arguments, name=f"record_time_{number}")
    with value.fake_mode:
        mark.meta["val"] = RECORD_TIME(*mark.args)


@torch.library.impl("fsdp_flat::record_time", "default")
def _note(graph: str, stretch: int, number: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        _moments[graph, stretch, number].append(event)
    else:
        _moments[graph, stretch, number].append(time.perf_counter())
    return torch.empty(0, device=device)


def reset() -> None:
    """Forget what was measured, such as first runs."""
    _moments.clear()


def seconds() -> dict[str, list[float]]:
    """By graph, the seconds of each of its stretches: the sum of its tasks' medians."""
    found: dict[str, list[float]] = {}
    for (graph, stretch, number), begins in _moments.items():
        total = found.setdefault(graph, [])
        total += [0.0] * (stretch + 1 - len(total))
        if number % 2 == 0:
            total[stretch] += _median(begins, _moments[graph, stretch, number + 1])
    return found


def _median(begins: list[Moment], ends: list[Moment]) -> float:
    return statistics.median(_between(*each) for each in zip(begins, ends, strict=True))


def _between(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    end.synchronize()  # type: ignore[union-attr]  # an event, like the other
    return begin.elapsed_time(end) / 1e3  # type: ignore[union-attr,arg-type]  # likewise


def save(path: str | pathlib.Path) -> None:
    """Write what was measured to `path`."""
    pathlib.Path(path).write_text(json.dumps(seconds(), indent=1) + "\n")
