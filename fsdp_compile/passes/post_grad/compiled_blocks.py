"""Blocks that are compiled by themselves: the eager runtime gathers for their graphs, and reduces what they compute.

Its gathers are waited for, and its reduces started, one flat parameter after the other; without these passes all are
waited for before the graph runs, and started after it.
"""

from typing import Any

from torch import fx

from fsdp_compile.core import ops
from fsdp_compile.passes._torch import V, WaitKernel, inductor_config, ir, register_lowering
from fsdp_compile.passes.graph.nodes import Tag, add_call, get_tag, readers, tag_of, tagged
from fsdp_compile.passes.pipeline import GraphContext


def start_reduces(context: GraphContext) -> None:
    """Let the eager runtime reduce the packed gradients of a flat parameter as soon as the last of them is computed."""
    if _runs_apart():
        return
    graph, packs = context.graph, {tag_of(pack).unit: pack for pack in tagged(context.graph, "pack")}
    for full, tag in _arriving_inputs(graph):
        pack = packs.get(tag.unit)
        if pack is not None and any(user.op == "output" for user in pack.users):
            last = max(pack.all_input_nodes, default=pack)
            if last is not pack and last.op != "placeholder":
                last.append(pack)
            with graph.inserting_after(pack):
                add_call(graph, ops.START_REDUCE_, (pack, full), mode=pack.meta["val"].fake_mode)


def await_gathers(context: GraphContext) -> None:
    """Wait for parameters that the eager runtime gathers where they are first read, each flat parameter by itself.

    Not for Inductor's CUDA graphs, which copy inputs before, nor in its C++ wrapper: there the runtime waits for all.
    """
    if _runs_apart():
        return
    graph = context.graph
    for full, tag in _arriving_inputs(graph):
        for view in sorted(readers(full)[0], reverse=True):
            if view.users:
                min(view.users).prepend(view)
        # as an output it is saved for backward
        read_by = [user for user in full.users if user.op != "output" and user.target is not ops.START_REDUCE_]
        if read_by:
            with graph.inserting_before(min(read_by)):
                name, mode = f"await_{tag.path or 'root'}", full.meta["val"].fake_mode
                wait = add_call(graph, ops.AWAIT_GATHER, (full,), mode=mode, name=name)
        for user in read_by:
            user.replace_input_with(full, wait)


def _runs_apart() -> bool:
    return bool(inductor_config.triton.cudagraphs or inductor_config.cpp_wrapper)


def _arriving_inputs(graph: fx.Graph) -> list[tuple[fx.Node, Tag]]:
    """The flat parameters that the eager runtime gathers, inputs of the graph."""
    inputs = [(node, get_tag(node)) for node in graph.find_nodes(op="placeholder")]
    return [(node, tag) for node, tag in inputs if tag is not None and tag.kind == "arriving"]


@register_lowering(ops.AWAIT_GATHER, type_promotion_kind=None)
def _lower_await(full: Any) -> Any:
    """Wait after the reduces that have been started: loops of two flat parameters would be fused beyond them."""
    WaitKernel.create_wait(ops.AWAIT_GATHER, full)
    *before, wait = V.graph.operations
    started = {each.get_name() for each in before if getattr(each, "op_overload", None) is ops.START_REDUCE_}
    V.graph.additional_buffer_deps[wait.get_operation_name()].update(started)
    return full


@register_lowering(ops.START_REDUCE_, type_promotion_kind=None)
def _lower_start_reduce(packed: Any, full: Any) -> None:
    ir.FallbackKernel.create(ops.START_REDUCE_, packed, full)
