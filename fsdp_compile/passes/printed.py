"""Graphs as text, after each pass.

`FSDP_COMPILE_PRINT=FOLDER` writes the graph after each pass into a file (1 means `./fsdp_compile_graphs`):

    FOLDER/rank0/graph0_1_joint/00_insert_collectives.txt      first graph, forward and backward in one
    FOLDER/rank0/graph0_2_forward/05_order.txt                 the same graph's forward, later

Graphs from a compile cache are not written; `TORCHINDUCTOR_FORCE_DISABLE_CACHES=1` has them compiled. The logger
`fsdp_compile.graphs` gets the same texts at level DEBUG.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fsdp_compile.passes.graph.nodes import get_tag, tagged
from fsdp_compile.passes.pipeline import GraphContext, Pass

graph_log = logging.getLogger("fsdp_compile.graphs")

_ORDER = {"joint": 1, "forward": 2, "backward": 3, "inference": 2}
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64", torch.int64: "i64"}


def print_graph(context: GraphContext, passes: Sequence[Pass], count: int) -> None:
    """Write the graph, after `count` of the passes, where it is asked for."""
    graph, name = context.graph, passes[count - 1].name if count else ""
    if count and graph_log.isEnabledFor(logging.DEBUG):
        graph_log.debug("--- %s graph after %s\n%s", context.direction, name, format_graph(graph))
    folder = _folder_of(context)
    if count and folder is not None:
        (folder / f"{count - 1:02}_{name}.txt").write_text(format_graph(graph) + "\n")
    if count == len(passes) and folder is not None and _rank() == 0:
        gathers, reduces = len(tagged(graph, "gather")), len(tagged(graph, "reduce"))
        print(f"fsdp_compile: {context.direction} graph, {len(graph.nodes)} nodes, {gathers} all-gathers, {reduces} "
              f"reduce-scatters; after each of {len(passes)} passes in {folder}", file=sys.stderr)  # fmt: skip


def _folder_of(context: GraphContext) -> Path | None:
    """Make and return the folder to print the graph into; None if printing is off."""
    asked = os.environ.get("FSDP_COMPILE_PRINT", "0")
    if asked in ("", "0"):
        return None
    root, direction = Path("fsdp_compile_graphs" if asked == "1" else asked), context.direction
    folder = root / f"rank{_rank()}" / f"graph{context.graph_index}_{_ORDER[direction]}_{direction}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def format_graph(graph: fx.Graph) -> str:
    """`graph` as lines `name: dtype[shape] = target(arguments)  # tag`; `get_attr` nodes are left out."""
    return "\n".join(_format_node(node) for node in graph.nodes if node.op != "get_attr")


def _format_node(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_format_argument(node.args[0])}"
    value = node.meta.get("val")
    shown = type(value).__name__
    if isinstance(value, Tensor):
        shown = f"{_DTYPES.get(value.dtype, str(value.dtype))}[{', '.join(map(str, value.shape))}]"
    if node.op == "placeholder":
        return f"{node.name}: {shown}"
    arguments = [*map(_format_argument, node.args), *(f"{k}={_format_argument(v)}" for k, v in node.kwargs.items())]
    target = str(node.target).removeprefix("aten.").removeprefix("_c10d_functional.").removesuffix(".default")
    notes = [str(tag)] if (tag := get_tag(node)) else []
    if "recompute" in node.meta:
        notes.append(node.meta["recompute"].name)
    note = f"  # {', '.join(notes)}" if notes else ""
    return f"{node.name}: {shown} = {target}({', '.join(arguments)}){note}"


def _format_argument(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_format_argument, argument))}]"
    if isinstance(argument, str):
        return repr(argument) if "\n" not in argument else f"<{argument.count(chr(10)) + 1} lines>"
    return str(argument)
