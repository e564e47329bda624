"""A graph as text: one line a node, with shapes, our tags and checkpoint policies; short enough to pin in tests."""

from typing import Any

import torch
from torch import Tensor, fx

from fsdp_compile.passes.graph.tags import get_tag

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64", torch.int64: "i64"}


def format_graph(graph: fx.Graph) -> str:
    """`graph` as lines `name: dtype[shape] = target(arguments)  # tag`; `get_attr` nodes are left out."""
    return "\n".join(_format_node(node) for node in graph.nodes if node.op != "get_attr")


def _format_node(node: fx.Node) -> str:
    notes = [str(tag)] if (tag := get_tag(node)) else []
    if "recompute" in node.meta:
        notes.append(node.meta["recompute"].name)
    note = f"  # {', '.join(notes)}" if notes else ""
    if node.op == "placeholder":
        return f"{node.name}: {_format_value(node)}"
    if node.op == "output":
        return f"return {_format_argument(node.args[0])}"
    arguments = [_format_argument(a) for a in node.args] + [
        f"{k}={_format_argument(v)}" for k, v in node.kwargs.items()
    ]
    return f"{node.name}: {_format_value(node)} = {_format_target(node)}({', '.join(arguments)}){note}"


def _format_target(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removeprefix("_c10d_functional.").removesuffix(".default")


def _format_value(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return f"{_DTYPES.get(value.dtype, str(value.dtype))}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__


def _format_argument(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_format_argument, argument))}]"
    if isinstance(argument, str):
        return repr(argument) if "\n" not in argument else f"<{argument.count(chr(10)) + 1} lines>"
    return str(argument)
