"""Which values of a joint graph follow from one parameter alone, so that each rank can compute its segment of them.

    w -> cast -> permute                 elements of w: each is computed from the element of w in the same place
    w -> abs -> amax -> reciprocal       a scalar: the largest of all ranks' maxima, and what follows from it
    w -> abs -> amax over columns        a vector: the largest of each row, likewise
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

from fsdp_compile.passes._torch import OpOverload
from fsdp_compile.passes.graph.nodes import CAST, is_view, packet_of

aten = torch.ops.aten

MAXIMA = {aten.max.default: False, aten.amax.default: False, aten.min.default: True, aten.amin.default: True}
"""The reductions that ranks can share, and whether they take the smallest element."""

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
    """A tensor whose elements are those of one parameter, each after one computation.

    Attributes:
        root: the slice of the gathered buffer that is the parameter, 1-D.
        size: the tensor's shape.
        stride: its strides over `root`: a permutation of a contiguous shape.
        program: what is computed, as a text without names of nodes: equal for parameters whose elements are computed
            alike, whatever the scalars are.
        scalars: the scalars and vectors that the program takes.
        level: how many all-reduces of maxima, one after the other, these need.
    """

    root: fx.Node
    size: tuple[int, ...]
    stride: tuple[int, ...]
    program: str
    scalars: tuple[fx.Node, ...] = ()
    level: int = 0


@dataclass(frozen=True)
class Scalar:
    """A tensor of one element that every rank can compute from segments of parameters, with all-reduces of maxima.

    Attributes:
        program: what is computed, with the names of the nodes that it is computed from.
        level: how many all-reduces, one after the other, it needs.
    """

    program: str
    level: int


@dataclass(frozen=True)
class Vector:
    """A tensor with one element for each block of consecutive elements of one parameter, such as each row.

    All ranks can compute it from segments of the parameter, with all-reduces of maxima.

    Attributes:
        root: the parameter.
        size: the tensor's shape.
        stride: its strides over the blocks in order: a permutation of a contiguous shape.
        block: elements in a block.
        program: what is computed, with the names of the nodes that it is computed from.
        level: how many all-reduces, one after the other, it needs.
    """

    root: fx.Node
    size: tuple[int, ...]
    stride: tuple[int, ...]
    block: int
    program: str
    level: int


Value = Elements | Scalar | Vector
Shape = tuple[int, ...]
UNCHANGED = "x"  # the program of a parameter itself


class ParameterValues:
    """The values in a graph that follow from one parameter alone.

    Attributes:
        values: what each such node is, in the order of the graph. Of nodes that compute the same, only the first.
        same: for each node that computes the same as an earlier one, which one that is.
    """

    def __init__(self, graph: fx.Graph, roots: Iterable[fx.Node]) -> None:
        self.values: dict[fx.Node, Value] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        self._alike: dict[fx.Node, list[fx.Node]] = {}  # the reverse of `same`
        self._programs: dict[str, str] = {}  # short names of long texts
        parameters = set(roots)
        first: dict[tuple[object, ...], fx.Node] = {}
        for node in graph.nodes:
            if node in parameters:
                value: Value | None = Elements(node, (node.meta["val"].numel(),), (1,), UNCHANGED)
            else:
                value = self._classify(node)
            if value is not None:
                one = first.setdefault((value, node.meta["val"].dtype, tuple(node.meta["val"].shape)), node)
                if one is node:
                    self.values[node] = value
                else:
                    self.same[node] = one
                    self._alike.setdefault(one, []).append(node)

    def of(self, node: fx.Node) -> Value | None:
        """What `node` is; None if it follows from something else too, or in another way."""
        return self.values.get(self.first(node))

    def first(self, node: fx.Node) -> fx.Node:
        """The first node that computes what `node` computes."""
        return self.same.get(node, node)

    def alike(self, node: fx.Node) -> list[fx.Node]:
        """The later nodes that compute what `node`, which is the first that does, computes."""
        return self._alike.get(node, [])

    def users(self, node: fx.Node) -> list[fx.Node]:
        """The users of `node` and of all that compute the same, without those that compute what another one does."""
        alike = [node, *self.alike(node)]
        return list(dict.fromkeys(user for each in alike for user in each.users if user not in self.same))

    # --- one node -----------------------------------------------------------------------------------------------------

    def _classify(self, node: fx.Node) -> Value | None:
        value, inputs = node.meta.get("val"), node.all_input_nodes
        if node.op != "call_function" or not isinstance(value, Tensor):
            return None
        if not inputs:
            is_constant = node.target in _CONSTANTS and value.numel() == 1
            return Scalar(self._short(f"{node.target}{node.args}{dict(node.kwargs)}"), 0) if is_constant else None
        known = [self.of(each) for each in inputs]
        if any(each is None for each in known):
            return None
        elements = [each for each in known if isinstance(each, Elements)]
        if not elements:
            level = max(each.level for each in known if each is not None)
            vectors = [each for each in known if isinstance(each, Vector)]
            return self._vector_of_vectors(node, vectors, level) if vectors else self._scalar_of_scalars(node, level)
        first = elements[0]
        vectors = [each for each in known if isinstance(each, Vector)]
        if not all(_is_of_blocks(each, first) for each in vectors):
            return None
        if any((each.root, each.size, each.stride) != (first.root, first.size, first.stride) for each in elements):
            return None
        if node.target in MAXIMA:
            return self._maximum(node, first)
        if is_view(node) or node.target is aten.clone.default:
            return _view(node, first) if len(inputs) == 1 else None
        return self._pointwise(node, first, takes_scalars=len(elements) < len(known))

    def _scalar_of_scalars(self, node: fx.Node, level: int) -> Scalar | None:
        is_reshaped = is_view(node) and node.target is not aten.expand.default
        if node.meta["val"].numel() != 1 or not (is_reshaped or is_deterministic_pointwise(node)):
            return None
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: self.first(each).name)
        return Scalar(self._short(f"{node.target}{args}{kwargs}"), level)

    def _vector_of_vectors(self, node: fx.Node, vectors: list[Vector], level: int) -> Vector | None:
        """What follows from vectors over the same blocks, and from scalars; or another view of one."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: self.first(each).name)
        program = self._short(f"{node.target}{args}{kwargs}")
        first = vectors[0]
        if is_view(node):
            shape = _view_of(node, first.size, first.stride)
            return None if shape is None else Vector(first.root, *shape, first.block, program, level)
        blocks = {(each.root, each.size, each.stride, each.block) for each in vectors}
        is_alike = len(blocks) == 1 and _has_strides(node, first.size, first.stride)
        if not is_alike or not (is_deterministic_pointwise(node) or node.target is aten.clone.default):
            return None
        return Vector(first.root, first.size, first.stride, first.block, program, level)

    def _maximum(self, node: fx.Node, of: Elements) -> Scalar | Vector | None:
        source: fx.Node = node.args[0]  # type: ignore[assignment]  # fx arguments are untyped
        if source.meta["val"].dtype not in _REDUCED_DTYPES:
            return None
        asked = set(node.args[1]) if len(node.args) > 1 else set()  # type: ignore[arg-type]  # likewise
        dims = {dim % len(of.size) for dim in asked} or set(range(len(of.size)))
        smallest = MAXIMA[node.target]  # type: ignore[index]  # it is one of them
        program = self._short(f"{'min' if smallest else 'max'}{sorted(dims)} of {self.first(source).name}")
        if node.meta["val"].numel() == 1:
            return Scalar(program, of.level + 1)
        block = math.prod(of.size[dim] for dim in dims)
        stride = tuple(1 if dim in dims else step // block for dim, step in enumerate(of.stride))
        size = tuple(1 if dim in dims else length for dim, length in enumerate(of.size))
        vector = Vector(of.root, size, stride, block, program, of.level + 1)
        if not _is_of_blocks(vector, of):
            return None
        if tuple(node.meta["val"].shape) != size:  # without the dimensions over which it is taken
            remaining = [dim for dim in range(len(size)) if dim not in dims]
            size, stride = (tuple(each[dim] for dim in remaining) for each in (size, stride))
        return replace(vector, size=size, stride=stride) if _has_strides(node, size, stride) else None

    def _pointwise(self, node: fx.Node, like: Elements, takes_scalars: bool) -> Elements | None:
        """See Note [What is exact on a shard]. A scalar of another dtype would be promoted otherwise as a vector."""
        dtypes = {each.meta["val"].dtype for each in node.all_input_nodes}
        if not _is_exact(node) or not _has_strides(node, like.size, like.stride) or (takes_scalars and len(dtypes) > 1):
            return None
        taken: dict[fx.Node, None] = {}  # scalars, in order

        def text(argument: fx.Node) -> str:
            value = self.of(argument)
            new = value.scalars if isinstance(value, Elements) else (self.first(argument),)
            taken.update(dict.fromkeys(new))
            indices = [list(taken).index(each) for each in new]
            return f"{value.program} {indices}" if isinstance(value, Elements) else f"scalar {indices}"

        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), text)
        program = self._short(f"{node.target}{args}{kwargs}")
        levels = [each.level for each in map(self.of, node.all_input_nodes) if each is not None]
        return Elements(like.root, like.size, like.stride, program, tuple(taken), max(levels))

    def _short(self, program: str) -> str:
        """A short text for a long one: programs that contain others would grow without bound."""
        return self._programs.setdefault(program, f"p{len(self._programs)}")

    @property
    def programs(self) -> list[str]:
        """The texts that the programs of values stand for: p0, p1 and so on. They hold no rank and no address."""
        return list(self._programs)


def nodes_in(arguments: Any) -> list[fx.Node]:
    """The nodes in the arguments of a call, in order; one that occurs twice is there twice."""
    nodes: list[fx.Node] = []
    fx.map_arg(arguments, nodes.append)
    return nodes


def is_deterministic_pointwise(node: fx.Node) -> bool:
    """Whether the node computes each element from elements of its inputs, always alike, and changes nothing."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    is_pointwise = torch.Tag.pointwise in node.target.tags and not node.target._schema.is_mutable
    return is_pointwise or _is_cast(node)


def _is_cast(node: fx.Node) -> bool:
    return node.target is CAST or (node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype"})


def _is_exact(node: fx.Node) -> bool:
    takes_vectors = node.target is not aten.masked_fill.Tensor  # its value must be a scalar
    return _is_cast(node) or (is_deterministic_pointwise(node) and packet_of(node) in _EXACT and takes_vectors)


# --- shapes -----------------------------------------------------------------------------------------------------------


def _view(node: fx.Node, seen: Elements) -> Elements | None:
    """The same elements in another shape, if all of them are there."""
    if node.target is aten.clone.default:
        shape = (seen.size, seen.stride) if _has_strides(node, seen.size, seen.stride) else None
    else:
        shape = _view_of(node, seen.size, seen.stride)
    return None if shape is None else Elements(seen.root, *shape, seen.program, seen.scalars, seen.level)


def _view_of(node: fx.Node, size: Shape, stride: Shape) -> tuple[Shape, Shape] | None:
    """Size and strides of a view of all elements, found by viewing a tensor without memory; None for another view."""
    base = torch.empty_strided(size, stride, device="meta")
    try:
        view = node.target(base, *node.args[1:], **node.kwargs)  # type: ignore[operator]  # an operator
    except (RuntimeError, IndexError, TypeError):
        return None  # of a tensor that lies otherwise: a view of a copy
    size, stride = tuple(view.shape), tuple(view.stride())
    is_complete = view.numel() == base.numel() and view.storage_offset() == 0 and _is_dense(size, stride)
    return (size, stride) if is_complete and _has_strides(node, size, stride) else None


def _is_of_blocks(vector: Vector, elements: Elements) -> bool:
    """Whether `vector`, broadcast to `elements`, gives each element the value of its block."""
    if vector.root is not elements.root or len(vector.size) > len(elements.size):
        return False
    missing = len(elements.size) - len(vector.size)
    size, stride = (1,) * missing + vector.size, (1,) * missing + vector.stride
    within = 0  # how far apart elements with one value may be
    for dim, length in enumerate(elements.size):
        if size[dim] == length:
            if length > 1 and elements.stride[dim] != stride[dim] * vector.block:
                return False
        elif size[dim] == 1:
            within += (length - 1) * elements.stride[dim]
        else:
            return False
    return within < vector.block


def _is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the strides are those of a permutation of a contiguous shape."""
    expected = 1
    for step, length in sorted((step, length) for length, step in zip(size, stride, strict=True) if length != 1):
        if step != expected:
            return False
        expected *= length
    return True


def _has_strides(node: fx.Node, size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    value = node.meta["val"]
    if tuple(value.shape) != size:
        return False
    return all(a == b for a, b, length in zip(value.stride(), stride, size, strict=True) if length != 1)


def numel_of(value: Value) -> int:
    """How many elements there are."""
    if isinstance(value, Scalar):
        return 1
    return math.prod(value.size)
