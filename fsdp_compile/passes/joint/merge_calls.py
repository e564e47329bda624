"""A unit that a traced forward calls several times is gathered once and reduced once.

    add(reduce_grads(a), reduce_grads(b))  ->  reduce_grads(a + b)      what autograd makes of two calls; casts between

Sums are taken gradient by gradient, so that they are written straight into one pack.
"""

from typing import Any

import torch
from torch import fx

from fsdp_compile.core.ops import ADD_ACCUMULATED, DEFER_REDUCE, REDUCE_GRADS, UNSHARD
from fsdp_compile.passes.graph.node_kinds import CAST

aten = torch.ops.aten


def merge_calls(graph: fx.Graph) -> None:
    """Let equal gathers be one, and reduces that are only added up."""
    sequences = _merge_gathers(graph)
    for marker in [node for node in graph.nodes if node.target in (REDUCE_GRADS, DEFER_REDUCE)]:
        marker.meta["seq_nr"] = sequences.get(marker.meta.get("seq_nr"), marker.meta.get("seq_nr"))
    totals = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    if sum(_merge_reduces(graph, total) for total in totals):
        graph.eliminate_dead_code()


def _merge_gathers(graph: fx.Graph) -> dict[Any, Any]:
    """By the autograd sequence number of a gather that was merged, that of the one which stays."""
    kept: dict[tuple[Any, ...], fx.Node] = {}
    sequences: dict[Any, Any] = {}
    for gather in graph.find_nodes(op="call_function", target=UNSHARD):
        first = kept.setdefault(gather.args, gather)
        if first is not gather:
            sequences[gather.meta.get("seq_nr")] = first.meta.get("seq_nr")
            gather.replace_all_uses_with(first)
            graph.erase_node(gather)
    return sequences


def _merge_reduces(graph: fx.Graph, total: fx.Node) -> bool:
    """Replace `total` by one marker of a sum, if it is the sum of two markers of one unit; whether it was."""
    one, other = (_marker_beneath(addend) for addend in total.args)
    if one is None or other is None or total.kwargs or _identity(one) != _identity(other) or one.meta["seq_nr"] is None:
        return False
    with graph.inserting_before(total):
        packed = _sum_of_packs(graph, one.args[0], other.args[0])
        merged = _like(graph, one, (packed, *one.args[1:]))
        addend: Any = total.args[0]
        cast = merged if addend is one else _like(graph, addend, (merged, *addend.args[1:]))
    total.replace_all_uses_with(cast)
    graph.erase_node(total)
    return True


def _marker_beneath(addend: Any) -> fx.Node | None:
    """The reduce or hand-over that `addend` is, or is a cast of, if nothing else reads it."""
    if not isinstance(addend, fx.Node):
        return None
    node: Any = addend.args[0] if addend.target is CAST and len(addend.users) == 1 else addend
    return node if node.target in (REDUCE_GRADS, DEFER_REDUCE) and len(node.users) == 1 else None


def _identity(marker: fx.Node) -> tuple[Any, ...]:
    """Equal for calls of one unit: the gather's sequence number, and where and how gradients go."""
    return (marker.target, marker.meta["seq_nr"], *marker.args[1:])


def _sum_of_packs(graph: fx.Graph, one: Any, other: Any) -> fx.Node:
    if one.target is ADD_ACCUMULATED:  # what was kept counts once
        return _like(graph, one, (_sum_of_packs(graph, one.args[0], other.args[0]), *one.args[1:]))
    if one.target is aten.cat.default and other.target is aten.cat.default:
        return _like(graph, one, ([_sum(graph, a, b) for a, b in zip(one.args[0], other.args[0], strict=True)],))
    return _sum(graph, one, other)


def _sum(graph: fx.Graph, one: Any, other: Any) -> fx.Node:
    zeros = [node for node in (one, other) if node.target is aten.full.default and node.args[1] == 0]
    if zeros:
        return other if one is zeros[0] else one
    total = graph.call_function(aten.add.Tensor, (one, other))
    total.meta = dict(one.meta)
    return total


def _like(graph: fx.Graph, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    twin = graph.call_function(node.target, args, node.kwargs)  # type: ignore[arg-type]  # fx targets are declared wider
    twin.meta = dict(node.meta)
    return twin
