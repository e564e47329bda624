"""Bytes that live beside each node of a graph, collectives aside.

A buffer lives from the node that computes it to the last one that reads it or a view of it. Inputs live throughout in a
forward graph, whose caller holds them; in backward what was saved goes with its last reader. A pointwise result that
only other pointwise or reducing nodes read may be computed in its readers, which then read what it was computed from,
so that lives as long. With one such reader, and of a constant with any number, it has no memory. With several it is
stored if it reads many buffers; else Inductor decides, and both count.
"""

import operator
from collections.abc import Iterable, Mapping, Set
from functools import cache

from torch import Tensor, fx
from torch._inductor import config as inductor_config

from fsdp_compile.passes._torch import is_caller_owned, size_hint
from fsdp_compile.passes.graph.node_kinds import is_loop, is_pointwise, is_view, reads


def size_of(node: fx.Node) -> int:
    """Bytes of what `node` computes; of sizes that are symbolic, their hints. 0 if it is no tensor."""
    value = node.meta.get("val")
    return size_hint(value.numel()) * value.element_size() if isinstance(value, Tensor) else 0


def live_bytes(
    graph: fx.Graph,
    place: Mapping[fx.Node, int],
    packed: Mapping[fx.Node, int],
    added: Iterable[tuple[int, int]],
    joint: bool = False,
) -> list[int]:
    """Bytes that live at each position.

    Args:
        graph: the graph.
        place: positions of the nodes that compute; all others are counted by somebody else.
        packed: nodes that write into memory that is counted elsewhere, and by which position they have run: nothing
            else holds a matrix product in its place, so what it reads may live until then.
        added: `(position, bytes)` that live from there to the end.
        joint: whether it is still to be parted into forward and backward, and so open what backward computes again.
    """
    end = len(place)
    changes = [0] * (end + 1)
    latest, inlined = {**place, **packed}, _inlined(graph, joint)
    last_use = cache(lambda node: _last_use(node, latest, inlined, last_use))
    for node in graph.nodes:
        size = 0 if node in packed else _own_size(node, place, inlined)
        if size:
            begin = place.get(_producer(node), 0)
            owned = node.op == "placeholder" and is_caller_owned(node)
            until = end - 1 if owned else min(end - 1, max(begin, last_use(node)))
            changes[begin] += size
            changes[until + 1] -= size
    for begin, size in added:
        changes[min(begin, end)] += size
    total, live = 0, []
    for change in changes[:end]:
        total += change
        live.append(total)
    return live


def _last_use(node: fx.Node, place, inlined, last_use) -> int:  # type: ignore[no-untyped-def]  # a recursion through a cache
    """Position of the last node that reads what `node` computes, also through what has no memory of its own."""
    last = 0
    for user in node.users:
        if user.op == "output":
            return len(place) - 1
        if user in place:
            through = is_view(user) or user in inlined
            last = max(last, place[user], last_use(user) if through else 0)
    return last


def _producer(node: fx.Node) -> fx.Node:
    """The node that runs: an element of a tuple comes with the tuple."""
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]  # fx arguments are untyped


def _own_size(node: fx.Node, place: Mapping[fx.Node, int], inlined: Set[fx.Node]) -> int:
    if node.op == "placeholder":
        return size_of(node)
    if node not in place or is_view(node) or _is_mutation(node):
        return 0
    if node in inlined and (not node.all_input_nodes or len(list(reads(node))) == 1):
        return 0
    return size_of(node)


def _is_mutation(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _inlined(graph: fx.Graph, joint: bool) -> set[fx.Node]:
    """The nodes that loops which read them may compute for themselves.

    Inductor stores what several read if that takes more than `realize_reads_threshold` buffers to compute. In a joint
    graph those may yet become readers in backward that compute it again.
    """
    found: set[fx.Node] = set()
    buffers: dict[fx.Node, frozenset[fx.Node]] = {}  # which a loop reads that computes a node
    for node in graph.nodes:
        if is_view(node):
            buffers[node] = buffers[node.args[0]]
            continue
        sources = frozenset[fx.Node]().union(*(buffers[each] for each in node.all_input_nodes))
        several = len(set(reads(node))) > 1
        is_constant = node.op == "call_function" and not node.all_input_nodes
        is_stored = not joint and several and len(sources) > inductor_config.realize_reads_threshold
        if (is_pointwise(node) or is_constant) and all(map(is_loop, reads(node))) and not is_stored:
            found.add(node)
        buffers[node] = sources if node in found else frozenset((node,))
    return found
