"""Markers become functional collectives with separate waits, so that later passes can move start and wait apart.

unshard        ->  all_gather_into_tensor, wait_tensor, then slice and view for each parameter that is used
reduce_grads   ->  reduce_scatter_tensor (NO_SHARD: all_reduce), wait_tensor
pack_grads     stays: Inductor lowers it without copies (pack_grads.py)
"""

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fsdp_compile import collectives
from fsdp_compile.config import CompileConfig
from fsdp_compile.layout import FlatParamLayout
from fsdp_compile.ops import PACK_GRADS, REDUCE_GRADS, UNSHARD
from fsdp_compile.passes.tags import Kind, Tag, set_tag

aten = torch.ops.aten

_RECOMPUTE_KEYS = ("recompute", "ac_graph_id")  # of a checkpoint around the marker; reshard.py decides instead


def insert_collectives(graph: fx.Graph, config: CompileConfig) -> None:
    """Replace every marker but `pack_grads`; tag what is left and what is new."""
    tags = _tags_by_marker(graph)
    for marker in list(graph.nodes):
        if marker.target is UNSHARD:
            _expand_unshard(graph, marker, tags[marker])
        elif marker.target is REDUCE_GRADS:
            _expand_reduce(graph, marker, tags[marker])
        elif marker.target is PACK_GRADS:
            set_tag(marker, Tag("pack", *tags[marker]))


_Unit = tuple[int, str, bool]  # number, path, reshard: what a tag says beside its kind


def _tags_by_marker(graph: fx.Graph) -> dict[fx.Node, _Unit]:
    """Number the units; a backward marker belongs to the unit whose unshard has the same autograd sequence number."""
    units: dict[fx.Node, _Unit] = {}
    by_sequence: dict[Any, _Unit] = {}
    for node in graph.nodes:
        if node.target is UNSHARD:
            units[node] = by_sequence[node.meta.get("seq_nr")] = (len(units), _path(node), node.args[4])
        elif node.target in (PACK_GRADS, REDUCE_GRADS):
            units[node] = by_sequence.get(node.meta.get("seq_nr"), (-1, "?", True))
    return units


def _path(marker: fx.Node) -> str:
    """Path of the module whose forward called the marker, from the trace; only for people."""
    stack = marker.meta.get("nn_module_stack") or {}
    source = next(reversed(stack.values()))[0] if stack else ""
    words = re.findall(r"\w+", source.replace("L['self']", "").replace("_orig_mod", ""))
    return ".".join(word for word in words if word != "_modules")


def _expand_unshard(graph: fx.Graph, marker: fx.Node, unit: _Unit) -> None:
    handle, text, group, group_size, _ = marker.args
    layout = FlatParamLayout.parse(text)  # type: ignore[arg-type]
    emit = _emitter(graph, marker, unit)
    full = handle
    if layout.world_size > 1:
        start = emit("gather", collectives.ALL_GATHER, handle, group_size, group)
        full = emit("wait", collectives.WAIT, start)
    for item in list(marker.users):
        assert item.target is operator.getitem, f"{marker} is used by {item}, not by indexing"
        index: int = item.args[1]  # type: ignore[assignment]
        begin, end = layout.offsets[index], layout.offsets[index] + layout.numels[index]
        part = emit("view", aten.slice.Tensor, full, 0, begin, end)
        item.replace_all_uses_with(emit("view", aten.view.default, part, list(layout.shapes[index])))
        graph.erase_node(item)
    graph.erase_node(marker)


def _expand_reduce(graph: fx.Graph, marker: fx.Node, unit: _Unit) -> None:
    packed, text, group, group_size = marker.args
    emit = _emitter(graph, marker, unit)
    if FlatParamLayout.parse(text).world_size > 1:  # type: ignore[arg-type]
        start = emit("reduce", collectives.REDUCE_SCATTER, packed, "avg", group_size, group)
    elif group_size > 1:  # type: ignore[operator]
        start = emit("reduce", collectives.ALL_REDUCE, packed, "avg", group)
    else:
        marker.replace_all_uses_with(packed)  # type: ignore[arg-type]
        graph.erase_node(marker)
        return
    marker.replace_all_uses_with(emit("wait_reduce", collectives.WAIT, start))
    graph.erase_node(marker)


def _emitter(graph: fx.Graph, marker: fx.Node, unit: _Unit) -> Callable[..., fx.Node]:
    """A function that adds a tagged node in the marker's place, with the value that it would have."""
    inherited = {
        k: v for k, v in marker.meta.items() if k not in (*_RECOMPUTE_KEYS, "val", "tensor_meta", "eager_input_vals")
    }

    def emit(kind: Kind, target: Any, *args: Any) -> fx.Node:
        with graph.inserting_before(marker):
            node = graph.create_node("call_function", target, args, name=f"{kind}_{unit[1] or 'root'}")
        node.meta = dict(inherited)
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        with values[0].fake_mode:
            node.meta["val"] = target(*values)
        set_tag(node, Tag(kind, *unit))
        return node

    return emit
