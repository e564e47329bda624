"""What a node of a graph computes, reads and writes, as numbers or, where its sizes are symbols, as expressions.

Inductor fuses chains of pointwise operations and reductions into single kernels. What they hand to each other counts
nothing here; what a chain takes from elsewhere is read once, what others take from it is written.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fsdp_compile.passes.graph.node_kinds import formula_of, is_loop, is_view, packet_of, reads

Number: TypeAlias = int | float | sympy.Expr

_aten = torch.ops.aten
_FREE_NAMESPACES = {"_c10d_functional", "c10d_functional", "fsdp_flat"}  # links have costs of their own
_FUSED = {_aten.full, _aten.full_like, _aten._to_copy, _aten._softmax, torch.ops.prims.iota}  # beside tagged ones
_LOOKUPS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}  # read what they return
_SCATTERS = {_aten.index_put, _aten.index_put_, _aten._unsafe_index_put, _aten._unsafe_masked_index_put_accumulate}
_SCATTERS |= {_aten.scatter_add, _aten.scatter_add_}  # write what they are given


@dataclass(frozen=True)
class Work:
    """What something computes and moves.

    Attributes:
        flops: floating-point operations of matrix products, convolutions and attention.
        read_bytes: what is read from memory.
        written_bytes: what is written to it.
    """

    flops: Number = 0
    read_bytes: Number = 0
    written_bytes: Number = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
        )


def node_work(node: fx.Node) -> Work:
    """The work of one node, by the values in `meta["val"]`; none for views, collectives and numbers."""
    if node.op != "call_function" or _is_free(node):
        return Work()
    if packet_of(node) in _SCATTERS:
        moved = sum(_bytes(each) for each in node.all_input_nodes[1:])
        return Work(0, moved, moved)
    return Work(flops_of(node), _read(node), _written(node))


def flops_of(node: fx.Node) -> Number:
    """Floating-point operations; 0 if torch does not count them."""
    formula = formula_of(node)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return _expression(formula(*args, **kwargs, out_val=node.meta["val"]))


def _read(node: fx.Node) -> Number:
    if packet_of(node) in _LOOKUPS:
        return sum(map(_bytes, node.all_input_nodes[1:])) + _bytes(node)
    if not _is_fused(node):
        return sum(map(_bytes, node.all_input_nodes))
    return sum(_bytes(each) for each in node.all_input_nodes if _reads_first(node, _origin(each)))


def _reads_first(node: fx.Node, origin: fx.Node) -> bool:
    """Whether the fused `node` is where its chain reads `origin`: the first of the fused ones that do."""
    return not _is_fused(origin) and next(user for user in _readers(origin) if _is_fused(user)) is node


def _written(node: fx.Node) -> Number:
    stays = _is_fused(node) and all(_is_fused(user) for user in _readers(node))
    return 0 if stays else _bytes(node)


def _is_free(node: fx.Node) -> bool:
    return _passes_on(node) or _is_number(node) or getattr(node.target, "namespace", None) in _FREE_NAMESPACES


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _passes_on(node: fx.Node) -> bool:
    """Whether the node hands on what it is given: beside views an element of a tuple, and a constant as it is."""
    return is_view(node) or node.target is operator.getitem or packet_of(node) is _aten.lift_fresh_copy


def _is_fused(node: fx.Node) -> bool:
    # More than what has a tag, unlike in liveness.py: graphs that are priced need not be decomposed.
    return is_loop(node) or packet_of(node) in _FUSED


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a node's value: who asks for its size alone does not."""
    return (reader for reader in reads(node, _passes_on) if not _is_number(reader))


def _origin(node: fx.Node) -> fx.Node:
    """The node whose value `node` is a view of, or `node`."""
    while node.op == "call_function" and _passes_on(node):
        node = node.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    return node


def _bytes(node: fx.Node) -> Number:
    tensors = (each for each in tree_leaves(node.meta.get("val")) if isinstance(each, torch.Tensor))
    return sum(_numel(each) * each.dtype.itemsize for each in tensors)


def _numel(tensor: torch.Tensor) -> Number:
    """Elements in memory: a dimension that `expand` made is none."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(_expression(size) for size, stride in sizes if not (isinstance(stride, int) and stride == 0))


def _expression(number: Any) -> Number:
    return number.node.expr if isinstance(number, torch.SymInt | torch.SymFloat) else number
