"""Gradients without copies: what each pack reads, and how Inductor lowers that.

Passes on the FX graph: `separate_reduces` undoes that equal reduces of two units were merged, and `pack_in_place`
rewrites a pack's inputs into nodes whose output Inductor may place freely.

In Inductor's IR a pack is a concatenation kernel, and the kernel that computes a gradient writes it into its slice:

    mm(..., out=slice)           matrix products write in place, also where the gradient is a transposed product
    fused kernel(..., slice)     so do reductions and pointwise kernels
    copy kernel                  only for what Inductor does not allocate: graph inputs, and outputs of library kernels
                                 that allocate for themselves (convolution_backward)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from fsdp_compile.comm.collectives import ALL_REDUCE, ALL_REDUCE_IN_PLACE, WAIT
from fsdp_compile.core.layout import FlatParamLayout, LayoutSegment
from fsdp_compile.core.ops import ADD_ACCUMULATED, ADD_ACCUMULATED_, DEFER_REDUCE, PACK_GRADS, UPDATE_SHARD
from fsdp_compile.passes._torch import V, fallback_handler, ir, register_lowering
from fsdp_compile.passes.graph import nodes
from fsdp_compile.passes.graph.analyze import with_preparation
from fsdp_compile.passes.pipeline import GraphContext

aten = torch.ops.aten

_OVERWRITING = (ADD_ACCUMULATED, ALL_REDUCE_IN_PLACE, DEFER_REDUCE)  # what they read, where nothing else does


def separate_reduces(context: GraphContext) -> None:
    """Give each unit its own reduce again.

    The partitioner merges reduces of equal constants, such as the zeros of `loss + 0 * weight.sum()`, and two
    parameters would share memory as their gradients.
    """
    graph = context.graph
    for start in nodes.tagged(graph, "reduce"):
        for wait in [user for user in start.users if user.target is WAIT][1:]:
            copies = {each: each for each in graph.nodes}
            with graph.inserting_before(wait):
                for node in with_preparation(start):
                    copies[node] = graph.node_copy(node, copies.__getitem__)
                    owner = nodes.tag_of(wait)
                    nodes.set_tag(copies[node], replace(nodes.tag_of(node), unit=owner.unit, path=owner.path))
            wait.replace_input_with(start, copies[start])


def pack_in_place(context: GraphContext) -> None:
    """Rewrite the gradients of each pack into nodes that can write straight into the packed buffer."""
    graph = context.graph
    for pack in graph.find_nodes(op="call_function", target=PACK_GRADS):
        pack.update_arg(0, [None if grad is None else _node_to_place(graph, grad) for grad in pack.args[0]])
        packed: fx.Node | None = pack
        while packed is not None and len(packed.users) == 1:  # its only reader may overwrite it
            (reader,) = packed.users
            packed = reader if reader.target is ADD_ACCUMULATED else None
            if reader.target is ALL_REDUCE:
                reader.target = ALL_REDUCE_IN_PLACE
            elif reader.target in (DEFER_REDUCE, ADD_ACCUMULATED):
                reader.args = (*reader.args, True)
    nodes.eliminate_dead_code(graph)  # stripped views read gradients no more
    for pack in graph.find_nodes(op="call_function", target=PACK_GRADS):
        if any(user.target in _OVERWRITING or user.op == "output" for user in pack.users):  # outputs go to the runtime
            # Others may read them later. Inputs of a graph are copied anyway.
            for grad in [each for each in pack.all_input_nodes if len(each.users) > 1 and each.op != "placeholder"]:
                with graph.inserting_before(pack):
                    copy = nodes.add_call(graph, aten.clone.default, (grad,), mode=grad.meta["val"].fake_mode)
                pack.replace_input_with(grad, copy)


def _node_to_place(graph: fx.Graph, grad: fx.Node) -> fx.Node:
    """Strip views that keep the order of elements; rewrite a transposed product as (a b)^T = b^T a^T."""
    while grad.target in nodes.SAME_ORDER:
        grad = grad.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    if grad.target is not aten.permute.default or list(grad.args[1]) != [1, 0]:  # type: ignore[arg-type]  # likewise
        return grad
    product: fx.Node = grad.args[0]  # type: ignore[assignment]  # likewise
    if product.target is not aten.mm.default or len(product.users) > 1:
        return grad
    with graph.inserting_before(product):
        mode, permute = grad.meta["val"].fake_mode, aten.permute.default
        factors = [nodes.add_call(graph, permute, (each, [1, 0]), mode=mode) for each in reversed(product.args)]
        turned = graph.call_function(aten.mm.default, tuple(factors))
    turned.meta = {**grad.meta, "val": grad.meta["val"].contiguous()}
    return turned


# --- lowering ---------------------------------------------------------------------------------------------------------


@register_lowering(PACK_GRADS, type_promotion_kind=None)
def _lower_pack_grads(grads: list[Any], layout: str) -> Any:
    """Emit a concatenation kernel; its buffer is allocated when the first gradient is computed."""
    parsed = FlatParamLayout.parse(layout)
    first = next(grad for grad in grads if grad is not None)
    fixed = ir.FixedLayout(first.get_device(), first.get_dtype(), [sympy.Integer(parsed.numel)], [sympy.Integer(1)])
    packed = ir.ConcatKernel(name=None, layout=fixed, inputs=[])
    box = ir.StorageBox(packed)
    contents = [(each, None if each.parameter is None else grads[each.parameter]) for each in parsed.segments]
    written = [_write_slice(grad, _slice_of(box, each, grad.get_size())) for each, grad in contents if grad is not None]
    packed.name = V.graph.register_buffer(packed)
    packed.inputs = ir.ConcatKernel.unwrap_storage(written)
    V.graph.register_operation(packed)
    # Padding, and parameters without a gradient: what is sent must be finite. One call fills all of it, after the last
    # gradient: fills between the kernels of gradients would keep Inductor from fusing these.
    if empty := [_slice_of(box, each, [each.numel]) for each, grad in contents if grad is None]:
        ir.FallbackKernel.create(aten._foreach_zero_.default, empty)
    return ir.TensorBox(box)


def _slice_of(box: Any, segment: LayoutSegment, size: Sequence[Any]) -> Any:
    """The memory of `segment` in the buffer in `box`, as a contiguous tensor of `size`."""
    stride, offset = ir.FlexibleLayout.contiguous_strides(size), sympy.Integer(segment.offset)
    return ir.ReinterpretView(
        data=box, layout=ir.FixedLayout(box.get_device(), box.get_dtype(), list(size), stride, offset=offset)
    )


def _write_slice(grad: Any, target: Any) -> Any:
    """Compute `grad` into the memory that `target` views."""
    product: Any = getattr(grad.data, "data", None)
    fixed = product.layout if isinstance(product, ir.ExternKernelOut) else None
    if isinstance(fixed, ir.FixedLayout) and list(fixed.stride) == list(target.layout.stride):
        # With `max_autotune` the layout of a library's product is fixed before it is known where it goes, and Inductor
        # would copy it. With the strides of the slice it may as well lie there.
        product.layout = ir.NonOwningLayout(target)
        return product
    return ir.ConcatKernel.realize_into(grad, target)


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
