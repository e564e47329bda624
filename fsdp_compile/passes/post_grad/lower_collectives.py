"""Issue collectives in cheaper forms, once the order is decided.

    reduce_scatter_by_all_to_all    on gloo a reduce-scatter is an all-to-all and a reduction of the received rows
    all_gather_into_buffer          every all-gather writes into a buffer that the graph allocates

The graph keeps torch's operators, which Inductor knows. An operator of ours waits for the all-to-all and the
all-gather; its lowering lets generated code call the process group itself (comm/direct.py).
"""

from typing import Any

import torch
from torch import fx

from fsdp_compile.comm import collectives
from fsdp_compile.core.ops import REDUCE_ROWS, SEND_BUFFER, WAIT_COLLECTIVE
from fsdp_compile.passes._torch import V, WaitKernel, ir, join_sums, register_lowering, restore_dependencies
from fsdp_compile.passes.graph.nodes import CAST, tagged
from fsdp_compile.passes.pipeline import GraphContext

aten = torch.ops.aten


# --- reduce-scatter on gloo -------------------------------------------------------------------------------------------

# Note [Why gloo's reduce-scatter is an all-to-all]
# Gloo reduce-scatters by an all-reduce of a copy (Note [What gloo copies]). Eager steps therefore send each rank its
# slice by an all-to-all and reduce the received rows. Compiled graphs do the same: both send the same bytes and add the
# rows by the same function, so that means are equal bit for bit. Generated code would add them in another order, and be
# compiled for each size of a unit.


def reduce_scatter_by_all_to_all(context: GraphContext) -> None:
    """Replace each reduce-scatter that runs on gloo (Note [Why gloo's reduce-scatter is an all-to-all]), or whose sum
    must be a tree over the ranks.

    reduce_scatter(packed)  ->  wait                                     this rank's slice of the mean
    all_to_all(packed)      ->  wait  ->  rows [ranks, part]  ->  reduce_rows   the same
    """
    graph = context.graph
    for reduce in tagged(graph, "reduce"):
        if reduce.target is not collectives.REDUCE_SCATTER:
            continue
        args: Any = reduce.args
        packed, op, ranks, group = args
        if op != "tree" and not collectives.copies(reduce.meta["val"], group):
            continue
        (wait,) = (user for user in reduce.users if user.target is collectives.WAIT)
        part = reduce.meta["val"].numel()
        received = reduce.meta["val"].new_empty(part * ranks)
        unit = wait.name.removeprefix("wait_reduce_")
        with graph.inserting_before(wait.next):
            rows = graph.create_node("call_function", aten.view.default, (wait, [ranks, part]), name=f"rows_{unit}")
            reduced = graph.create_node("call_function", REDUCE_ROWS, (rows, op), name=f"reduced_{unit}")
        wait.replace_all_uses_with(reduced, delete_user_cb=lambda user, rows=rows: user is not rows)  # type: ignore[misc]
        reduced.meta = {"val": wait.meta["val"]}
        rows.meta = {"val": received.view(ranks, part)}
        reduce.target, reduce.args = collectives.ALL_TO_ALL, (packed, [part] * ranks, [part] * ranks, group)
        reduce.meta["val"] = wait.meta["val"] = received
        call_directly(reduce)


# --- all-gather into a buffer -----------------------------------------------------------------------------------------


def all_gather_into_buffer(context: GraphContext) -> None:
    """Give every all-gather an `out` buffer that the graph allocates; from here on the graph has mutations.

    torch 2.13 runs the allocating form as a coalesced collective, whose name is too long for the string into which
    gloo's worker threads write it without a lock: two threads that finish at once free its memory twice.
    """
    graph = context.graph
    for gather in tagged(graph, "gather"):
        if gather.target is collectives.ALL_GATHER:
            full, name = gather.meta["val"], f"full_{gather.name.removeprefix('gather_')}"
            options = {"dtype": full.dtype, "device": full.device, "pin_memory": False}
            args = (list(full.shape),)
            with graph.inserting_before(gather):
                buffer = graph.create_node("call_function", aten.empty.memory_format, args, options, name)
            buffer.meta["val"] = full
            gather.target, gather.kwargs = collectives.ALL_GATHER_INTO, {"out": buffer}
            _mark_sent(graph, gather)
            call_directly(gather)


def _mark_sent(graph: fx.Graph, gather: fx.Node) -> None:
    """Mark what was computed from a shard as sent; the start of the gather casts a stored shard itself."""
    computed: fx.Node = gather.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    if computed.op != "call_function" or computed.target is WAIT_COLLECTIVE:  # of an earlier stage
        return
    is_cast = computed.target is CAST and computed.all_input_nodes[0].op == "placeholder"
    with graph.inserting_after(computed):
        sent = graph.call_function(SEND_BUFFER, computed.args if is_cast else (computed,))
    sent.meta = dict(computed.meta)
    gather.replace_input_with(computed, sent)


@register_lowering(SEND_BUFFER, type_promotion_kind=None)
def _lower_send(payload: Any, dtype: torch.dtype | None = None) -> Any:
    """Realize what is sent, as Inductor would compute it both for the gather and for its wait.

    A stored shard gets the `dtype` to which generated code casts it when it starts the gather: with its own one
    Inductor would promote the dtypes of the gather's arguments.
    """
    payload.realize()
    if dtype is None:
        return payload
    layout = ir.FixedLayout(payload.get_device(), dtype, payload.get_size(), payload.get_stride())
    return ir.TensorBox.create(ir.InputBuffer(name=payload.get_name(), layout=layout))


# --- calls of the process group ---------------------------------------------------------------------------------------

_DIRECT = {collectives.ALL_GATHER_INTO: "all_gather", collectives.ALL_TO_ALL: "all_to_all"}  # of DirectCollectives


def call_directly(start: fx.Node) -> None:
    """Let generated code call the process group for `start`, an all-gather with an `out` or an all-to-all."""
    (wait,) = (user for user in start.users if user.target is collectives.WAIT)
    wait.target, wait.args = WAIT_COLLECTIVE, (start, start.args[0])


class _DirectWait(WaitKernel):
    """A wait on the `DirectCollectives` of the generated module."""

    def codegen(self, wrapper: Any) -> None:
        wrapper.add_import_once("from fsdp_compile.comm.direct import DirectCollectives")
        wrapper.add_import_once("fsdp_collectives = DirectCollectives()")
        super().codegen(wrapper)


@register_lowering(WAIT_COLLECTIVE, type_promotion_kind=None)
def _lower_wait(full: Any, sent: Any) -> Any:
    """Rename both calls, and keep what is sent alive until the wait; Inductor does so for allocating collectives only.

    `sent` may be a view without a buffer; the collective has copied it into one of its own then.
    """
    _DirectWait.create_wait(collectives.WAIT, full)
    wait = V.graph.operations[-1]
    starts = [each for each in V.graph.operations if getattr(each, "op_overload", None) in _DIRECT]
    start = next(each for each in reversed(starts) if full.get_name() in (each.get_name(), *each.alias_names))
    buffers = {each.get_name() for each in start.inputs} - {full.get_name()}
    V.graph.additional_star_deps[wait.get_operation_name()].update(buffers)
    caller = "fsdp_collectives.at_start" if start is starts[0] else "fsdp_collectives"
    start.python_kernel_name = f"{caller}.{_DIRECT[start.op_overload]}"
    wait.python_kernel_name = "fsdp_collectives.wait"
    return full


# --- after fusion -----------------------------------------------------------------------------------------------------

# Note [Loops that forget the wait]
# To Inductor's scheduler a collective and its wait both mutate the buffer, and later readers read it under the name of
# the last mutation. The C++ backend fuses loops of different shapes over equally many elements, such as the gradient of
# an embedding and a loop over its rows. To do so it derives anew what one of them reads, and loses the new names (torch
# 2.11: also everything else that the node waited for). When it next sorts the nodes, the fused loops may come before
# the wait, and compute from memory that no collective has filled.


def after_fusion(nodes: list[Any]) -> list[Any]:
    """Return fused nodes of the scheduler, each after all that it waits for (Note [Loops that forget the wait]).

    In a block's backward, which waits for nothing, the sums among its packed gradients join the loops before them.
    """
    if any(isinstance(each, WaitKernel) for each in V.graph.operations):
        return restore_dependencies(nodes)
    return join_sums(nodes) if tagged(V.graph.graph, "pack") else nodes
