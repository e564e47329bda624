"""From partitioned graphs to numbers: the kernels of each direction, what is saved, and what is alive at most.

Compiled, loops between two products are one kernel, what passes between them takes neither time nor memory, and what
they read and write is counted nearly as the planner counts it (passes/graph/node_costs.py). Eager, each operator is a
kernel that reads all it is given and writes all it returns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.explain._torch import Graphs, pytree
from fsdp_compile.explain.work import Attention, Chain, Kernel, Product, UnitWork
from fsdp_compile.passes._torch import is_tangent
from fsdp_compile.passes.graph.costs import SCATTERS, dtype_of, node_work
from fsdp_compile.passes.graph.nodes import aten, is_loop, is_passed_on, is_product, is_scalar, packet_of, value_readers

_LEFT = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # which argument is the left matrix
_ATTENTION = "fsdp_explain::attention"


@dataclass(frozen=True)
class Part:
    """Numbers of a part of a step, as `UnitWork` has them."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    logits_bytes: int = 0

    def unit(self, name: str, parameters: int, input_bytes: int) -> UnitWork:
        """The unit of these numbers."""
        return UnitWork(
            name,
            parameters,
            self.forward,
            self.backward,
            input_bytes,
            self.saved_bytes,
            self.forward_bytes,
            self.backward_bytes,
            self.logits_bytes,
        )


def save_by_operator(joint: fx.Graph) -> None:
    """Let backward compute all again but attention and every second product, beginning with the first."""
    backward: set[fx.Node] = set()
    products = 0
    for node in joint.nodes:
        if is_tangent(node) or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function":
            products += is_product(node)
            saved = _is_attention(_origin(node)) or (is_product(node) and products % 2 == 1)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0


def read_part(graphs: Graphs, compiled: bool, parameters: int) -> Part:
    """All of a forward and its backward.

    Args:
        graphs: what was traced; its first `parameters` inputs are parameters.
        compiled: whether chains are fused.
        parameters: how many there are.
    """
    forward, backward = list(graphs.forward.nodes), list(graphs.backward.nodes)
    memory = _Memory(graphs, compiled, parameters)
    return memory.part(forward, backward)


def divided(graphs: Graphs, compiled: bool, block: Any, parameters: int) -> tuple[Part, Part]:
    """What comes before the nodes that stand for blocks, and what comes after them; without such nodes all does."""
    memory = _Memory(graphs, compiled, parameters, block)
    before, after = _split(list(graphs.forward.nodes), block)
    after_backward, before_backward = _split(list(graphs.backward.nodes), block)
    if not any(node.target is block for node in graphs.forward.nodes):
        before, after, before_backward, after_backward = [], before, [], after_backward
        after_backward = list(graphs.backward.nodes)
    return memory.part(before, before_backward), memory.part(after, after_backward)


def _split(nodes: list[fx.Node], block: Any) -> tuple[list[fx.Node], list[fx.Node]]:
    ends = [at for at, node in enumerate(nodes) if node.target is block]
    return (nodes[: ends[0]], nodes[ends[-1] + 1 :]) if ends else (nodes, [])


# --- kernels ----------------------------------------------------------------------------------------------------------


def _kernels(nodes: Iterable[fx.Node], compiled: bool) -> tuple[Kernel, ...]:
    kernels: list[Kernel] = []
    chained = 0
    for node in nodes:
        if node.op != "call_function" or is_passed_on(node) or is_scalar(node):
            continue
        kernel = _attention(node) if _is_attention(node) else _product(node) if is_product(node) else None
        if kernel is None:
            if compiled:
                chained += _moved_by_chain(node)
            elif moved := _moved(node):
                kernels.append(Chain(moved, fused=False))
            continue
        if chained:
            kernels.append(Chain(chained))
            chained = 0
        kernels.append(kernel)
    return (*kernels, Chain(chained)) if chained else tuple(kernels)


def _is_fused(node: fx.Node) -> bool:
    """Whether Inductor computes `node` in loops: also few elements that are looked up, and what is put side by side."""
    return is_loop(node) or packet_of(node) in (aten.gather, aten.cat)


def _is_inlined(node: fx.Node) -> bool:
    """Whether the value of `node` passes between loops alone."""
    return _is_fused(node) and all(map(_is_fused, value_readers(node)))


def _moved_by_chain(node: fx.Node) -> int:
    """Bytes that `node` adds to those of its chain, which reads what it takes from elsewhere once."""
    if packet_of(node) in SCATTERS:
        return 2 * sum(map(_bytes, node.all_input_nodes[1:]))
    if not _is_fused(node):
        return _moved(node)
    origins = dict.fromkeys(_origin(each) for each in node.all_input_nodes)
    read = sum(_bytes(each) for each in origins if not _is_fused(each) and _first_loop(each) is node)
    return read + (0 if _is_inlined(node) else _bytes(node))


def _first_loop(origin: fx.Node) -> fx.Node | None:
    return next((each for each in value_readers(origin) if _is_fused(each)), None)


def _moved(node: fx.Node) -> int:
    """Bytes that an eager operator reads and writes; look-ups read as much as they return, losses next to nothing."""
    written = _bytes(node)
    if packet_of(node) in (aten.nll_loss_forward, aten.nll_loss_backward):
        return written
    if packet_of(node) in (aten.embedding, aten.index, aten.index_select, aten.gather):
        return 2 * written
    return written + sum(map(_bytes, node.all_input_nodes))


def _is_attention(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "name", str)().startswith(_ATTENTION)


def _attention(node: fx.Node) -> Attention:
    backward = packet_of(node) is torch.ops.fsdp_explain.attention_backward
    query, key = (node.args[at].meta["val"] for at in ((1, 2) if backward else (0, 1)))  # type: ignore[union-attr]  # fx arguments are untyped
    batch, heads, queries, width = query.shape
    return Attention(batch, heads, queries, key.shape[-2], width, bool(node.args[-1]), backward, dtype_of(node))


def _product(node: fx.Node) -> Product | None:
    at, packet = _LEFT.get(packet_of(node)), packet_of(node)
    moved = sum(map(_bytes, node.all_input_nodes)) + _bytes(node)
    if at is None:  # a convolution: as one product of its operations
        work = node_work(node)
        if not work.flops:
            return None
        return Product(1, 1, 1, work.flops // 2, moved, dtype_of(node))
    left, right = node.args[at].meta["val"], node.args[at + 1].meta["val"]  # type: ignore[union-attr]  # fx arguments are untyped
    batch = left.shape[0] if left.dim() == 3 else 1
    weight = packet in (aten.mm, aten.addmm)
    return Product(batch, left.shape[-2], left.shape[-1], right.shape[-1], moved, dtype_of(node), weight)


def _bytes(node: fx.Node) -> int:
    """Bytes of what `node` computes; a dimension that `expand` made has none."""
    tensors = [each for each in pytree.tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]
    return sum(
        each.dtype.itemsize * prod(size for size, stride in zip(each.shape, each.stride(), strict=True) if stride)
        for each in tensors
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def _origin(node: fx.Node) -> fx.Node:
    """The node whose memory holds the value of `node`; what scatters writes into its first argument."""
    while node.op == "call_function" and (is_passed_on(node) or packet_of(node) in SCATTERS):
        node = node.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    return node


class _Memory:
    """Which nodes of two graphs have memory of their own."""

    def __init__(self, graphs: Graphs, compiled: bool, parameters: int, block: Any = None) -> None:
        self.graphs, self.compiled, self.block = graphs, compiled, block
        outputs = list(_outputs(graphs.forward))
        self.returned = {_origin(each) for each in outputs[: graphs.returned] if isinstance(each, fx.Node)}
        saved = [each for each in outputs[graphs.returned :] if isinstance(each, fx.Node)]
        self.saved = {_origin(each) for each in saved if self._own(_origin(each))} - self.returned
        self.origin_of = {each.name: _origin(each) for each in saved}  # by name of the input of backward
        gradients = _outputs(graphs.backward)[:parameters] if len(graphs.backward.nodes) else []
        self.gradients = {_origin(each) for each in gradients if isinstance(each, fx.Node)}

    def _own(self, node: fx.Node) -> int:
        """Bytes that a node allocates."""
        is_free = node.op != "call_function" or _origin(node) is not node or is_scalar(node)
        if is_free or node.target is self.block or (self.compiled and _is_inlined(node)):
            return 0
        return _bytes(node)

    def part(self, forward: Sequence[fx.Node], backward: Sequence[fx.Node]) -> Part:
        """The numbers of some nodes of forward and backward."""
        inside = set(forward)
        saved = {node: self._own(node) for node in self.saved if node in inside}
        until_end = {**saved, **{node: self._own(node) for node in self.returned if node in inside}}
        forward_peak, _ = self._alive(forward, {}, set(until_end), 0)
        columns = _widest(forward)
        given: dict[fx.Node, int] = {}
        first: dict[fx.Node, fx.Node] = {}
        for node in self.graphs.backward.nodes:
            if node.op != "placeholder":
                continue
            origin = self.origin_of.get(node.name)
            if is_tangent(node):
                given[node] = _bytes(node)
            elif origin in saved:
                first.setdefault(origin, node)
                given[node] = saved[origin] if first[origin] is node else 0
        together = {node: first[self.origin_of[node.name]] for node in given if node.name in self.origin_of}
        backward_peak, logits = self._alive(backward, given, set(), columns, together)
        return Part(
            _kernels(forward, self.compiled),
            _kernels(backward, self.compiled),
            sum(saved.values()),
            forward_peak,
            backward_peak,
            logits,
        )

    def _alive(
        self,
        nodes: Sequence[fx.Node],
        given: dict[fx.Node, int],
        to_the_end: set[fx.Node],
        columns: int,
        together: dict[fx.Node, fx.Node] | None = None,
    ) -> tuple[int, int]:
        """The most bytes alive while `nodes` run, and how many of these have `columns` columns."""
        position = {node: at for at, node in enumerate(nodes)}
        last: dict[fx.Node, int] = {}
        for node in nodes:
            for read in node.all_input_nodes:
                origin = _origin(read)
                origin = (together or {}).get(origin, origin)
                last[origin] = max(last.get(origin, 0), position[node])
        changes = [[0, 0] for _ in range(len(nodes) + 1)]
        for node, begin in [(node, 0) for node in given] + [
            (node, position[node]) for node in nodes if node not in given
        ]:
            size = given[node] if node in given else self._own(node)
            if not size or node in self.gradients:
                continue
            end = len(nodes) if node in to_the_end else last.get(node, begin) + 1
            value = node.meta.get("val")
            wide = isinstance(value, Tensor) and value.dim() > 0 and columns > 0 and value.shape[-1] == columns
            for kind, counted in enumerate((size, size if wide else 0)):
                changes[begin][kind] += counted
                changes[min(end, len(nodes))][kind] -= counted
        most = (0, 0)
        total = logits = 0
        for change, wide_change in changes[: len(nodes)]:
            total, logits = total + change, logits + wide_change
            most = max(most, (total, logits))
        return most


def _outputs(graph: fx.Graph) -> list[Any]:
    return list(pytree.tree_leaves(graph.output_node().args[0], is_leaf=lambda each: isinstance(each, fx.Node)))


def _widest(nodes: Iterable[fx.Node]) -> int:
    """Columns of the widest product with a weight, which are the entries of the vocabulary where there is one."""
    return max((each.columns for each in (_product(node) for node in nodes if is_product(node)) if each), default=0)
