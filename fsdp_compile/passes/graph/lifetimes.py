"""When the values of a graph are alive, and how many bytes that is at each of its nodes."""

# Gathered and packed buffers are not counted: those are part of the plan. A buffer is alive from the node that computes
# it to the last one that reads it or a view of it. Inputs of a forward graph are alive throughout, as its caller holds
# them; in backward, saved tensors are freed after their last reader. A value that Inductor may compute in its readers
# (Note [What Inductor fuses]) keeps its own inputs alive as long as those run. It has no memory itself if it is a
# constant or has one such reader. With several it is stored if it reads many buffers; otherwise Inductor decides, and
# both count, so that the sum is an upper bound.

import operator
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from torch import fx

from fsdp_compile.passes._torch import inductor_config, is_caller_owned
from fsdp_compile.passes.graph.nodes import is_view, may_be_inlined, reads
from fsdp_compile.passes.graph.work import size_of


@dataclass(frozen=True)
class Lifetime:
    """A value of `node`, or of none, that is alive from position `begin` to position `last`, in bytes `size`."""

    node: fx.Node | None
    begin: int
    last: int
    size: int


def lifetimes(
    graph: fx.Graph,
    position: Mapping[fx.Node, int],
    packed: Mapping[fx.Node, int],
    added: Iterable[tuple[int, int]],
    joint: bool = False,
    stored: Set[fx.Node] = frozenset(),
    late: Mapping[fx.Node, int] = MappingProxyType({}),
) -> list[Lifetime]:
    """Return when each value is alive.

    Args:
        graph: the graph.
        position: positions of the nodes that compute; others are not counted.
        packed: nodes that write into memory counted elsewhere, and the position by which they have run: as nothing
            fixes the place of a matrix product, its inputs may be alive until then.
        added: `(position, bytes)` that are alive from there to the end.
        joint: whether the graph is still to be split into forward and backward, so that backward may compute values
            again.
        stored: nodes whose value is stored, whoever reads it.
        late: nodes that may yet become packed, and the position by which they then have run.
    """
    end = len(position)
    in_readers = inlined(graph, joint) - stored
    last_uses = last_uses_of(graph, {**position, **late, **packed}, in_readers)
    result = []
    for node in graph.nodes:
        size = 0 if node in packed else _own_size(node, position, in_readers)
        if size:
            producer = node.args[0] if node.target is operator.getitem else node  # elements come with their tuple
            begin = position.get(producer, 0)
            owned = node.op == "placeholder" and is_caller_owned(node)
            last = end - 1 if owned else min(end - 1, max(begin, last_uses[node]))
            result.append(Lifetime(node, begin, last, size))
    return [*result, *(Lifetime(None, begin, end - 1, size) for begin, size in added)]


def live_bytes(alive: Iterable[Lifetime], end: int) -> list[int]:
    """Bytes that are alive at each of `end` positions."""
    changes = [0] * (end + 1)
    for each in alive:
        changes[each.begin] += each.size
        changes[each.last + 1] -= each.size
    return list(accumulate(changes[:end]))


def last_uses_of(graph: fx.Graph, latest: Mapping[fx.Node, int], inlined: Set[fx.Node]) -> dict[fx.Node, int]:
    """Position of the last node that reads each value, also through values without memory of their own.

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
    """Bytes that `node` allocates on the device, or the size of an input."""
    if node.op == "placeholder":
        return size_of(node)
    schema = getattr(node.target, "_schema", None)
    writes_into_input = schema is not None and schema.is_mutable and all(each.alias_info for each in schema.returns)
    if node not in position or is_view(node) or writes_into_input:
        return 0
    if node in inlined and (not node.all_input_nodes or len(list(reads(node))) == 1):
        return 0
    return size_of(node)


def inlined(graph: fx.Graph, joint: bool) -> set[fx.Node]:
    """The nodes that the loops which read them may compute for themselves.

    Inductor stores a value with several readers if computing it reads more than `realize_reads_threshold` buffers. In a
    joint graph, readers in backward may yet compute it again.
    """
    result: set[fx.Node] = set()
    buffers: dict[fx.Node, frozenset[fx.Node]] = {}  # that a loop reads to compute a node
    for node in graph.nodes:
        if is_view(node):
            buffers[node] = buffers[node.args[0]]
            continue
        sources = frozenset[fx.Node]().union(*(buffers[each] for each in node.all_input_nodes))
        several = len(set(reads(node))) > 1
        is_stored = not joint and several and len(sources) > inductor_config.realize_reads_threshold
        if may_be_inlined(node) and not is_stored:
            result.add(node)
        buffers[node] = sources if node in result else frozenset((node,))
    return result
