"""What a graph costs: operations and bytes of each node, and the bytes that are alive beside it.

What passes between loops that Inductor fuses counts no bytes, see Note [What Inductor fuses]. What a chain of loops
takes from elsewhere is read once, what others take from it is written. Symbolic sizes count as their hints.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from fsdp_compile.passes._torch import inductor_config, is_caller_owned, size_hint, tree_leaves
from fsdp_compile.passes.cost.hardware import Hardware, attention_seconds, product_seconds
from fsdp_compile.passes.graph.nodes import (
    aten,
    flop_formula,
    get_tag,
    is_loop,
    is_passed_on,
    is_scalar,
    is_view,
    may_be_inlined,
    packet_of,
    reads,
    stays_in_loops,
    value_readers,
)

_FREE_NAMESPACES = {"_c10d_functional", "c10d_functional", "fsdp_flat"}  # links have costs of their own
_LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather}  # read as much as they return
SCATTERS = {aten.index_put, aten.index_put_, aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate}
SCATTERS |= {aten.scatter_add, aten.scatter_add_}  # write as much as they are given


@dataclass(frozen=True)
class Work:
    """What something computes and moves.

    Attributes:
        flops: floating-point operations of matrix products, convolutions and attention.
        read_bytes: what is read from memory.
        written_bytes: what is written to it.
    """

    flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
        )


def node_work(node: fx.Node) -> Work:
    """The work of one node, by the values in `meta["val"]`; none for views, collectives and numbers."""
    is_free = is_passed_on(node) or is_scalar(node) or getattr(node.target, "namespace", None) in _FREE_NAMESPACES
    if node.op != "call_function" or is_free:
        return Work()
    if packet_of(node) in SCATTERS:
        moved = sum(map(_bytes, node.all_input_nodes[1:]))
        return Work(0, moved, moved)
    return Work(_flops(node), _read_bytes(node), 0 if stays_in_loops(node) else _bytes(node))


def _flops(node: fx.Node) -> int:
    formula = flop_formula(node)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    flops = size_hint(formula(*args, **kwargs, out_val=node.meta["val"]))
    return flops // 2 if _is_causal(node) else flops


def _is_causal(node: fx.Node) -> bool:
    """Whether this is attention, or its backward, in which no token sees those that follow it: half is computed."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    if "is_causal" not in names:
        return False
    at = names.index("is_causal")
    return bool(node.args[at] if at < len(node.args) else node.kwargs.get("is_causal"))


def node_seconds(node: fx.Node, hardware: Hardware) -> float:
    """How long `node` computes, as `hardware` says; what passes between loops takes nothing."""
    work = node_work(node)
    moved = work.read_bytes + work.written_bytes
    if not work.flops:
        return moved / (hardware.bandwidth * hardware.chain_efficiency)
    packet, dtype = packet_of(node), dtype_of(node)
    if "attention" in str(packet):
        keys = node.args[2 if "backward" in str(packet) else 1].meta["val"].shape[-2]  # type: ignore[union-attr]  # fx arguments are untyped
        return attention_seconds(work.flops, size_hint(keys), "backward" in str(packet), dtype, hardware)
    left = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}.get(packet)
    inner = math.inf if left is None else size_hint(node.args[left].meta["val"].shape[-1])  # type: ignore[union-attr]  # fx arguments are untyped
    return product_seconds(work.flops, moved, inner, dtype, hardware)


def dtype_of(node: fx.Node) -> str:
    """In which dtype a node computes: that of its first floating-point input."""
    inputs = (leaf for each in node.all_input_nodes for leaf in tree_leaves(each.meta.get("val")))
    dtypes = (each.dtype for each in inputs if isinstance(each, torch.Tensor) and each.dtype.is_floating_point)
    return str(next(dtypes, torch.float32)).removeprefix("torch.")


def _read_bytes(node: fx.Node) -> int:
    if packet_of(node) in _LOOKUPS:
        return sum(map(_bytes, node.all_input_nodes[1:])) + _bytes(node)
    if not is_loop(node):
        return sum(map(_bytes, node.all_input_nodes))
    return sum(_bytes(each) for each in node.all_input_nodes if _reads_first(node, _origin(each)))


def _reads_first(loop: fx.Node, origin: fx.Node) -> bool:
    """Whether `loop` is where its chain reads `origin` from memory: the first of the loops that do."""
    return not is_loop(origin) and next(user for user in value_readers(origin) if is_loop(user)) is loop


def _origin(node: fx.Node) -> fx.Node:
    """The node whose memory holds the value of `node`."""
    while node.op == "call_function" and is_passed_on(node):
        node = node.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    return node


def _bytes(node: fx.Node) -> int:
    tensors = (each for each in tree_leaves(node.meta.get("val")) if isinstance(each, torch.Tensor))
    return sum(_numel(each) * each.dtype.itemsize for each in tensors)


def _numel(tensor: torch.Tensor) -> int:
    """Elements in memory: a dimension that `expand` made has none."""
    sizes: Any = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size_hint(size) for size, stride in sizes if not (isinstance(stride, int) and stride == 0))


# --- memory -----------------------------------------------------------------------------------------------------------

# Gathered and packed buffers are not counted: those are part of the plan. A buffer is alive from the node that computes
# it to the last one that reads it or a view of it. Inputs are alive throughout in a forward graph, whose caller holds
# them; in backward what was saved is freed after its last reader. What Inductor may compute in its readers (Note [What
# Inductor fuses]) keeps alive what it is computed from as long as they run. With one such reader, and if it is a
# constant, it has no memory itself. With several it is stored if it reads many buffers; otherwise Inductor decides, and
# both count, so that the sum is an upper bound.


def size_of(node: fx.Node) -> int:
    """Bytes of what `node` computes; of sizes that are symbolic, their hints. 0 if it is no tensor."""
    value = node.meta.get("val")
    return size_hint(value.numel()) * value.element_size() if isinstance(value, Tensor) else 0


@dataclass(frozen=True)
class Lifetime:
    """When something is alive: from position `begin` to position `last`; `node` computes it, or None."""

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
    """What is alive at which positions.

    Args:
        graph: the graph.
        position: positions of the nodes that compute; all others are counted by somebody else.
        packed: nodes that write into memory that is counted elsewhere, and by which position they have run: nothing
            else holds a matrix product in its place, so what it reads may be alive until then.
        added: `(position, bytes)` that are alive from there to the end.
        joint: whether the graph is still to be split into forward and backward, so that it is open what backward
            computes again.
        stored: nodes that have memory, whoever reads them.
        late: nodes that may yet become packed, and by which position they have run then.
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
    return [*result, *(Lifetime(None, begin, end - 1, size) for begin, size in added if begin < end)]


def live_bytes(alive: Iterable[Lifetime], end: int) -> list[int]:
    """Bytes that are alive at each of `end` positions."""
    changes = [0] * (end + 1)
    for each in alive:
        changes[each.begin] += each.size
        changes[each.last + 1] -= each.size
    return list(accumulate(changes[:end]))


def last_uses_of(graph: fx.Graph, latest: Mapping[fx.Node, int], inlined: Set[fx.Node]) -> dict[fx.Node, int]:
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
    """Bytes that `node` allocates on the device, or that an input brings."""
    if (tag := get_tag(node)) is not None and tag.kind == "host":
        return 0
    if node.op == "placeholder":
        return size_of(node)
    schema = getattr(node.target, "_schema", None)
    writes_into_input = schema is not None and schema.is_mutable
    if node not in position or is_view(node) or writes_into_input:
        return 0
    if node in inlined and (not node.all_input_nodes or len(list(reads(node))) == 1):
        return 0
    return size_of(node)


def inlined(graph: fx.Graph, joint: bool) -> set[fx.Node]:
    """The nodes that loops which read them may compute for themselves.

    Inductor stores what several read if that takes more than `realize_reads_threshold` buffers to compute. In a joint
    graph those may yet become readers in backward that compute it again.
    """
    result: set[fx.Node] = set()
    buffers: dict[fx.Node, frozenset[fx.Node]] = {}  # which ones a loop reads that computes a node
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
