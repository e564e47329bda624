"""Bytes that are alive beside each node of a graph, except gathered and packed buffers: those are part of the plan.

A buffer is alive from the node that computes it to the last one that reads it or a view of it. Inputs are alive
throughout in a forward graph, whose caller holds them; in backward what was saved is freed after its last reader. What
Inductor may compute in its readers (Note [What Inductor fuses]) keeps alive what it is computed from as long as they
run. With one such reader, and if it is a constant, it has no memory itself. With several it is stored if it reads many
buffers; otherwise Inductor decides, and both count, so that the sum is an upper bound.
"""

import operator
from collections.abc import Iterable, Mapping, Set

from torch import Tensor, fx

from fsdp_compile.passes._torch import inductor_config, is_caller_owned, size_hint
from fsdp_compile.passes.graph.node_kinds import is_view, may_be_inlined, reads


def size_of(node: fx.Node) -> int:
    """Bytes of what `node` computes; of sizes that are symbolic, their hints. 0 if it is no tensor."""
    value = node.meta.get("val")
    return size_hint(value.numel()) * value.element_size() if isinstance(value, Tensor) else 0


def live_bytes(
    graph: fx.Graph,
    position: Mapping[fx.Node, int],
    packed: Mapping[fx.Node, int],
    added: Iterable[tuple[int, int]],
    joint: bool = False,
) -> list[int]:
    """Bytes that are alive at each position.

    Args:
        graph: the graph.
        position: positions of the nodes that compute; all others are counted by somebody else.
        packed: nodes that write into memory that is counted elsewhere, and by which position they have run: nothing
            else holds a matrix product in its place, so what it reads may be alive until then.
        added: `(position, bytes)` that are alive from there to the end.
        joint: whether the graph is still to be split into forward and backward, so that it is open what backward
            computes again.
    """
    end = len(position)
    changes = [0] * (end + 1)
    inlined = _inlined(graph, joint)
    last_uses = _last_uses(graph, {**position, **packed}, inlined)

    for node in graph.nodes:
        size = 0 if node in packed else _own_size(node, position, inlined)
        if size:
            producer = node.args[0] if node.target is operator.getitem else node  # elements come with their tuple
            begin = position.get(producer, 0)
            owned = node.op == "placeholder" and is_caller_owned(node)
            until = end - 1 if owned else min(end - 1, max(begin, last_uses[node]))
            changes[begin] += size
            changes[until + 1] -= size
    for begin, size in added:
        changes[min(begin, end)] += size
    total, live = 0, []
    for change in changes[:end]:
        total += change
        live.append(total)
    return live


def _last_uses(graph: fx.Graph, latest: Mapping[fx.Node, int], inlined: Set[fx.Node]) -> dict[fx.Node, int]:
    """Position of the last node that reads what a node computes, also through what has no memory of its own.

    Args:
        graph: the graph, whose nodes stand before their users.
        latest: the last position at which a node may run.
        inlined: nodes that their readers may compute for themselves.
    """
    last_uses: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        last = 0
        for user in node.users:
            if user.op == "output":
                last = len(latest) - 1
                break
            if user in latest:
                passes_on = is_view(user) or user in inlined
                last = max(last, latest[user], last_uses[user] if passes_on else 0)
        last_uses[node] = last
    return last_uses


def _own_size(node: fx.Node, position: Mapping[fx.Node, int], inlined: Set[fx.Node]) -> int:
    """Bytes that `node` allocates, or that an input brings."""
    if node.op == "placeholder":
        return size_of(node)
    schema = getattr(node.target, "_schema", None)
    writes_into_input = schema is not None and schema.is_mutable
    if node not in position or is_view(node) or writes_into_input:
        return 0
    if node in inlined and (not node.all_input_nodes or len(list(reads(node))) == 1):
        return 0
    return size_of(node)


def _inlined(graph: fx.Graph, joint: bool) -> set[fx.Node]:
    """The nodes that loops which read them may compute for themselves.

    Inductor stores what several read if that takes more than `realize_reads_threshold` buffers to compute. In a joint
    graph those may yet become readers in backward that compute it again.
    """
    inlined: set[fx.Node] = set()
    buffers: dict[fx.Node, frozenset[fx.Node]] = {}  # which ones a loop reads that computes a node
    for node in graph.nodes:
        if is_view(node):
            buffers[node] = buffers[node.args[0]]
            continue
        sources = frozenset[fx.Node]().union(*(buffers[each] for each in node.all_input_nodes))
        several = len(set(reads(node))) > 1
        is_stored = not joint and several and len(sources) > inductor_config.realize_reads_threshold
        if may_be_inlined(node) and not is_stored:
            inlined.add(node)
        buffers[node] = sources if node in inlined else frozenset((node,))
    return inlined
