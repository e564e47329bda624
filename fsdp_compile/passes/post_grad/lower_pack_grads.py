"""Gradients without copies, in Inductor's IR: the kernel that computes a gradient writes it into the packed buffer.

A pack is a concatenation kernel, and a gradient's own buffer becomes a slice of it. If the pack lies in its unit's
gathered buffer (Note [Gradients take the place of their parameters]), each write comes after all that reads its slice.
Inductor knows which operations read a buffer, not which slice of it, so dependencies are added operation by operation
while the pack is lowered, when all operations that read parameters of the unit are known.
"""

from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import sympy

from fsdp_compile.core.layout import FlatParamLayout, LayoutSegment
from fsdp_compile.core.ops import ADD_ACCUMULATED, ADD_ACCUMULATED_, DEFER_REDUCE, PACK_GRADS, UPDATE_SHARD
from fsdp_compile.passes._torch import (
    V,
    WaitKernel,
    fallback_handler,
    ir,
    ops,
    register_lowering,
    tree_leaves,
)

Contents = Sequence[tuple[LayoutSegment, Any]]
"""Segments of a flat parameter, each with the IR of its gradient; None for padding and for unused parameters."""

_EVERYTHING = (0, float("inf"))


@register_lowering(PACK_GRADS, type_promotion_kind=None)
def _lower_pack_grads(grads: list[Any], layout: str, into: Any = None) -> Any:
    parsed = FlatParamLayout.parse(layout)
    contents = [(each, None if each.parameter is None else grads[each.parameter]) for each in parsed.segments]
    reads = None if into is None else _reads_before(into.get_name(), contents)
    return _pack_into_new_buffer(parsed.numel, contents) if reads is None else _overwrite(into, contents, reads)


def _pack_into_new_buffer(numel: int, contents: Contents) -> Any:
    """Emit a concatenation kernel; its buffer is allocated when the first gradient is computed."""
    first = next(grad for _, grad in contents if grad is not None)
    packed = ir.ConcatKernel(
        name=None,
        layout=ir.FixedLayout(
            device=first.get_device(), dtype=first.get_dtype(), size=[sympy.Integer(numel)], stride=[sympy.Integer(1)]
        ),
        inputs=[],
    )
    box = ir.StorageBox(packed)
    written = [_write(grad, segment, box) for segment, grad in contents]
    # Zeros depend on nothing, so the scheduler could fill the slices of all units at the start of backward, and every
    # packed buffer would be alive from there on. They wait for the unit's first gradient.
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
    layout = ir.FixedLayout(
        device=box.get_device(),
        dtype=box.get_dtype(),
        size=size,
        stride=ir.FlexibleLayout.contiguous_strides(size),
        offset=sympy.Integer(segment.offset),
    )
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
    """Zeros for padding and for parameters without a gradient: what is sent must be finite.

    They are written by a library call: a kernel of its own for each number of zeros takes the C++ compiler a second.
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
        if name in _names_read(operation)
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
    """The operations after the wait for the gather, in order."""
    after: list[Any] = []
    for operation in reversed(V.graph.operations):
        if isinstance(operation, WaitKernel) and operation.input_name(0) == name:
            break
        after.append(operation)
    return after[::-1]


def _names_read(operation: Any) -> Iterable[str]:
    if isinstance(operation, ir.ComputedBuffer):
        return operation.get_read_names()
    return [read.name for read in operation.get_read_writes().reads]  # a call's own names are what it computes


def _elements_read(operation: Any, name: str) -> list[tuple[float, float]]:
    """The ranges of elements that an operation reads of the buffer; everything, where that cannot be told."""
    if isinstance(operation, ir.ComputedBuffer):
        return [_range_of_loop(read) for read in operation.get_read_writes().reads if read.name == name]
    views = [each for each in operation.inputs if isinstance(each, ir.IRNode) and each.get_name() == name]
    return [_range_of_view(view.get_layout()) for view in views] or [_EVERYTHING]


def _range_of_loop(read: Any) -> tuple[float, float]:
    index = getattr(read, "index", None)  # a dependency on the whole buffer has none
    if index is None or any(size.free_symbols for size in read.size):
        return _EVERYTHING
    steps = [index.diff(variable) for variable in read.var_names]
    first = last = index.subs(dict.fromkeys(read.var_names, 0))
    if not all(each.is_Integer for each in (first, *steps)):
        return _EVERYTHING
    for step, size in zip(steps, read.size, strict=True):
        first, last = first + min(step * (size - 1), 0), last + max(step * (size - 1), 0)
    return int(first), int(last) + 1


def _range_of_view(layout: Any) -> tuple[float, float]:
    last = sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
    first, end = sympy.sympify(layout.offset), sympy.sympify(layout.offset + last + 1)
    return (int(first), int(end)) if first.is_Integer and end.is_Integer else _EVERYTHING


def _hold_products(name: str, written: list[Any]) -> None:
    """Make products that write into the buffer `name` run before the library call that follows their inputs.

    Inductor's memory pass takes each slice for memory of its own and would put the product off, whose inputs would live
    as long.
    """
    operations = [operation.get_operation_name() for operation in _operations_after_wait(name)]
    position = {operation: index for index, operation in enumerate(operations)}
    writing = {buffer.get_operation_name() for buffer in written}
    calls = [
        each for each in operations if isinstance(V.graph.name_to_op[each], ir.ExternKernel) and each not in writing
    ]
    for product in (each for each in written if isinstance(each, ir.ExternKernelOut)):
        own = product.get_operation_name()
        needed = [V.graph.get_buffer(read).get_operation_name() for read in V.graph.additional_buffer_deps[own]]
        begin = max(position.get(each, 0) for each in (own, *needed))
        following = next((call for call in calls if position[call] > begin), None)
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
def _lower_defer_reduce(packed: Any, flat_param_id: Any, layout: str, owned: bool = False) -> Any:
    if not owned:
        return fallback_handler(DEFER_REDUCE, add_to_fallback_set=False)(packed, flat_param_id, layout)
    packed.realize()
    V.graph.never_reuse_buffers.add(packed.get_name())
    return ir.TensorBox.create(_OwningCall.create(DEFER_REDUCE, packed, flat_param_id, layout, True))


register_lowering(UPDATE_SHARD, type_promotion_kind=None)(fallback_handler(UPDATE_SHARD, add_to_fallback_set=False))


class _OwningCall(ir.FallbackKernel):
    """A call that takes over its first input: the eager runtime reads and writes it later, generated code drops it."""

    def codegen(self, wrapper: Any) -> None:
        super().codegen(wrapper)
        wrapper.writeline(wrapper.make_buffer_free(self.inputs[0]))
