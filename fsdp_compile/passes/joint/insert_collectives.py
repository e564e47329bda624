"""Markers become functional collectives with separate waits, so that later passes can move start and wait apart.

unshard, and the split beneath `views`  ->  all_gather_into_tensor, wait_tensor, a slice for each parameter in use;
                                            two of the former if backward gathers again in a smaller group
reduce_grads                            ->  reduce_scatter_tensor (NO_SHARD: all_reduce), wait_tensor; likewise
defer_reduce                               ->  stays, and is tagged
the concatenation that both read        ->  pack_grads, which Inductor lowers without copies (pack_grads.py)
a cast or division of all that          ->  of each gradient: the kernel that writes it into the pack does both
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fsdp_compile.comm import collectives
from fsdp_compile.comm.flat import averaging
from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.core.ops import ADD_ACCUMULATED, DEFER_REDUCE, PACK_GRADS, REDUCE_GRADS, UNSHARD
from fsdp_compile.core.unshard_spec import UnshardSpec
from fsdp_compile.passes.graph.node_kinds import CAST
from fsdp_compile.passes.graph.tags import Kind, Tag, module_path, set_tag
from fsdp_compile.passes.joint.merge_calls import merge_calls
from fsdp_compile.passes.pipeline import GraphContext

aten = torch.ops.aten
SCALE = aten.div.Scalar  # of gradients in float16, around their sum

_RECOMPUTE_KEYS = ("recompute", "ac_graph_id")  # of a checkpoint around the marker; reshard.py decides instead


def insert_collectives(context: GraphContext) -> None:
    """Replace the markers; tag what takes their place."""
    graph = context.graph
    merge_calls(graph)
    tags = _tags_by_marker(graph)
    for marker, unit in tags.items():
        _EXPANSIONS[marker.target](graph, marker, unit)


Emit = Callable[..., fx.Node]
_Unit = tuple[int, str, bool | None]  # number, path, reshard: what a tag says beside its kind


def _tags_by_marker(graph: fx.Graph) -> dict[fx.Node, _Unit]:
    """Number the units; a backward marker belongs to the unit whose unshard has the same autograd sequence number."""
    units: dict[fx.Node, _Unit] = {}
    by_sequence: dict[Any, _Unit] = {}
    for node in graph.nodes:
        if node.target is UNSHARD:
            reshards = UnshardSpec.parse(node.args[3]).reshard_after_forward
            units[node] = by_sequence[node.meta.get("seq_nr")] = (len(units), module_path(node), reshards)
        elif node.target in _EXPANSIONS:
            units[node] = by_sequence.get(node.meta.get("seq_nr"), (-1, "?", True))
    return units


def _expand_unshard(graph: fx.Graph, marker: fx.Node, unit: _Unit) -> None:
    shard, _, _, text = marker.args
    spec = UnshardSpec.parse(text)  # type: ignore[arg-type]  # fx arguments are untyped
    emit = _emitter(graph, marker, unit)
    full: Any = shard if spec.compute_dtype is None else emit("cast", CAST, shard, spec.compute_dtype)
    for index, group in enumerate(spec.groups if spec.is_sharded else ()):
        is_last = index == len(spec.groups) - 1  # what an earlier stage brings is retained for backward
        gather = emit if is_last else _emitter(graph, marker, (*unit[:2], False))
        full = gather("wait", collectives.WAIT, gather("gather", collectives.ALL_GATHER, full, group.size, group.name))
    for split in [user for user in marker.users if user.target is aten.split_with_sizes.default]:
        _slice_instead(graph, split, full, spec.layout, emit)
    marker.replace_all_uses_with(full)
    graph.erase_node(marker)


def _slice_instead(graph: fx.Graph, split: fx.Node, full: Any, layout: FlatParamLayout, emit: Emit) -> None:
    """A slice for each run that is used: unlike a split, it can be moved to where it is used."""
    for run in list(split.users):
        segment = layout.segments[run.args[1]]  # type: ignore[index]  # likewise
        run.replace_all_uses_with(
            emit("view", aten.slice.Tensor, full, 0, segment.offset, segment.offset + segment.numel)
        )
        graph.erase_node(run)
    graph.erase_node(split)


def _expand_reduce(graph: fx.Graph, marker: fx.Node, unit: _Unit) -> None:
    packed: Any
    packed, text = marker.args
    spec = UnshardSpec.parse(text)  # type: ignore[arg-type]  # fx arguments are untyped
    emit = _emitter(graph, marker, unit)
    how = averaging(packed.meta["val"].dtype, spec.data_parallel_size)
    if packed.target is ADD_ACCUMULATED:  # accumulated gradients are divided too
        packed, flat_param_id = packed.args
        packed = emit("add_accumulated", ADD_ACCUMULATED, _pack_instead(packed, spec.layout, 1.0, emit), flat_param_id)
        packed = packed if how.before == 1 else emit("scale", SCALE, packed, how.before)
    else:
        packed = _pack_instead(packed, spec.layout, how.before, emit)
    all_reduced = [spec.replicas] if spec.replicas is not None else []  # hybrid: the shard alone crosses the slow links
    if spec.is_sharded:
        for group in reversed(spec.groups):
            start = emit("reduce", collectives.REDUCE_SCATTER, packed, how.op, group.size, group.name)
            packed = emit("wait_reduce", collectives.WAIT, start)
    else:
        all_reduced += [group for group in spec.groups if group.size > 1]
    for group in all_reduced:
        start = emit("reduce", collectives.ALL_REDUCE, packed, how.op, group.name)
        packed = emit("wait_reduce", collectives.WAIT, start)
    if how.after > 1:
        packed = emit("scale", SCALE, packed, how.after)
    marker.replace_all_uses_with(packed)
    graph.erase_node(marker)


def _expand_defer_reduce(graph: fx.Graph, marker: fx.Node, unit: _Unit) -> None:
    packed, number, text = marker.args
    emit = _emitter(graph, marker, unit)
    packed = _pack_instead(packed, FlatParamLayout.parse(text), 1.0, emit)  # type: ignore[arg-type]  # fx arguments are untyped
    marker.replace_all_uses_with(emit("defer_reduce", DEFER_REDUCE, packed, number, text))
    graph.erase_node(marker)


_EXPANSIONS: dict[Any, Callable[[fx.Graph, fx.Node, _Unit], None]] = {
    UNSHARD: _expand_unshard,
    REDUCE_GRADS: _expand_reduce,
    DEFER_REDUCE: _expand_defer_reduce,
}


def _pack_instead(sent: fx.Node, layout: FlatParamLayout, divisor: float, emit: Emit) -> fx.Node:
    """`pack_grads` in place of the concatenation of all segments that autograd derived from our own split.

    Anything else (a unit of a single segment, gradients that were combined before) is reduced as it is.
    """
    segments = layout.segments
    dtype = sent.args[1] if sent.target is CAST else None
    concatenated: fx.Node = sent if dtype is None else sent.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    if concatenated.target is not aten.cat.default or len(concatenated.args[0]) != len(segments):  # type: ignore[arg-type]  # likewise
        return sent if divisor == 1 else emit("scale", SCALE, sent, divisor)
    grads: list[fx.Node | None] = [None] * len(layout.shapes)
    for run, segment in zip(concatenated.args[0], segments, strict=True):  # type: ignore[arg-type]  # fx arguments are untyped
        if segment.parameter is not None and not _is_zeros(run):
            grads[segment.parameter] = _prepare(run, dtype, divisor, emit)
    return emit("pack", PACK_GRADS, grads, layout.text)


def _prepare(grad: fx.Node, dtype: Any, divisor: float, emit: Emit) -> fx.Node:
    """Cast and divide one gradient as soon as it exists."""
    steps: list[tuple[Kind, Any, Any]] = [("cast", CAST, dtype)] if dtype is not None else []
    steps += [("scale", SCALE, divisor)] if divisor > 1 else []
    for step in steps:
        prepared = emit(*step[:2], grad, step[2])
        if grad.op != "placeholder":
            grad.append(prepared)
        grad = prepared
    return grad


def _is_zeros(run: fx.Node) -> bool:
    """What the split's derivative puts where a run has no gradient."""
    return run.target is aten.full.default and bool(run.args[1] == 0)


def _emitter(graph: fx.Graph, marker: fx.Node, unit: _Unit) -> Emit:
    """A function that adds a tagged node in the marker's place, with the value that it would have."""
    inherited = {
        k: v for k, v in marker.meta.items() if k not in (*_RECOMPUTE_KEYS, "val", "tensor_meta", "eager_input_vals")
    }

    def emit(kind: Kind, target: Any, *args: Any) -> fx.Node:
        with graph.inserting_before(marker):
            node = graph.create_node("call_function", target, args, name=f"{kind}_{unit[1] or 'root'}")
        node.meta = dict(inherited)
        values = fx.map_arg(args, lambda arg: arg.meta["val"])
        with marker.meta["val"].fake_mode:
            node.meta["val"] = target(*values)
        set_tag(node, Tag(kind, *unit))
        return node

    return emit
