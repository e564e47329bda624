"""What a node costs: operations and bytes, and seconds on a device.

What passes between loops that Inductor fuses counts no bytes, see Note [What Inductor fuses]. What a chain of loops
takes from elsewhere is read once, what others take from it is written. Symbolic sizes count as their hints.
"""

import math
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from fsdp_compile.passes._torch import size_hint, tree_leaves
from fsdp_compile.passes.cost.hardware import Hardware
from fsdp_compile.passes.cost.roofline import attention_seconds, product_seconds
from fsdp_compile.passes.graph.nodes import (
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


def size_of(node: fx.Node) -> int:
    """Bytes of what `node` computes; of sizes that are symbolic, their hints. 0 if it is no tensor."""
    value = node.meta.get("val")
    return size_hint(value.numel()) * value.element_size() if isinstance(value, Tensor) else 0
