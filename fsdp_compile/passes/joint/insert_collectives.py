"""Replace markers by functional collectives with separate waits, so that later passes can move start and wait apart.

A unit that the traced forward calls several times is gathered once and reduced once:

    unshard(s), unshard(s)                  ->  unshard(s)
    add(reduce_grads(a), reduce_grads(b))   ->  reduce_grads(a + b), gradient by gradient

Then each marker is replaced:

    unshard and its split           ->  all_gather_into_tensor, wait_tensor, a slice for each parameter in use;
                                        two stages if backward gathers again in a smaller group
    reduce_grads                    ->  reduce_scatter_tensor (NO_SHARD: all_reduce), wait_tensor; likewise
    defer_reduce, update_shard      ->  stays, and is tagged
    the concatenation of gradients  ->  pack_grads, which Inductor lowers without copies
    a cast or division of that      ->  of each gradient, so that the kernel that writes it into the pack does both
"""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fsdp_compile.comm import collectives
from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.groups import shared_name
from fsdp_compile.core import ops
from fsdp_compile.core.flat_collectives import averaging
from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.passes.graph import nodes
from fsdp_compile.passes.pipeline import GraphContext

aten = torch.ops.aten
SCALE = aten.div.Scalar  # of gradients in float16, around their sum

_REDUCES = (ops.REDUCE_GRADS, ops.DEFER_REDUCE)

# Note [Graphs without a rank]
# All ranks must run the same collectives in the same order, and on the CPU they share one compile cache. So no pass may
# put a constant that depends on the rank into a graph. The layout of a unit is the same string on all ranks; slices of
# gathered parameters have offsets in the full buffer; padding makes shards equally large; only the eager runtime knows
# which part of a parameter a rank owns. Process groups have names that are equal on all ranks of a mesh
# (comm/groups.py, Note [Names of groups]).


def insert_collectives(context: GraphContext) -> None:
    """Replace the markers by collectives, and tag these."""
    graph = context.graph
    _merge_calls(graph)
    units, context.specs = _units_of_markers(graph, is_short=context.config.budget is not None)
    for marker, unit in units.items():
        emit = nodes.emitter(graph, marker, unit)
        if marker.target is ops.UNSHARD:
            spec, retained = context.specs[unit.unit], nodes.emitter(graph, marker, replace(unit, reshard=False))
            if spec.is_part:
                _note_arriving(marker, unit)
            new = _expand_unshard(marker, spec, retained, emit)
        elif marker.target is ops.REDUCE_GRADS:
            new = _expand_reduce(marker, emit)
        else:
            packed, flat_param_id, text = marker.args
            packed = _pack(packed, FlatParamLayout.parse(text), 1.0, emit)  # type: ignore[arg-type]  # fx arguments are untyped
            new = emit("defer_reduce", ops.DEFER_REDUCE, packed, flat_param_id, text, **marker.kwargs)
        marker.replace_all_uses_with(new)
        graph.erase_node(marker)
    _tag_updates(graph)
    nodes.eliminate_dead_code(graph)  # gathers of `loss + 0 * weight.sum()`, whose zeros Inductor has folded
    for node in graph.nodes:  # collectives of others, such as those of DTensor, name their groups as ours do
        at = collectives.GROUP_ARGUMENT.get(node.target)
        if at is not None and isinstance(node.args[at], str):
            node.update_arg(at, shared_name(group_named(node.args[at])))


def _note_arriving(marker: fx.Node, unit: nodes.Tag) -> None:
    """Tag a flat parameter of a block that is compiled by itself: the eager runtime gathers it beside others."""
    full: fx.Node = marker.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    if full.op != "placeholder":  # nothing would wait for it
        raise RuntimeError(f"{full.name}: expected a flat parameter, an input of the graph, found {full.target}")
    nodes.set_tag(full, replace(unit, kind="arriving"))


def _tag_updates(graph: fx.Graph) -> None:
    """Make updates run where they stand in the graph; `place_updates` puts them behind all readers of the shard."""
    updated: set[Any] = set()
    for update in graph.find_nodes(op="call_function", target=ops.UPDATE_SHARD):
        grad, flat_param_id, *_ = update.args
        unit = nodes.tag_of(grad.args[0] if grad.target is nodes.CAST else grad)
        if flat_param_id in updated:
            raise RuntimeError(
                f"unit {unit.path or 'root'} is called several times in a forward, so its first gradient is not the "
                f"whole one; use compile_step without update_in_backward"
            )
        updated.add(flat_param_id)
        update.args = (grad, flat_param_id, True)
        nodes.set_tag(update, replace(unit, kind="update"))


def _units_of_markers(graph: fx.Graph, is_short: bool) -> tuple[dict[fx.Node, nodes.Tag], dict[int, ops.UnshardSpec]]:
    """Map markers to units, in backward by the autograd sequence number of the unshard; and units to their specs.

    Unless memory `is_short`, it is open whether the root reshards: the rule keeps it, as eager forwards do.
    """
    units: dict[fx.Node, nodes.Tag] = {}
    specs: dict[int, ops.UnshardSpec] = {}
    by_sequence: dict[Any, nodes.Tag] = {}
    for node in graph.nodes:
        sequence = node.meta.get("seq_nr")
        if node.target is ops.UNSHARD:
            spec = ops.UnshardSpec.parse(node.args[3])
            is_open = spec.of_root and spec.reshard_after_forward and not is_short
            reshard = None if is_open else spec.reshard_after_forward
            tag = nodes.Tag("gather", len(units), nodes.module_path(node), reshard)
            specs[tag.unit], units[node], by_sequence[sequence] = spec, tag, tag
        elif node.target in _REDUCES:
            if sequence is None or sequence not in by_sequence:
                raise RuntimeError(
                    f"{node.name}: expected the autograd sequence number of an unshard before it, found {sequence}; "
                    f"compile the sharded module with torch.compile, which sets it"
                )
            units[node] = by_sequence[sequence]
    return units, specs


# --- several calls of one unit ----------------------------------------------------------------------------------------


def _merge_calls(graph: fx.Graph) -> None:
    """Merge equal unshards, and reduces whose results are only added."""
    first_calls: dict[tuple[Any, ...], fx.Node] = {}
    sequences: dict[Any, Any] = {}  # of a merged unshard -> of the one that stays
    for marker in graph.find_nodes(op="call_function", target=ops.UNSHARD):
        first = first_calls.setdefault(marker.args, marker)
        if first is not marker:
            sequences[marker.meta.get("seq_nr")] = first.meta.get("seq_nr")
            marker.replace_all_uses_with(first)
            graph.erase_node(marker)
    for target in _REDUCES:
        for marker in graph.find_nodes(op="call_function", target=target):
            marker.meta["seq_nr"] = sequences.get(marker.meta.get("seq_nr"), marker.meta.get("seq_nr"))
    for total in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        _merge_reduces(graph, total)
    graph.eliminate_dead_code(lambda node: node.is_impure() or node.target is ops.UNSHARD)  # a gradient may be constant


def _merge_reduces(graph: fx.Graph, total: fx.Node) -> None:
    """Replace `total`, if it adds two reduces of one unit, by one reduce of the sum."""
    one, other = (_marker_beneath(addend) for addend in total.args)
    if one is None or other is None or total.kwargs or one.meta["seq_nr"] is None:
        return
    what, other_what = ((each.target, each.meta["seq_nr"], each.kwargs) for each in (one, other))
    if what != other_what:
        return  # of two units, or to be reduced in two ways
    with graph.inserting_before(total):
        packed = _sum_of_packs(graph, one.args[0], other.args[0])
        merged = _copy_with(graph, one, (packed, *one.args[1:]))
        addend: Any = total.args[0]
        result = merged if addend is one else _copy_with(graph, addend, (merged, *addend.args[1:]))
    total.replace_all_uses_with(result)
    graph.erase_node(total)


def _marker_beneath(addend: Any) -> fx.Node | None:
    """Return the reduce that `addend` is, or is a cast of, if nothing else reads it."""
    if not isinstance(addend, fx.Node):
        return None
    node: Any = addend.args[0] if addend.target is nodes.CAST and len(addend.users) == 1 else addend
    return node if node.target in _REDUCES and len(node.users) == 1 else None


def _sum_of_packs(graph: fx.Graph, one: Any, other: Any) -> fx.Node:
    if one.target is ops.ADD_ACCUMULATED:  # accumulated gradients count once
        return _copy_with(graph, one, (_sum_of_packs(graph, one.args[0], other.args[0]), *one.args[1:]))
    if one.target is aten.cat.default and other.target is aten.cat.default:
        sums = [_sum(graph, a, b) for a, b in zip(one.args[0], other.args[0], strict=True)]
        return _copy_with(graph, one, (sums,))
    return _sum(graph, one, other)


def _sum(graph: fx.Graph, one: Any, other: Any) -> fx.Node:
    if _is_zeros(one) or _is_zeros(other):
        return other if _is_zeros(one) else one
    total = graph.call_function(aten.add.Tensor, (one, other))
    total.meta = dict(one.meta)
    return total


def _copy_with(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    copy = graph.call_function(node.target, args, node.kwargs)  # type: ignore[arg-type]  # fx targets are declared wider
    copy.meta = dict(node.meta)
    return copy


def _is_zeros(segment: fx.Node) -> bool:
    """Whether a segment has no gradient: the derivative of the split puts zeros there."""
    return segment.target is aten.full.default and bool(segment.args[1] == 0)


# --- each marker ------------------------------------------------------------------------------------------------------


def _expand_unshard(marker: fx.Node, spec: ops.UnshardSpec, retained: nodes.Emit, emit: nodes.Emit) -> fx.Node:
    """Emit the all-gather; the result of an earlier stage is `retained` for backward."""
    full: Any = marker.args[0]
    if spec.compute_dtype is not None:
        full = emit("cast", nodes.CAST, full, spec.compute_dtype)
    for group in spec.groups if spec.is_sharded else ():
        stage = emit if group is spec.groups[-1] else retained
        full = stage("gather", collectives.ALL_GATHER, full, group.size, group.name, wire=group.gather)
        full = stage("wait", collectives.WAIT, full)
    for split in [user for user in marker.users if user.target is aten.split_with_sizes.default]:
        for element in split.users:  # a slice for each one that is used: unlike the split, it can be moved
            segment = spec.layout.segments[element.args[1]]  # type: ignore[index]  # fx arguments are untyped
            begin, end = segment.offset, segment.offset + segment.numel
            element.replace_all_uses_with(emit("view", aten.slice.Tensor, full, 0, begin, end))
    return full


def _expand_reduce(marker: fx.Node, emit: nodes.Emit) -> fx.Node:
    """Emit the packing and the reduce; return the gradient of the shard."""
    packed: Any
    packed, text = marker.args
    spec = ops.UnshardSpec.parse(text)  # type: ignore[arg-type]  # fx arguments are untyped
    dtype = packed.meta["val"].dtype
    how = averaging(dtype, spec.data_parallel_size, spec.same_bits, spec.divisor)
    if packed.target is ops.ADD_ACCUMULATED:  # accumulated gradients are divided too
        packed, flat_param_id = packed.args
        packed = emit("add_accumulated", ops.ADD_ACCUMULATED, _pack(packed, spec.layout, 1.0, emit), flat_param_id)
        packed = packed if how.before == 1 else emit("scale", SCALE, packed, how.before)
    else:
        packed = _pack(packed, spec.layout, how.before, emit)
    all_reduced = [spec.replicas] if spec.replicas is not None else []  # hybrid: the shard alone crosses the slow links
    if spec.is_sharded:
        for group in reversed(spec.reduce_groups or spec.groups):
            args = packed, how.op, group.size, group.name
            start = emit("reduce", collectives.REDUCE_SCATTER, *args, wire=group.reduce)
            packed = emit("wait_reduce", collectives.WAIT, start)
    else:
        all_reduced += [group for group in spec.groups if group.size > 1]
    for group in all_reduced:
        start = emit("reduce", collectives.ALL_REDUCE, packed, how.op, group.name, wire=group.reduce)
        packed = emit("wait_reduce", collectives.WAIT, start)
    return packed if how.after == 1 else emit("scale", SCALE, packed, how.after)


def _pack(sent: Any, layout: FlatParamLayout, divisor: float, emit: nodes.Emit) -> fx.Node:
    """Replace the concatenation that autograd derived from a unit's split by `pack_grads`.

    Anything else (a unit of a single segment, gradients combined before) is reduced as it is.
    """
    dtype = sent.args[1] if sent.target is nodes.CAST else None
    concatenated = sent if dtype is None else sent.args[0]
    if concatenated.target is not aten.cat.default or len(concatenated.args[0]) != len(layout.segments):
        _view_at_once(sent)
        return sent if divisor == 1 else emit("scale", SCALE, sent, divisor)
    steps: list[tuple[nodes.Kind, Any, Any]] = [("cast", nodes.CAST, dtype)] if dtype is not None else []
    steps += [("scale", SCALE, divisor)] if divisor > 1 else []
    grads: list[fx.Node | None] = [None] * len(layout.shapes)
    for grad, segment in zip(concatenated.args[0], layout.segments, strict=True):
        if segment.parameter is not None and not _is_zeros(grad):
            for kind, target, argument in steps:
                grad = emit(kind, target, grad, argument)
                _view_at_once(grad)
            grads[segment.parameter] = grad
    return emit("pack", ops.PACK_GRADS, grads, layout.text)


def _view_at_once(gradient: fx.Node) -> None:
    """Move a gradient that is a view, a cast or scaled next to the node that computes it.

    Autograd puts both where it ends with the parameter, which for the root unit is the end of backward; the planner
    would take the gradient to be ready only there.
    """
    source = nodes.source_of(gradient, lambda node: nodes.is_view_or_cast(node) or node.target is SCALE)
    while gradient is not source and len(gradient.all_input_nodes) == 1 and source.op != "placeholder":
        source.append(gradient)  # the last view first: each of the others comes to stand before it
        gradient = gradient.args[0]  # type: ignore[assignment]  # fx arguments are untyped
