"""Seconds of each task of a compiled graph, measured while it runs: what `CompileConfig.times` reads.

    compiled = torch.compile(model, backend="fsdp_compile", options={"mark": True})
    for _ in range(5): step(compiled)
    save("times.json")          then options={"link": ..., "times": "times.json"}, the same file on all ranks

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

from fsdp_compile.ops import MARK
from fsdp_compile.passes.pricing import graph_name
from fsdp_compile.passes.tags import tagged

Moment = float | torch.cuda.Event

_moments: defaultdict[tuple[str, int], list[Moment]] = defaultdict(list)


def mark_tasks(graph: fx.Graph, tasks: list[list[fx.Node]]) -> None:
    """Put a mark before and one after each task."""
    name = graph_name(len(tasks))
    for number, nodes in enumerate(tasks):
        with graph.inserting_before(nodes[0]):
            _mark(graph, name, 2 * number)
        with graph.inserting_after(nodes[-1]):
            _mark(graph, name, 2 * number + 1)


def _mark(graph: fx.Graph, name: str, number: int) -> None:
    value = tagged(graph, "gather", "reduce")[0].meta["val"]
    mark = graph.create_node("call_function", MARK, (name, number, value.device), name=f"mark_{number}")
    with value.fake_mode:
        mark.meta["val"] = MARK(*mark.args)


@torch.library.impl("fsdp_flat::mark", "default")
def _note(graph: str, number: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        _moments[graph, number].append(event)
    else:
        _moments[graph, number].append(time.perf_counter())
    return torch.empty(0, device=device)


def reset() -> None:
    """Forget what was measured, such as first runs."""
    _moments.clear()


def seconds() -> dict[str, list[float]]:
    """By graph, the median seconds of each of its tasks."""
    found: dict[str, list[float]] = {}
    for graph in dict.fromkeys(name for name, _ in _moments):
        tasks = sum(name == graph for name, _ in _moments) // 2
        found[graph] = [_median(_moments[graph, 2 * task], _moments[graph, 2 * task + 1]) for task in range(tasks)]
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
