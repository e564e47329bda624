"""What a node of a graph computes, reads from memory and writes to it, in operations and bytes.

What passes between loops that Inductor fuses counts nothing here, see Note [What Inductor fuses]. What a chain of loops
takes from elsewhere is read once, what others take from it is written. Symbolic sizes count as their hints.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from fsdp_compile.passes._torch import size_hint, tree_leaves
from fsdp_compile.passes.graph.node_kinds import (
    aten,
    flop_formula,
    is_loop,
    is_passed_on,
    is_scalar,
    packet_of,
    stays_in_loops,
    value_readers,
)

_FREE_NAMESPACES = {"_c10d_functional", "c10d_functional", "fsdp_flat"}  # links have costs of their own
_LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather}  # read as much as they return
_SCATTERS = {aten.index_put, aten.index_put_, aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate}
_SCATTERS |= {aten.scatter_add, aten.scatter_add_}  # write as much as they are given


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
    if packet_of(node) in _SCATTERS:
        moved = sum(map(_bytes, node.all_input_nodes[1:]))
        return Work(0, moved, moved)
    return Work(_flops(node), _read_bytes(node), 0 if stays_in_loops(node) else _bytes(node))


def _flops(node: fx.Node) -> int:
    formula = flop_formula(node)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return size_hint(formula(*args, **kwargs, out_val=node.meta["val"]))


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
