"""Operations and bytes of the nodes of a graph, on any hardware.

    node_work   of one node
    size_of     bytes of what a node computes

Values that pass between loops that Inductor fuses count no bytes, see Note [What Inductor fuses]. The inputs of a chain
of loops are read once, and the values that other kernels read are written. Symbolic sizes count as their hints,
and in what is alive (`size_of`) as the most that they may be.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fsdp_compile.comm.formats import ratio
from fsdp_compile.passes._torch import largest_size, size_hint, tree_leaves
from fsdp_compile.passes.graph.nodes import (
    aten,
    flop_formula,
    get_tag,
    is_loop,
    is_passed_on,
    is_scalar,
    packet_of,
    source_of,
    stays_in_loops,
    value_readers,
)

log = logging.getLogger("fsdp_compile")

_FREE_NAMESPACES = {"_c10d_functional", "c10d_functional", "fsdp_flat"}  # priced as collectives
_LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather}  # read as much as they return
_LOSSES = {aten.nll_loss_forward, aten.nll_loss_backward}  # read an element of each row
SCATTERS = {aten.index_put, aten.index_put_, aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate}
SCATTERS |= {aten.scatter_add, aten.scatter_add_}  # write as much as they are given


Kind = Literal["chain", "operator", "product", "batched product", "convolution", "attention", "attention backward"]
_PRODUCTS = {  # kind, and which argument is the left matrix
    aten.mm: ("product", 0),
    aten.addmm: ("product", 1),
    aten.bmm: ("batched product", 0),
    aten.baddbmm: ("batched product", 1),
}


@dataclass(frozen=True)
class Work:
    """Operations and bytes of a kernel, or of a part of one, on any hardware.

    Attributes:
        flops: floating-point operations of matrix products, convolutions and attention, halved if it is causal.
        read_bytes: bytes read from memory.
        written_bytes: bytes written to memory.
        kind: "chain": fused loops; "operator": an eager one without products; one matrix of a "product" is a parameter
            or the gradient of one.
        inner: elements that a product sums over, keys of attention; 0: not known.
        dtype: in which products and attention compute.
        causal: of attention, whether no token sees those that follow it.
    """

    flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    kind: Kind = "chain"
    inner: int = 0
    dtype: str = ""
    causal: bool = False

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    @property
    def full_flops(self) -> int:
        """Operations of attention without a causal mask."""
        return self.flops * (1 + self.causal)


def node_work(node: fx.Node, fused: bool = True) -> Work:
    """The work of one node, by the values in `meta["val"]`; none for views, collectives and numbers.

    Args:
        node: any node.
        fused: whether Inductor fuses loops; otherwise every operator reads its inputs and writes its result.
    """
    is_free = is_passed_on(node) or is_scalar(node) or getattr(node.target, "namespace", None) in _FREE_NAMESPACES
    if node.op != "call_function" or is_free:
        return Work()
    if packet_of(node) in SCATTERS:
        moved = sum(map(_bytes, node.all_input_nodes[1:]))
        return Work(0, moved, moved)
    flops, read = _flops(node), _read_bytes(node, fused)
    written = 0 if fused and stays_in_loops(node) else _bytes(node)
    if not flops:
        return Work(0, read, written, "chain" if fused else "operator")
    kind, inner = _kind_and_inner(node)
    inputs = (leaf for each in node.all_input_nodes for leaf in tree_leaves(each.meta.get("val")))
    dtypes = (each.dtype for each in inputs if isinstance(each, Tensor) and each.dtype.is_floating_point)
    dtype = str(next(dtypes, torch.float32)).removeprefix("torch.")
    return Work(flops, read, written, kind, inner, dtype, _is_causal(node))


def _kind_and_inner(node: fx.Node) -> tuple[Kind, int]:
    packet = packet_of(node)
    if "attention" in str(packet):
        backward = "backward" in str(packet)
        keys = node.args[2].meta["val"].shape[-2]  # type: ignore[union-attr]  # fx arguments are untyped; or values
        return "attention backward" if backward else "attention", size_hint(keys)
    if packet not in _PRODUCTS:
        return "convolution", 0
    kind, left = _PRODUCTS[packet]
    return kind, size_hint(node.args[left].meta["val"].shape[-1])  # type: ignore[union-attr,return-value]  # fx arguments are untyped


def _flops(node: fx.Node) -> int:
    formula = flop_formula(node)
    if formula is None:
        return 0
    args: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))  # a subgraph has none
    if "_scaled_dot_product" in str(packet_of(node)):
        flops = size_hint(attention_flops(*args, backward="backward" in str(packet_of(node))))
    else:
        try:
            flops = size_hint(formula(*args, **kwargs, out_val=node.meta["val"]))
        except Exception as error:  # a formula may be anybody's, and prices are no reason to refuse a graph
            log.warning("%s: priced by its bytes alone, as its formula for operations failed: %s", node, error)
            return 0
    return flops // 2 if _is_causal(node) else flops


def attention_flops(*tensors: Tensor, backward: bool) -> Any:
    """Operations by the heads of queries, which may be more than those of keys and values.

    `tensors` begin with queries, keys and values, `[batch, heads, tokens, width]`; in backward the gradient is first.
    Forward multiplies queries by keys and weights by values. Backward computes the weights again, and two products
    for the gradients of each of the two.
    """
    query, key, value = tensors[1:4] if backward else tensors[:3]
    batch, heads, tokens, width = query.shape
    per_width = 2 * batch * heads * tokens * key.shape[-2]
    return per_width * ((3 * width + 2 * value.shape[-1]) if backward else (width + value.shape[-1]))


def _is_causal(node: fx.Node) -> bool:
    """Whether this is causal attention, or its backward, which computes half."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    return bool({**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("is_causal"))


def _read_bytes(node: fx.Node, fused: bool) -> int:
    if packet_of(node) in _LOSSES:
        return 0
    if packet_of(node) in _LOOKUPS:
        return sum(map(_bytes, node.all_input_nodes[1:])) + _bytes(node)
    if not (fused and is_loop(node)):
        return sum(map(_bytes, node.all_input_nodes))
    return sum(_bytes(each) for each in node.all_input_nodes if _reads_first(node, source_of(each, is_passed_on)))


def _reads_first(loop: fx.Node, origin: fx.Node) -> bool:
    """Whether `loop` is where its chain reads `origin` from memory: the first of the loops that do."""
    return not is_loop(origin) and next(user for user in value_readers(origin) if is_loop(user)) is loop


def _bytes(node: fx.Node) -> int:
    tensors = (each for each in tree_leaves(node.meta.get("val")) if isinstance(each, torch.Tensor))
    return sum(_numel(each) * each.dtype.itemsize for each in tensors)


def _numel(tensor: torch.Tensor) -> int:
    """Elements in memory: a dimension that `expand` made has none."""
    sizes: Any = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size_hint(size) for size, stride in sizes if not (isinstance(stride, int) and stride == 0))


def size_of(node: fx.Node) -> int:
    """Bytes of the tensor that `node` computes, at most where sizes are symbolic; 0 if it is no tensor."""
    value = node.meta.get("val")
    return largest_size(value.numel()) * value.element_size() if isinstance(value, Tensor) else 0


# --- of a graph -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """What a graph's nodes and its collectives take; `FREE` where only its structure is read, and no bytes are counted.

    Attributes:
        node: seconds that a node computes.
        collective: seconds of the collective that a node starts, without latency.
        latency: seconds of each launch beside that.
    """

    node: Callable[[fx.Node], float] = lambda node: 0.0
    collective: Callable[[fx.Node], float] = lambda start: 0.0
    latency: float = 0.0


FREE = Costs()


def message_size(start: fx.Node) -> int:
    """Bytes that a gather or reduce holds beside what it fills or sends, while it is under way: its messages."""
    tag, full = get_tag(start), max(map(size_of, (start, *start.all_input_nodes)))
    return int(full * ratio(tag.wire, start.meta["val"].dtype)) if tag is not None and tag.wire else 0
