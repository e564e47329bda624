"""Find the values of a joint graph that follow from one parameter alone: each rank can compute its segment of them.

    w -> cast -> permute                 elements of w: each follows from the element of w in the same place
    w -> abs -> amax -> reciprocal       a scale: the maximum over all ranks, and what follows from it
    w -> abs -> amax over columns        scales: the maximum of each row, likewise
    w -> mul by that -> clamp -> cast    elements again, computed with one scalar, or with one of each row
    w.sum(), w @ x, dropout(w), w * v    neither: they depend on an order of addition, inputs, chance, other parameters

Note [What is exact on a shard]. An element must have the same bits whether it is computed in the parameter or in the
shard, where it lies elsewhere in memory. Arithmetic of IEEE 754, comparisons, casts and selections are exact in this
sense. Functions such as `exp` and `tanh` are not: a CPU computes the last elements of a tensor, those behind the last
full vector, by another formula. A maximum does not depend on the order in which it is taken.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fsdp_compile.passes._torch import OpOverload, without_dispatch_modes
from fsdp_compile.passes.graph.nodes import CAST, keeps_values, packet_of

aten = torch.ops.aten

MAXIMA = {aten.max.default: False, aten.amax.default: False, aten.min.default: True, aten.amin.default: True}
"""The reductions that ranks can share, and whether they take the smallest element."""

Shape = tuple[int, ...]
_REDUCED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # float32 holds their values
_CONSTANTS = (aten.full.default, aten.scalar_tensor.default)
# fmt: off
_EXACT = {  # see Note [What is exact on a shard]
    aten.abs, aten.neg, aten.add, aten.sub, aten.mul,
    aten.div, aten.reciprocal, aten.sqrt, aten.sign, aten.sgn,
    aten.relu, aten.floor, aten.ceil, aten.round, aten.trunc,
    aten.clamp, aten.clamp_min, aten.clamp_max, aten.maximum, aten.minimum,
    aten.where, aten.eq, aten.ne, aten.lt, aten.le,
    aten.gt, aten.ge, aten.isnan, aten.isinf, aten.masked_fill,
    aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor, aten.bitwise_not, aten.bitwise_left_shift,
    aten.bitwise_right_shift, aten.logical_and, aten.logical_or, aten.logical_not, aten.nan_to_num,
    aten.remainder, aten.fmod,
}
# fmt: on


@dataclass(frozen=True)
class Elements:
    """A tensor computed element by element from one parameter.

    Attributes:
        root: the parameter, a 1-D slice of the gathered buffer.
        size: shape of the tensor.
        stride: its strides over `root`: a permutation of a contiguous shape.
        program: the computation as text without names of nodes, "x" for the parameter itself; parameters with equal
            programs are computed together.
        scales: the scales that the program takes.
        level: the number of successive all-reduces of maxima that these need.
    """

    root: fx.Node
    size: Shape
    stride: Shape
    program: str
    scales: tuple[fx.Node, ...] = ()
    level: int = 0


@dataclass(frozen=True)
class Scales:
    """A tensor that every rank can compute from segments of parameters, with all-reduces of maxima.

    It has one element, or one for each block of consecutive elements of one parameter, such as each row.

    Attributes:
        program: the computation, with the names of its inputs.
        level: the number of successive all-reduces that it needs.
        root: the parameter whose blocks have an element each; None if the tensor has one element, without blocks.
        size: shape of the tensor, if it has a root.
        stride: its strides over the blocks in order: a permutation of a contiguous shape.
        block: elements in a block.
    """

    program: str
    level: int
    root: fx.Node | None = None
    size: Shape = ()
    stride: Shape = ()
    block: int = 0


class ParameterValues:
    """Finds the nodes of a graph that can be computed from shards of parameters.

    Attributes:
        values: what each such node is, in graph order; of nodes that compute the same, only the first.
        same: duplicates -> the first node that computes the same.
    """

    def __init__(self, graph: fx.Graph, roots: Iterable[fx.Node]) -> None:
        self.values: dict[fx.Node, Elements | Scales] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        self._alike: dict[fx.Node, list[fx.Node]] = {}  # the reverse of `same`
        self._programs: dict[str, str] = {}  # short names, as texts that contain others would grow
        parameters = set(roots)
        first: dict[tuple[object, ...], fx.Node] = {}
        for node in graph.nodes:
            if node in parameters:
                value: Elements | Scales | None = Elements(node, (node.meta["val"].numel(),), (1,), "x")
            else:
                value = self._classify(node)
            if value is not None:
                one = first.setdefault((value, node.meta["val"].dtype, tuple(node.meta["val"].shape)), node)
                if one is node:
                    self.values[node] = value
                else:
                    self.same[node] = one
                    self._alike.setdefault(one, []).append(node)

    def of(self, node: fx.Node) -> Elements | Scales | None:
        """Return what `node` is; None if it does not follow from one parameter."""
        return self.values.get(self.first(node))

    def elements(self, node: Any) -> Elements:
        """Return what `node` is, elements of a parameter."""
        value = self.of(node)
        assert isinstance(value, Elements)
        return value

    def first(self, node: fx.Node) -> fx.Node:
        """Return the first node that computes the same as `node`."""
        return self.same.get(node, node)

    def alike(self, node: fx.Node) -> list[fx.Node]:
        """Return the duplicates of `node`, in graph order."""
        return self._alike.get(node, [])

    def users(self, node: fx.Node) -> list[fx.Node]:
        """Return the users of `node` and of its duplicates, without duplicates among them."""
        alike = [node, *self.alike(node)]
        return list(dict.fromkeys(user for each in alike for user in each.users if user not in self.same))

    # --- one node -----------------------------------------------------------------------------------------------------

    def _classify(self, node: fx.Node) -> Elements | Scales | None:
        value, inputs = node.meta.get("val"), node.all_input_nodes
        if not isinstance(value, Tensor):
            return None
        if not inputs:
            is_constant = node.target in _CONSTANTS and value.numel() == 1
            return Scales(self._program(node), 0) if is_constant else None
        known = [self.of(each) for each in inputs]
        if any(each is None for each in known):
            return None
        elements = [each for each in known if isinstance(each, Elements)]
        scales = [each for each in known if isinstance(each, Scales)]
        of_blocks = [each for each in scales if each.root is not None]
        if not elements:
            return self._further_scales(node, of_blocks, max(each.level for each in scales))
        first = elements[0]
        if not all(_is_of_blocks(each, first) for each in of_blocks):
            return None
        if any((each.root, each.size, each.stride) != (first.root, first.size, first.stride) for each in elements):
            return None
        if node.target in MAXIMA:
            return self._maxima(node, first)
        if keeps_values(node) or node.target is aten.clone.default:
            shape = _shape_of(node, first)
            return None if shape is None else replace(first, size=shape[0], stride=shape[1])
        return self._pointwise(node, first, takes_scales=bool(scales))

    def _program(self, node: fx.Node) -> str:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: self.first(each).name)
        return self._short_name(f"{node.target}{args}{kwargs}")

    def _short_name(self, program: str) -> str:
        return self._programs.setdefault(program, f"p{len(self._programs)}")

    def _further_scales(self, node: fx.Node, of_blocks: list[Scales], level: int) -> Scales | None:
        """Classify a node that is computed from scales alone."""
        if not of_blocks:
            is_one = node.meta["val"].numel() == 1 and (keeps_values(node) or _is_deterministic_pointwise(node))
            return Scales(self._program(node), level) if is_one else None
        first = of_blocks[0]
        if keeps_values(node) or node.target is aten.clone.default:
            shape = _shape_of(node, first)
        else:
            blocks = {(each.root, each.size, each.stride, each.block) for each in of_blocks}
            is_alike = len(blocks) == 1 and _has_strides(node, first.size, first.stride)
            shape = (first.size, first.stride) if is_alike and _is_deterministic_pointwise(node) else None
        if shape is None:
            return None
        return Scales(self._program(node), level, first.root, *shape, first.block)

    def _maxima(self, node: fx.Node, of: Elements) -> Scales | None:
        source: fx.Node = node.args[0]  # type: ignore[assignment]  # fx arguments are untyped
        if source.meta["val"].dtype not in _REDUCED_DTYPES:
            return None
        asked = set(node.args[1]) if len(node.args) > 1 else set()  # type: ignore[arg-type]  # likewise
        dims = {dim % len(of.size) for dim in asked} or set(range(len(of.size)))
        smallest = MAXIMA[node.target]  # type: ignore[index]  # it is one of them
        program = self._short_name(f"{'min' if smallest else 'max'}{sorted(dims)} of {self.first(source).name}")
        if node.meta["val"].numel() == 1:
            return Scales(program, of.level + 1)
        block = math.prod(of.size[dim] for dim in dims)
        stride = tuple(1 if dim in dims else step // block for dim, step in enumerate(of.stride))
        size = tuple(1 if dim in dims else length for dim, length in enumerate(of.size))
        scales = Scales(program, of.level + 1, of.root, size, stride, block)
        if not _is_of_blocks(scales, of):
            return None
        if tuple(node.meta["val"].shape) != size:  # without the dimensions over which it is taken
            remaining = [dim for dim in range(len(size)) if dim not in dims]
            size, stride = (tuple(each[dim] for dim in remaining) for each in (size, stride))
        return replace(scales, size=size, stride=stride) if _has_strides(node, size, stride) else None

    def _pointwise(self, node: fx.Node, like: Elements, takes_scales: bool) -> Elements | None:
        """See Note [What is exact on a shard]. An expanded scale of another dtype would be promoted differently."""
        dtypes = {each.meta["val"].dtype for each in node.all_input_nodes}
        if not _is_exact(node) or not _has_strides(node, like.size, like.stride) or (takes_scales and len(dtypes) > 1):
            return None
        taken: dict[fx.Node, None] = {}  # scales, in order

        def text(argument: fx.Node) -> str:
            value = self.of(argument)
            new = value.scales if isinstance(value, Elements) else (self.first(argument),)
            taken.update(dict.fromkeys(new))
            indices = [list(taken).index(each) for each in new]
            return f"{value.program} {indices}" if isinstance(value, Elements) else f"scale {indices}"

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), text)
        program = self._short_name(f"{node.target}{args}{kwargs}")
        levels = [each.level for each in map(self.of, node.all_input_nodes) if each is not None]
        return Elements(like.root, like.size, like.stride, program, tuple(taken), max(levels))


def nodes_in(arguments: Any) -> list[fx.Node]:
    """Return the nodes in the arguments of a call, in order, with repetitions."""
    nodes: list[fx.Node] = []
    fx.map_arg(arguments, nodes.append)
    return nodes


def _is_deterministic_pointwise(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    return torch.Tag.pointwise in node.target.tags or _is_cast(node)


def _is_cast(node: fx.Node) -> bool:
    return node.target is CAST or (node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype"})


def _is_exact(node: fx.Node) -> bool:
    takes_tensors = node.target is not aten.masked_fill.Tensor  # its value must be a scalar
    return _is_cast(node) or (_is_deterministic_pointwise(node) and packet_of(node) in _EXACT and takes_tensors)


# --- shapes -----------------------------------------------------------------------------------------------------------


def _shape_of(node: fx.Node, seen: Elements | Scales) -> tuple[Shape, Shape] | None:
    """Return size and strides of `node` if it is a view or copy of all elements of `seen`, else None."""
    size, stride = seen.size, seen.stride
    if node.target is not aten.clone.default:
        with without_dispatch_modes():  # fake tensors would take ten times as long
            base = torch.empty_strided(size, stride, device="meta")
            try:
                view = node.target(base, *node.args[1:], **node.kwargs)  # type: ignore[operator]  # an operator
            except (RuntimeError, IndexError, TypeError):
                return None  # of a tensor that lies otherwise: a view of a copy
            by_stride = view.permute(sorted(range(view.dim()), key=view.stride, reverse=True))
        size, stride = tuple(view.shape), tuple(view.stride())
        if view.numel() != base.numel() or not by_stride.is_contiguous():
            return None
    return (size, stride) if _has_strides(node, size, stride) else None


def _is_of_blocks(scales: Scales, elements: Elements) -> bool:
    """Whether broadcasting `scales` to `elements` gives each element the value of its block."""
    if scales.root is not elements.root or len(scales.size) > len(elements.size):
        return False
    missing = len(elements.size) - len(scales.size)
    size, stride = (1,) * missing + scales.size, (1,) * missing + scales.stride
    pairs = zip(size, stride, elements.size, elements.stride, strict=True)
    # All elements are in blocks: if the dimensions of scales go from block to block, the other ones stay within one.
    return all(many == 1 or (many == length and step == far * scales.block) for many, far, length, step in pairs)


def _has_strides(node: fx.Node, size: Shape, stride: Shape) -> bool:
    value = node.meta["val"]
    return tuple(value.shape) == size and all(
        a == b for a, b, length in zip(value.stride(), stride, size, strict=True) if length != 1
    )
