"""Packing without copies: the kernel that computes a gradient writes it into its window of the reduce-scatter's input.

Two halves. The pass rewrites a pack's inputs into nodes whose output Inductor may place freely. The lowering places
them: the packed buffer is a concatenation kernel, and a gradient's own buffer becomes a strided window of it.

    mm(..., out=window)           GEMMs write in place, also where the gradient is a transposed or reshaped product
    fused kernel(..., window)     so do reductions and pointwise kernels
    copy kernel                   only for what Inductor does not allocate: graph inputs, and outputs of library kernels
                                  that allocate for themselves (convolution_backward)
"""

import operator
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx

from fsdp_compile.comm.collectives import ALL_REDUCE, ALL_REDUCE_IN_PLACE
from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.core.ops import ADD_ACCUMULATED, ADD_ACCUMULATED_, DEFER_REDUCE, PACK_GRADS
from fsdp_compile.passes.graph.node_kinds import SAME_ORDER
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.post_grad.overwrite import Write, hold_products, overwritten, reads_before, write_after

aten = torch.ops.aten


def pack_in_place(context: GraphContext) -> None:
    """Make each gradient of a pack a node that can write straight into the packed buffer."""
    graph = context.graph
    for pack in graph.find_nodes(op="call_function", target=PACK_GRADS):
        grads = pack.args[0]
        pack.update_arg(0, [_placeable(graph, grad) if grad is not None else None for grad in grads])
        if len(pack.users) == 1:
            _use_in_place(pack)
    graph.eliminate_dead_code()


def _use_in_place(pack: fx.Node) -> None:
    """Let the only reader of a pack have its buffer: out of place, each of these would copy it first."""
    reader = next(iter(pack.users))
    if reader.target is ALL_REDUCE:
        reader.target = ALL_REDUCE_IN_PLACE
    elif reader.target is DEFER_REDUCE:
        reader.args = (*reader.args, True)
    elif reader.target is ADD_ACCUMULATED:
        reader.args = (*reader.args, True)
        if len(reader.users) == 1:
            _use_in_place(reader)


def _placeable(graph: fx.Graph, grad: fx.Node) -> fx.Node:
    """Peel views that keep the elements' order; turn a transposed product around: (a b)^T = b^T a^T."""
    while grad.target in SAME_ORDER:
        grad = grad.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    return _transposed_product(graph, grad) or _bias_of_convolution(graph, grad) or grad


def _transposed_product(graph: fx.Graph, grad: fx.Node) -> fx.Node | None:
    if grad.target is not aten.permute.default or list(grad.args[1]) != [1, 0]:  # type: ignore[arg-type]  # fx arguments are untyped
        return None
    product = grad.args[0]
    assert isinstance(product, fx.Node)
    if product.target is not aten.mm.default or len(product.users) > 1:
        return None
    with graph.inserting_before(product):
        left, right = (_transposed(graph, factor) for factor in reversed(product.args))  # type: ignore[arg-type]  # fx arguments are untyped
        turned = graph.call_function(aten.mm.default, (left, right))
    turned.meta = dict(grad.meta)
    turned.meta["val"] = grad.meta["val"].contiguous()
    return turned


def _bias_of_convolution(graph: fx.Graph, grad: fx.Node) -> fx.Node | None:
    """A bias's gradient as a sum of its own: convolution_backward would put it into memory that it allocates itself."""
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


def _transposed(graph: fx.Graph, matrix: fx.Node) -> fx.Node:
    node = graph.call_function(aten.permute.default, (matrix, [1, 0]))
    node.meta["val"] = matrix.meta["val"].permute(1, 0)
    return node


@cache
def register_pack_lowering() -> None:
    """Teach Inductor to lower `fsdp_flat::pack_grads` and its readers; once per process, when first needed."""
    from torch._inductor.lowering import register_lowering

    register_lowering(PACK_GRADS, type_promotion_kind=None)(_lower_pack)
    register_lowering(ADD_ACCUMULATED, type_promotion_kind=None)(_lower_add_accumulated)
    register_lowering(DEFER_REDUCE, type_promotion_kind=None)(_lower_defer_reduce)


def _lower_pack(grads, layout, into=None):  # type: ignore[no-untyped-def]  # Inductor IR in and out; checked on torch 2.11 and 2.13
    from torch._inductor import ir

    parsed = FlatParamLayout.parse(layout)
    reads = None if into is None else reads_before(into.get_name(), _writes(grads, parsed))
    if reads is None:
        return _new_pack(ir, grads, parsed)
    return _overwrite(ir, grads, parsed, into, reads)


def _writes(grads, parsed):  # type: ignore[no-untyped-def]  # likewise
    given = [(_gradient(grads, segment), segment) for segment in parsed.segments]
    return [Write(grad, segment.offset, segment.numel) for grad, segment in given if grad is not None]


def _new_pack(ir, grads, parsed):  # type: ignore[no-untyped-def]  # likewise
    """A buffer that is there when the first gradient is."""
    from torch._inductor.virtualized import V

    first = next(grad for grad in grads if grad is not None)
    whole = ir.FixedLayout(
        device=first.get_device(),
        dtype=first.get_dtype(),
        size=[sympy.Integer(parsed.numel)],
        stride=[sympy.Integer(1)],
    )
    packed = ir.ConcatKernel(name=None, layout=whole, inputs=[])
    box = ir.StorageBox(packed)
    pieces = [_place(ir, grads, segment, box) for segment in parsed.segments]
    given = [(piece, _gradient(grads, segment)) for piece, segment in zip(pieces, parsed.segments, strict=True)]
    fillers = [piece for piece, grad in given if grad is None]
    _fill_late(V.graph, fillers, [piece for piece, grad in given if grad is not None])
    return _registered(ir, packed, pieces, box)


def _overwrite(ir, grads, parsed, into, reads):  # type: ignore[no-untyped-def]  # likewise
    """The gathered buffer, each gradient written after what reads its place. Padding stays what it is there: zero."""
    segments = [segment for segment in parsed.segments if segment.parameter is not None]
    pieces = [_place(ir, grads, segment, into.data) for segment in segments]
    for piece, segment in zip(pieces, segments, strict=True):
        write_after(reads, piece.get_operation_name(), into.get_name(), segment.offset, segment.numel)
    hold_products(into.get_name(), pieces)
    return _registered(ir, overwritten(into), pieces, into.data)


def _place(ir, grads, segment, box):  # type: ignore[no-untyped-def]  # likewise
    """Let a gradient, or zeros, be written into its window of `box`."""
    grad = _gradient(grads, segment)
    size = [sympy.Integer(segment.numel)] if grad is None else list(grad.get_size())
    where = ir.FixedLayout(
        device=box.get_device(), dtype=box.get_dtype(), size=size,
        stride=ir.FlexibleLayout.contiguous_strides(size), offset=sympy.Integer(segment.offset),
    )  # fmt: skip
    window = ir.ReinterpretView(data=box, layout=where)
    return _fill(ir, window) if grad is None else _write_into(ir, grad, window)


def _gradient(grads, segment):  # type: ignore[no-untyped-def]  # likewise
    """What is to be written into a segment of the buffer; None: zeros."""
    return None if segment.parameter is None else grads[segment.parameter]


def _registered(ir, packed, pieces, box):  # type: ignore[no-untyped-def]  # likewise
    from torch._inductor.virtualized import V

    packed.name = V.graph.register_buffer(packed)
    packed.inputs = ir.ConcatKernel.unwrap_storage(pieces)
    V.graph.register_operation(packed)
    return ir.TensorBox(box)


def _write_into(ir, piece, window):  # type: ignore[no-untyped-def]  # Inductor IR, as above
    """Let `piece` be written to `window`.

    With `max_autotune` the layout of a library's product is fixed before it is known where it goes, and Inductor would
    copy it; with the window's strides it may as well lie there.
    """
    product = getattr(piece.data, "data", None)
    if isinstance(product, ir.ExternKernelOut) and isinstance(product.layout, ir.FixedLayout):
        fixed = product.layout
        if fixed.offset == 0 and list(fixed.stride) == list(window.layout.stride):
            product.layout = ir.NonOwningLayout(window)
            return product
    return ir.ConcatKernel.realize_into(piece, window)


def _fill(ir, window):  # type: ignore[no-untyped-def]  # Inductor IR, as above
    """Zeros for padding and for parameters without a gradient: what is sent must be finite.

    By a call: a kernel of its own for each number of zeros takes the C++ compiler a second.
    """
    from torch._inductor.virtualized import V, ops

    kind = {"device": window.get_device(), "dtype": window.get_dtype()}
    if V.graph.cpp_wrapper:
        zeros = ir.Pointwise.create(
            **kind, inner_fn=lambda index: ops.constant(0, kind["dtype"]), ranges=window.get_size()
        )
        return ir.ConcatKernel.realize_into(zeros, window)
    return ir.ExternKernelOut(
        ir.NonOwningLayout(window),
        inputs=[],
        constant_args=(list(window.get_size()),),
        python_kernel_name="torch.zeros",
    )


def _fill_late(graph, fillers, computed):  # type: ignore[no-untyped-def]  # likewise
    """Zero-filling waits for the unit's first gradient.

    It depends on nothing else, so the scheduler could fill all units' windows at the start of backward and every packed
    buffer would be alive from there on.
    """
    produced = list(graph.name_to_buffer)
    first = min((buffer.get_name() for buffer in computed), key=produced.index)
    for filler in fillers:
        graph.additional_buffer_deps[filler.get_operation_name()].add(first)


def _lower_add_accumulated(packed, number, in_place=False):  # type: ignore[no-untyped-def]  # likewise
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler

    if not in_place:
        return fallback_handler(ADD_ACCUMULATED, add_to_fallback_set=False)(packed, number)
    packed.realize()
    ir.FallbackKernel.create(ADD_ACCUMULATED_, packed, number)
    return packed


def _lower_defer_reduce(packed, number, layout, owned=False):  # type: ignore[no-untyped-def]  # likewise
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    if not owned:
        return fallback_handler(DEFER_REDUCE, add_to_fallback_set=False)(packed, number, layout)
    packed.realize()
    V.graph.never_reuse_buffers.add(packed.get_name())
    return ir.TensorBox.create(_owning_kernel().create(DEFER_REDUCE, packed, number, layout, True))


@cache
def _owning_kernel() -> Any:
    """A call that takes its first input over: it is read and written later on, by others, and dropped here."""
    from torch._inductor import ir

    class Owning(ir.FallbackKernel):
        def codegen(self, wrapper):  # type: ignore[no-untyped-def]  # likewise
            super().codegen(wrapper)
            wrapper.writeline(wrapper.make_buffer_free(self.inputs[0]))

    return Owning
