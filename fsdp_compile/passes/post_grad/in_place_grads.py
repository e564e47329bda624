"""Gradients without copies: what each pack reads, in which buffer it lies, and how Inductor lowers that.

Passes on the FX graph: `separate_reduces` undoes that equal reduces of two units were merged, `pack_in_place` rewrites
a pack's inputs into nodes whose output Inductor may place freely, and `reuse_gathered` packs into the buffer that the
unit was gathered into.

In Inductor's IR a pack is a concatenation kernel, and the kernel that computes a gradient writes it into its slice:

    mm(..., out=slice)           matrix products write in place, also where the gradient is a transposed product
    fused kernel(..., slice)     so do reductions and pointwise kernels
    copy kernel                  only for what Inductor does not allocate: graph inputs, and outputs of library kernels
                                 that allocate for themselves (convolution_backward)
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import takewhile
from math import inf
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from fsdp_compile.comm.collectives import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_IN_PLACE, WAIT
from fsdp_compile.core.layout import FlatParamLayout, LayoutSegment
from fsdp_compile.core.ops import (
    ADD_ACCUMULATED,
    ADD_ACCUMULATED_,
    DEFER_REDUCE,
    PACK_GRADS,
    UPDATE_SHARD,
)
from fsdp_compile.passes._torch import V, WaitKernel, bounds, fallback_handler, ir, ops, register_lowering, tree_leaves
from fsdp_compile.passes.graph import nodes
from fsdp_compile.passes.graph.analyze import gradients_of, with_preparation
from fsdp_compile.passes.pipeline import GraphContext

aten = torch.ops.aten

Contents = Sequence[tuple[LayoutSegment, Any]]
"""Segments of a flat parameter, each with the IR of its gradient; None for padding and for unused parameters."""

_EVERYTHING = (0, inf)
_OVERWRITING = (ADD_ACCUMULATED, ALL_REDUCE_IN_PLACE, DEFER_REDUCE)  # what they read, where nothing else does


def separate_reduces(context: GraphContext) -> None:
    """Give each unit its own reduce again.

    The partitioner merges reduces of equal constants, such as the zeros of `loss + 0 * weight.sum()`, and two
    parameters would share memory as their gradients.
    """
    for start in nodes.tagged(context.graph, "reduce"):
        for wait in [user for user in start.users if user.target is WAIT][1:]:
            _copy_reduce(context.graph, start, wait)


def _copy_reduce(graph: fx.Graph, start: fx.Node, wait: fx.Node) -> None:
    """Make `wait` wait for a copy of `start` and of the nodes that prepare it."""
    copies: dict[fx.Node, fx.Node] = {}
    owner = nodes.tag_of(wait)
    with graph.inserting_before(wait):
        for node in with_preparation(start):
            copies[node] = graph.node_copy(node, lambda each: copies.get(each, each))
            nodes.set_tag(copies[node], replace(nodes.tag_of(node), unit=owner.unit, path=owner.path))
    wait.replace_input_with(start, copies[start])


def pack_in_place(context: GraphContext) -> None:
    """Rewrite the gradients of each pack into nodes that can write straight into the packed buffer."""
    graph = context.graph
    for pack in graph.find_nodes(op="call_function", target=PACK_GRADS):
        pack.update_arg(0, [None if grad is None else _placeable(graph, grad) for grad in pack.args[0]])
        packed: fx.Node | None = pack
        while packed is not None and len(packed.users) == 1:  # its only reader may overwrite it
            (reader,) = packed.users
            packed = reader if reader.target is ADD_ACCUMULATED else None
            if reader.target is ALL_REDUCE:
                reader.target = ALL_REDUCE_IN_PLACE
            elif reader.target in (DEFER_REDUCE, ADD_ACCUMULATED):
                reader.args = (*reader.args, True)
    graph.eliminate_dead_code()  # views that were stripped read gradients no more
    for pack in graph.find_nodes(op="call_function", target=PACK_GRADS):
        if any(user.target in _OVERWRITING or user.op == "output" for user in pack.users):  # outputs go to the runtime
            # Others may read them later. Inputs of a graph are copied anyway.
            for grad in [each for each in gradients_of(pack) if len(each.users) > 1 and each.op != "placeholder"]:
                with graph.inserting_before(pack):
                    copy = nodes.add_call(graph, aten.clone.default, (grad,), mode=grad.meta["val"].fake_mode)
                pack.replace_input_with(grad, copy)


def _placeable(graph: fx.Graph, grad: fx.Node) -> fx.Node:
    """Strip views that keep the order of elements; rewrite a node whose output has another layout."""
    while grad.target in nodes.SAME_ORDER:
        grad = grad.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    return _transposed_product(graph, grad) or _bias_of_convolution(graph, grad) or grad


def _transposed_product(graph: fx.Graph, grad: fx.Node) -> fx.Node | None:
    """Rewrite a transposed product as (a b)^T = b^T a^T; None for other nodes."""
    if grad.target is not aten.permute.default or list(grad.args[1]) != [1, 0]:  # type: ignore[arg-type]  # fx arguments are untyped
        return None
    product: fx.Node = grad.args[0]  # type: ignore[assignment]  # likewise
    if product.target is not aten.mm.default or len(product.users) > 1:
        return None
    with graph.inserting_before(product):
        mode, permute = grad.meta["val"].fake_mode, aten.permute.default
        factors = [nodes.add_call(graph, permute, (each, [1, 0]), mode=mode) for each in reversed(product.args)]
        turned = graph.call_function(aten.mm.default, tuple(factors))
    turned.meta = {**grad.meta, "val": grad.meta["val"].contiguous()}
    return turned


def _bias_of_convolution(graph: fx.Graph, grad: fx.Node) -> fx.Node | None:
    """Compute a bias's gradient as a sum: convolution_backward would allocate it elsewhere."""
    if grad.target is not operator.getitem or grad.args[1] != 2:
        return None
    backward: fx.Node = grad.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    if backward.target is not aten.convolution_backward.default:
        return None
    grad_out: fx.Node = backward.args[0]  # type: ignore[assignment]  # [batch, channels, ...]
    dims = [dim for dim in range(grad_out.meta["val"].dim()) if dim != 1]
    with graph.inserting_before(backward):
        total = graph.call_function(aten.sum.dim_IntList, (grad_out, dims))
    total.meta = dict(grad.meta)
    if len(grad.users) == 1:
        weights_and_input = [*backward.args[10][:2], False]  # type: ignore[index,misc]  # fx arguments are untyped
        backward.update_arg(10, weights_and_input)
    return total


# --- the gathered buffer ----------------------------------------------------------------------------------------------

# Note [Gradients take the place of their parameters]
# A packed buffer is laid out like the gathered one, and a parameter is read for the last time about when its gradient
# is computed. So a gradient may be written where its parameter was, and the reduce-scatter sends the memory that the
# all-gather filled: the backward of a unit needs one buffer instead of two.
#
#     wait gather  ->  grad_x = grad_y @ W  ->  slice of W = grad_y.T @ x  ->  reduce-scatter     one buffer throughout
#
# The pass `reuse_gathered` decides this on the FX graph and names the gathered buffer in the pack's last argument. It
# also moves a few nodes, so that each gradient comes after the readers of the buffer. Which reader touches which slice
# is known only when the pack is lowered. The lowering orders each write after the reads of its slice, or packs into a
# new buffer after all, if one loop both reads a parameter and computes the gradient that would replace it.


def reuse_gathered(context: GraphContext) -> None:
    """Pack gradients into the unit's gathered buffer (Note [Gradients take the place of their parameters])."""
    graph = context.graph
    waits = {nodes.tag_of(gather).unit: next(iter(gather.users)) for gather in nodes.tagged(graph, "gather")}
    for pack in graph.find_nodes(op="call_function", target=PACK_GRADS):
        wait = waits.get(nodes.tag_of(pack).unit)
        if wait is not None and _fits(pack, wait) and _in_time(pack, wait):
            _put_in_order(pack, wait)
            pack.args = (*pack.args, wait)


def _fits(pack: fx.Node, wait: fx.Node) -> bool:
    """Whether the buffers are alike, and nothing else reads the gradients or outlives the buffer."""
    packed, gathered = pack.meta["val"], wait.meta["val"]
    alike = all(getattr(packed, each) == getattr(gathered, each) for each in ("dtype", "shape", "device"))
    if not alike or not _has_zero_padding(wait):
        return False
    only_packed = all(len(grad.users) == 1 for grad in gradients_of(pack))
    only_sent = all((tag := nodes.get_tag(user)) is not None and tag.kind == "reduce" for user in pack.users)
    return only_packed and only_sent and all(reader.op != "output" for reader in nodes.readers(wait)[1])


def _has_zero_padding(wait: fx.Node) -> bool:
    """Whether shards were gathered as they are, or cast. A local program such as `1 + w` fills padding."""
    source = nodes.source_of(wait, lambda node: node.target in (WAIT, ALL_GATHER) or nodes.is_view_or_cast(node))
    return source.op == "placeholder"


def _in_time(pack: fx.Node, wait: fx.Node) -> bool:
    """Whether gradients are computed while the parameters are alive, the last of them about when those go.

    Later gradients are better packed into a buffer of their own, which is allocated then. A matrix product before the
    first reader stays there, for the gather to hide behind, and no reduce waits for readers beyond another product.
    """
    gradients, reading = gradients_of(pack), nodes.readers(wait)[1]
    if not reading or min(gradients) > max(reading):
        return False
    early = any(nodes.is_product(grad) and grad < min(reading) for grad in gradients)
    node, last = max(gradients), max(reading)
    while not early and node < last:  # what lies between them
        node = node.next
        early = node is not last and nodes.is_product(node)
    return not early


def _put_in_order(pack: fx.Node, wait: fx.Node) -> None:
    """Move every gradient behind the first reader of the parameters, and the last gradient behind the last reader."""
    reading, gradients = nodes.readers(wait)[1], gradients_of(pack)
    first, last, gradient = min(reading), max(reading), max(gradients)
    end = max(gradient, last)
    loops = [node for node in reading if nodes.is_pointwise(node)]  # their kernels read the parameters

    def is_joined(node: fx.Node) -> bool:  # not beyond: the gradient of a residual is added up through all blocks
        return node <= end and (nodes.is_pointwise(node) or nodes.is_view(node))

    joined = [nodes.derived(node, is_joined) for node in loops]
    following = _next_pointwise(sorted(node for node in set(loops).union(*joined) if node <= end), end)
    for early in [grad for grad in gradients if grad < first]:
        first.append(early)
    if gradient < last:
        last.append(gradient)
    for node in following:
        if gradient not in node.all_input_nodes:
            gradient.prepend(node)


def _next_pointwise(before: list[fx.Node], end: fx.Node) -> list[fx.Node]:
    """Find pointwise nodes beyond `end` that read `before`, directly or through views, and need nothing later.

    Mostly a sum with the residual's gradient. If it came later, the last result of `before` would take a trip through
    memory.
    """
    following: list[fx.Node] = []
    for node in before:
        for user in sorted(node.users):
            views = []
            while nodes.is_view(user) and user > end and len(user.users) == 1:
                views.append(user)
                user = next(iter(user.users))
            ready = all(each <= end or each in views for each in user.all_input_nodes)
            if user > end and nodes.is_pointwise(user) and ready and user not in following:
                following += [*views, user]
    return following


# --- lowering ---------------------------------------------------------------------------------------------------------

# If a pack lies in its unit's gathered buffer, each write comes after all that reads its slice. Inductor knows which
# operations read a buffer, not which slice of it, so dependencies are added operation by operation while the pack is
# lowered, when all operations that read parameters of the unit are known.


@register_lowering(PACK_GRADS, type_promotion_kind=None)
def _lower_pack_grads(grads: list[Any], layout: str, into: Any = None) -> Any:
    parsed = FlatParamLayout.parse(layout)
    contents = [(each, None if each.parameter is None else grads[each.parameter]) for each in parsed.segments]
    reads = None if into is None else _reads_before(into.get_name(), contents)
    return _pack_into_new_buffer(parsed.numel, contents) if reads is None else _overwrite(into, contents, reads)


def _pack_into_new_buffer(numel: int, contents: Contents) -> Any:
    """Emit a concatenation kernel; its buffer is allocated when the first gradient is computed."""
    first = next(grad for _, grad in contents if grad is not None)
    layout = ir.FixedLayout(first.get_device(), first.get_dtype(), [sympy.Integer(numel)], [sympy.Integer(1)])
    packed = ir.ConcatKernel(name=None, layout=layout, inputs=[])
    box = ir.StorageBox(packed)
    written = [_write(grad, segment, box) for segment, grad in contents]
    # Zeros depend on nothing: the scheduler could fill them at the start of backward, and all packed buffers would be
    # alive from there on. So they wait for the unit's first gradient.
    computed = {buffer.get_name() for buffer, (_, grad) in zip(written, contents, strict=True) if grad is not None}
    first_computed = next(name for name in V.graph.name_to_buffer if name in computed)
    for buffer, (_, grad) in zip(written, contents, strict=True):
        if grad is None:
            V.graph.additional_buffer_deps[buffer.get_operation_name()].add(first_computed)
    return _register(packed, written, box)


def _overwrite(into: Any, contents: Contents, reads: "list[Read]") -> Any:
    """Write into the gathered buffer, each slice after its `reads`. Padding stays zero there."""
    contents = [(segment, grad) for segment, grad in contents if segment.parameter is not None]
    written = [_write(grad, segment, into.data) for segment, grad in contents]
    for buffer, (segment, _) in zip(written, contents, strict=True):
        operation = buffer.get_operation_name()
        V.graph.additional_star_deps[operation].add(into.get_name())  # the gather has filled it by then
        V.graph.additional_buffer_deps[operation].update(_reads_of(reads, segment))
    _hold_products(into.get_name(), written)
    overwritten = _Overwritten(into.get_name(), ir.NoneLayout(device=into.get_device()))
    return _register(overwritten, written, into.data)


def _register(packed: Any, written: list[Any], box: Any) -> Any:
    packed.name = V.graph.register_buffer(packed)
    packed.inputs = ir.ConcatKernel.unwrap_storage(written)
    V.graph.register_operation(packed)
    return ir.TensorBox(box)


class _Overwritten(ir.NopKernel):
    """Marks the buffer `target` as mutated by the inputs of this operation."""

    def __init__(self, target: str, layout: Any) -> None:
        super().__init__(name=None, layout=layout, inputs=[])
        self.target = target

    def get_mutation_names(self) -> list[str]:
        return [self.target]

    def should_allocate(self) -> bool:
        return False


def _write(grad: Any, segment: LayoutSegment, box: Any) -> Any:
    """Compute `grad`, or zeros if it is None, into its slice of the buffer in `box`."""
    size = [sympy.Integer(segment.numel)] if grad is None else list(grad.get_size())
    stride, offset = ir.FlexibleLayout.contiguous_strides(size), sympy.Integer(segment.offset)
    layout = ir.FixedLayout(box.get_device(), box.get_dtype(), size, stride, offset=offset)
    target = ir.ReinterpretView(data=box, layout=layout)
    if grad is None:
        return _fill(target)
    product: Any = getattr(grad.data, "data", None)
    fixed = product.layout if isinstance(product, ir.ExternKernelOut) else None
    if isinstance(fixed, ir.FixedLayout) and fixed.offset == 0 and list(fixed.stride) == list(layout.stride):
        # With `max_autotune` the layout of a library's product is fixed before it is known where it goes, and Inductor
        # would copy it. With the strides of the slice it may as well lie there.
        product.layout = ir.NonOwningLayout(target)
        return product
    return ir.ConcatKernel.realize_into(grad, target)


def _fill(target: Any) -> Any:
    """Write zeros for padding and parameters without a gradient, as what is sent must be finite.

    A library call does it: the C++ compiler would take a second for a kernel for each number of zeros.
    """
    size, dtype = list(target.get_size()), target.get_dtype()
    if V.graph.cpp_wrapper:
        zeros = ir.Pointwise.create(
            device=target.get_device(), dtype=dtype, inner_fn=lambda index: ops.constant(0, dtype), ranges=size
        )
        return ir.ConcatKernel.realize_into(zeros, target)
    return ir.ExternKernelOut(
        ir.NonOwningLayout(target), inputs=[], constant_args=(size,), python_kernel_name="torch.zeros"
    )


# --- who reads the gathered buffer ------------------------------------------------------------------------------------


class Read(NamedTuple):
    """A read of the buffer: what the operation computes, by name, and the range of elements that it reads."""

    computed: list[str]
    first: float
    end: float


def _reads_before(name: str, contents: Contents) -> list[Read] | None:
    """Find the reads of the gathered buffer `name`; none comes after the node that is being lowered.

    None if gradients cannot be written there: one is computed from its own slice, or two from each other's.
    """
    for node, value in V.graph.env.items():  # what would be computed only when it is read: the buffer is intact now
        if any(user not in V.graph.env for user in node.users):
            for box in tree_leaves(value):
                if isinstance(box, ir.TensorBox) and name in box.get_read_names():
                    box.realize()
    writes = [(segment, grad) for segment, grad in contents if grad is not None]
    for _, grad in writes:
        grad.realize()
    if any(grad.get_name() == name for _, grad in writes):  # a view of a parameter, as it is
        return None
    reads = [
        Read([output.get_name() for output in operation.get_outputs()], *elements)
        for operation in _operations_after_wait(name)
        for elements in _elements_read(operation, name)
    ]
    depends_on: dict[str, set[str]] = {}
    for index, (segment, grad) in enumerate(writes):  # one value may be the gradient of several parameters
        in_place = isinstance(grad.data, ir.StorageBox)  # a view will be copied into a buffer of its own
        depends_on.setdefault(grad.get_name() if in_place else f"copy {index}", set()).update(_reads_of(reads, segment))
    try:
        TopologicalSorter(depends_on).prepare()
    except CycleError:
        return None
    return reads


def _reads_of(reads: Iterable[Read], segment: LayoutSegment) -> list[str]:
    """Names of the buffers computed from any element of `segment`."""
    end = segment.offset + segment.numel
    return [name for read in reads if read.first < end and segment.offset < read.end for name in read.computed]


def _operations_after_wait(name: str) -> list[Any]:
    backwards = reversed(V.graph.operations)
    after = takewhile(lambda each: not isinstance(each, WaitKernel) or each.input_name(0) != name, backwards)
    return list(after)[::-1]


def _elements_read(operation: Any, name: str) -> list[tuple[float, float]]:
    """Return the ranges of the buffer's elements that an operation reads; everything if they are unknown."""
    if isinstance(operation, ir.ComputedBuffer):
        if name not in operation.get_read_names():
            return []
        return [_range_of_loop(read) for read in operation.get_read_writes().reads if read.name == name]
    if all(read.name != name for read in operation.get_read_writes().reads):
        return []  # a call's own names are what it computes
    ranges: list[tuple[float, float]] = []
    for view in operation.inputs:
        if isinstance(view, ir.IRNode) and view.get_name() == name:
            layout = view.get_layout()
            last = sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
            ranges.append((bounds(layout.offset, {})[0], bounds(layout.offset + last, {})[1] + 1))
    return ranges or [_EVERYTHING]


def _range_of_loop(read: Any) -> tuple[float, float]:
    index = getattr(read, "index", None)  # a dependency on the whole buffer has none
    if index is None:
        return _EVERYTHING
    loops = {variable: (0, bounds(size - 1, {})[1]) for variable, size in zip(read.var_names, read.size, strict=True)}
    first, last = bounds(index, loops)
    return first, last + 1


def _hold_products(name: str, written: list[Any]) -> None:
    """Make products that write into the buffer `name` run before the library call that follows their inputs.

    Inductor's memory pass takes each slice for a new allocation and would postpone the product and keep its inputs.
    """
    operations = [operation.get_operation_name() for operation in _operations_after_wait(name)]
    position = {operation: index for index, operation in enumerate(operations)}
    writing = {buffer.get_operation_name() for buffer in written}
    library = [each for each in operations if isinstance(V.graph.name_to_op[each], ir.ExternKernel)]
    for product in (each for each in written if isinstance(each, ir.ExternKernelOut)):
        own = product.get_operation_name()
        needed = [V.graph.get_buffer(read).get_operation_name() for read in V.graph.additional_buffer_deps[own]]
        begin = max(position.get(each, 0) for each in (own, *needed))
        following = next((call for call in library if call not in writing and position[call] > begin), None)
        if following is not None:
            V.graph.additional_buffer_deps[following].add(product.get_name())


# --- readers of the pack ----------------------------------------------------------------------------------------------


@register_lowering(ADD_ACCUMULATED, type_promotion_kind=None)
def _lower_add_accumulated(packed: Any, flat_param_id: Any, in_place: bool = False) -> Any:
    if not in_place:
        return fallback_handler(ADD_ACCUMULATED, add_to_fallback_set=False)(packed, flat_param_id)
    packed.realize()
    ir.FallbackKernel.create(ADD_ACCUMULATED_, packed, flat_param_id)
    return packed


@register_lowering(DEFER_REDUCE, type_promotion_kind=None)
def _lower_defer_reduce(packed: Any, flat_param_id: Any, layout: str, owned: bool = False, unused: Any = ()) -> Any:
    if not owned:
        return fallback_handler(DEFER_REDUCE, add_to_fallback_set=False)(packed, flat_param_id, layout, unused=unused)
    packed.realize()
    V.graph.never_reuse_buffers.add(packed.get_name())
    return ir.TensorBox.create(_OwningCall.create(DEFER_REDUCE, packed, flat_param_id, layout, True, unused=unused))


register_lowering(UPDATE_SHARD, type_promotion_kind=None)(fallback_handler(UPDATE_SHARD, add_to_fallback_set=False))


class _OwningCall(ir.FallbackKernel):
    """A call that takes over its first input: the eager runtime reads and writes it later, generated code drops it."""

    def codegen(self, wrapper: Any) -> None:
        super().codegen(wrapper)
        wrapper.writeline(wrapper.make_buffer_free(self.inputs[0]))
