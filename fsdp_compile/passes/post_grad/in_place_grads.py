"""Gradients without copies, on the FX graph: what each pack reads, and in which buffer it lies.

    separate_reduces  undoes that equal reduces of two units were merged
    pack_in_place     rewrites a pack's inputs into nodes whose output Inductor may place freely
    reuse_gathered    lets a pack lie in the buffer that its unit was gathered into

lower_pack_grads.py does the rest in Inductor's IR: the kernel that computes a gradient writes it into its slice.

    mm(..., out=slice)           matrix products write in place, also where the gradient is a transposed product
    fused kernel(..., slice)     so do reductions and pointwise kernels
    copy kernel                  only for what Inductor does not allocate: graph inputs, and outputs of library kernels
                                 that allocate for themselves (convolution_backward)
"""

import operator
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from fsdp_compile.comm.collectives import ALL_REDUCE, ALL_REDUCE_IN_PLACE, WAIT
from fsdp_compile.core.ops import ADD_ACCUMULATED, DEFER_REDUCE, PACK_GRADS
from fsdp_compile.passes.graph import nodes
from fsdp_compile.passes.graph.analyze import gradients_of, with_preparation
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.post_grad import lower_pack_grads as _  # noqa: F401  (registers the lowerings)

aten = torch.ops.aten


def separate_reduces(context: GraphContext) -> None:
    """Give each unit its own reduce again.

    Where gradients of two units are equal constants, such as the zeros of `loss + 0 * weight.sum()`, the partitioner
    merges what is computed from them: two parameters would have one memory as their gradients.
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
        pack.update_arg(0, [_placeable(graph, grad) if grad is not None else None for grad in pack.args[0]])
        packed: fx.Node | None = pack
        while packed is not None and len(packed.users) == 1:  # its only reader may overwrite it, and would copy it else
            (reader,) = packed.users
            packed = reader if reader.target is ADD_ACCUMULATED else None
            if reader.target is ALL_REDUCE:
                reader.target = ALL_REDUCE_IN_PLACE
            elif reader.target in (DEFER_REDUCE, ADD_ACCUMULATED):
                reader.args = (*reader.args, True)
    graph.eliminate_dead_code()


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
        factors = [graph.call_function(aten.permute.default, (factor, [1, 0])) for factor in reversed(product.args)]
        for factor in factors:
            factor.meta["val"] = factor.args[0].meta["val"].permute(1, 0)  # type: ignore[union-attr]  # likewise
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
# is known only when the pack is lowered: lower_pack_grads.py then orders each write after the reads of its slice, or
# packs into a new buffer after all, if one loop both reads a parameter and computes the gradient that would replace it.


def reuse_gathered(context: GraphContext) -> None:
    """Pack gradients into the unit's gathered buffer (Note [Gradients take the place of their parameters])."""
    graph = context.graph
    waits = {nodes.tag_of(gather).unit: next(iter(gather.users)) for gather in nodes.tagged(graph, "gather")}
    for pack in graph.find_nodes(op="call_function", target=PACK_GRADS):
        wait = waits.get(nodes.tag_of(pack).unit)
        if wait is None or not _fits(pack, wait):
            continue
        position = {node: index for index, node in enumerate(graph.nodes)}  # the last unit has moved nodes
        if _in_time(pack, wait, position):
            _put_in_order(pack, wait, position)
            pack.args = (*pack.args, wait)


def _fits(pack: fx.Node, wait: fx.Node) -> bool:
    """Whether the buffers have one size and dtype, and nothing else reads the gradients or outlives the buffer."""
    packed, gathered = pack.meta["val"], wait.meta["val"]
    if packed.dtype != gathered.dtype or packed.shape != gathered.shape or packed.device != gathered.device:
        return False
    only_packed = all(len(grad.users) == 1 for grad in gradients_of(pack))
    only_sent = all((tag := nodes.get_tag(user)) is not None and tag.kind == "reduce" for user in pack.users)
    return only_packed and only_sent and all(reader.op != "output" for reader in nodes.readers(wait)[1])


def _in_time(pack: fx.Node, wait: fx.Node, position: Mapping[fx.Node, int]) -> bool:
    """Whether gradients are computed while the parameters are there, and the last of them about when those go.

    Gradients that come later are better packed into a buffer of their own, which does not exist until then. A matrix
    product before the first reader of the parameters stays there, for the gather to hide behind, and no reduce waits
    for readers beyond another product.
    """
    gradients = gradients_of(pack)
    written = [position[grad] for grad in gradients]
    read = [position[reader] for reader in nodes.readers(wait)[1]]
    if not read or min(written) > max(read):
        return False
    early = any(nodes.is_product(grad) and position[grad] < min(read) for grad in gradients)
    between = list(position)[max(written) + 1 : max(read)]
    return not early and not any(map(nodes.is_product, between))


def _put_in_order(pack: fx.Node, wait: fx.Node, position: Mapping[fx.Node, int]) -> None:
    """Move every gradient behind the first reader of the parameters, and the last gradient behind the last reader."""
    reading, gradients = nodes.readers(wait)[1], gradients_of(pack)
    first, last = (choose(reading, key=position.__getitem__) for choose in (min, max))
    for early in [grad for grad in gradients if position[grad] < position[first]]:
        first.append(early)
    gradient = max(gradients, key=position.__getitem__)
    if position[gradient] < position[last]:
        last.append(gradient)
    end = max(position[gradient], position[last])
    loops = [node for node in reading if nodes.is_pointwise(node)]  # their kernels read the parameters
    joined = [nodes.derived(node, lambda each: nodes.is_pointwise(each) or nodes.is_view(each)) for node in loops]
    fused = set(loops).union(*joined)
    before = [node for node in fused if position[node] <= end]
    for node in _next_pointwise(sorted(before, key=position.__getitem__), position, end):
        if gradient not in node.all_input_nodes:
            gradient.prepend(node)


def _next_pointwise(before: list[fx.Node], position: Mapping[fx.Node, int], end: int) -> list[fx.Node]:
    """The pointwise nodes beyond `end` that read `before` directly or through views, if all their inputs are there.

    Mostly a sum with the residual's gradient. Computed later it would read the last result of `before` from memory, and
    that would have to be written first.
    """
    following: list[fx.Node] = []
    for node in before:
        for user in sorted(node.users, key=position.__getitem__):
            views = []
            while nodes.is_view(user) and position[user] > end and len(user.users) == 1:
                views.append(user)
                user = next(iter(user.users))
            ready = all(position[each] <= end or each in views for each in user.all_input_nodes)
            if position[user] > end and nodes.is_pointwise(user) and ready and user not in following:
                following += [*views, user]
    return following
