"""Let collectives send messages in the format that their hop has (comm/formats.py), once the order is decided.

    gather(shard)  ->  wait                       before: all passes plan and move these
    encode(shard)  ->  gather  ->  wait  ->  decode into a buffer

    reduce_scatter(packed)  ->  wait
    encode(packed)  ->  all_to_all  ->  wait  ->  add up

    all_reduce(packed)  ->  wait
    encode(packed)  ->  all_to_all  ->  wait  ->  add up  ->  encode  ->  gather  ->  wait  ->  decode

Encoding and decoding are loops, operator by operator, which Inductor fuses: with the cast of a shard before, and into
one kernel for each flat parameter behind.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compile.comm import collectives
from fsdp_compile.comm.formats import add_up_at_once, decode, encode
from fsdp_compile.core.ops import define
from fsdp_compile.passes._torch import V, ir, register_lowering, select_decomp_table
from fsdp_compile.passes.graph import nodes
from fsdp_compile.passes.graph.prices import group_of
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.post_grad.lower_collectives import call_directly

aten = torch.ops.aten

JOIN_BYTES = define("join_bytes", "(Tensor[] parts, int dim) -> Tensor")
torch.library.impl("fsdp_flat::join_bytes", "default", torch.cat)
torch.library.register_fake("fsdp_flat::join_bytes", torch.cat)


def send_messages(context: GraphContext) -> None:
    """Replace each collective with a format by one of messages, and what encodes and decodes these."""
    graph = context.graph
    for start in nodes.tagged(graph, "gather", "reduce"):
        if nodes.tag_of(start).wire:
            (wait,) = (user for user in start.users if user.target is collectives.WAIT)
            values = (
                _emit_gather(graph, start, wait)
                if start.target is collectives.ALL_GATHER
                else _emit_reduce(graph, start, wait)
            )
            values.meta = {**wait.meta, "val": values.meta["val"]}
            wait.replace_all_uses_with(values)
            graph.erase_node(wait)
            graph.erase_node(start)


def _emit_gather(graph: fx.Graph, start: fx.Node, wait: fx.Node) -> fx.Node:
    """Emit a gather of messages; the result is a buffer, into which gradients may be packed."""
    format, full, mode = nodes.tag_of(start).wire, start.meta["val"], start.meta["val"].fake_mode
    shard, ranks, group = start.args
    decoded = _gather_messages(graph, start, wait, shard, format, ranks, group, full.dtype)  # type: ignore[arg-type]
    with graph.inserting_before(wait):
        options = {"dtype": full.dtype, "device": full.device, "pin_memory": False}
        buffer = nodes.add_call(graph, aten.empty.memory_format, (list(full.shape),), options, mode=mode)
        return nodes.add_call(graph, aten.copy_.default, (buffer, decoded), mode=mode)


def _gather_messages(
    graph: fx.Graph,
    start: fx.Node,
    wait: fx.Node,
    shard: fx.Node,
    format: str,
    ranks: int,
    group: str,
    dtype: torch.dtype,
) -> fx.Node:
    """Emit a gather of messages before `start`, and what decodes them before `wait`."""
    numel, mode = shard.meta["val"].numel(), start.meta["val"].fake_mode
    message = _inline(graph, start, lambda values: encode(values.view(1, -1), format, JOIN_BYTES).view(-1), shard)
    with graph.inserting_before(start):
        sent = nodes.add_call(graph, collectives.ALL_GATHER, (message, ranks, group), mode=mode, name=start.name)
    _copy_meta(sent, start)
    nodes.set_tag(sent, replace(nodes.tag_of(start), kind="gather"))
    with graph.inserting_before(wait):
        arrived = nodes.add_call(graph, collectives.WAIT, (sent,), mode=mode, name=wait.name)
    _copy_meta(arrived, wait)
    decoded = partial(_decode_rows, ranks=ranks, numel=numel, format=format, dtype=dtype)
    return _inline(graph, wait, decoded, arrived)


def _decode_rows(messages: Tensor, ranks: int, numel: int, format: str, dtype: torch.dtype) -> Tensor:
    return decode(messages.view(ranks, -1), numel, format, dtype).reshape(-1)


def _emit_reduce(graph: fx.Graph, start: fx.Node, wait: fx.Node) -> fx.Node:
    """Emit an all-to-all of messages, and the sum of what it brings; of an all-reduce also the gather behind it."""
    packed: Any
    op: Any
    tag, (packed, op, *_), ranks = nodes.tag_of(start), start.args, group_of(start).size()
    group: Any = start.args[collectives.GROUP_ARGUMENT[start.target]]  # type: ignore[index]  # of a collective
    value, mode = packed.meta["val"], start.meta["val"].fake_mode
    numel = -(-value.numel() // ranks)
    missing = numel * ranks - value.numel()

    def messages(values: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
        return encode(padded.view(ranks, numel), tag.wire, JOIN_BYTES).view(-1)

    message = _inline(graph, start, messages, packed)
    size = [message.meta["val"].numel() // ranks] * ranks
    with graph.inserting_before(start):
        sent = nodes.add_call(graph, collectives.ALL_TO_ALL, (message, size, size, group), mode=mode, name=start.name)
    _copy_meta(sent, start)
    with graph.inserting_before(wait):
        arrived = nodes.add_call(graph, collectives.WAIT, (sent,), mode=mode, name=wait.name)
    _copy_meta(arrived, wait)
    call_directly(sent)

    def total(received: Tensor) -> Tensor:
        return add_up_at_once(received.view(ranks, -1), numel, tag.wire, op, value.dtype)

    part = _inline(graph, wait, total, arrived)
    if start.target is collectives.REDUCE_SCATTER:
        return part
    full = _gather_messages(graph, wait, wait, part, tag.wire, ranks, group, value.dtype)
    return _inline(graph, wait, lambda values: values.narrow(0, 0, value.numel()).clone(), full)


@register_lowering(JOIN_BYTES, type_promotion_kind=None)
def _lower_join(parts: list[Any], dim: int) -> Any:
    """Emit a concatenation kernel: each part is computed where it belongs. Inductor's own calls a library for bytes."""
    rows, widths = parts[0].get_size()[0], [part.get_size()[1] for part in parts]
    size, device, dtype = [rows, sum(widths)], parts[0].get_device(), parts[0].get_dtype()
    strides = ir.FlexibleLayout.contiguous_strides(size)
    joined = ir.ConcatKernel(name=None, layout=ir.FixedLayout(device, dtype, size, strides), inputs=[])
    box, begin, written = ir.StorageBox(joined), 0, []
    for part, width in zip(parts, widths, strict=True):
        layout = ir.FixedLayout(device, dtype, [rows, width], strides, offset=begin)
        written.append(ir.ConcatKernel.realize_into(part, ir.ReinterpretView(data=box, layout=layout)))
        begin += width
    joined.name = V.graph.register_buffer(joined)
    joined.inputs = ir.ConcatKernel.unwrap_storage(written)
    V.graph.register_operation(joined)
    return ir.TensorBox(box)


def _copy_meta(node: fx.Node, replaced: fx.Node) -> None:
    node.meta = {**replaced.meta, "val": node.meta["val"]}


def _inline(graph: fx.Graph, before: fx.Node, function: Callable[[Tensor], Tensor], given: fx.Node) -> fx.Node:
    """Emit the operators of `function(given)` before `before`; return the node of its result."""
    value = given.meta["val"]
    with value.fake_mode:
        found = make_fx(function, select_decomp_table())(value).graph  # in the operators that Inductor lowers
    copies: dict[fx.Node, fx.Node] = {}
    for node in found.nodes:
        if node.op == "placeholder":
            copies[node] = given
        elif node.op == "output":
            return copies[node.args[0]]
        else:
            with graph.inserting_before(before):
                copies[node] = graph.node_copy(node, copies.__getitem__)
    raise AssertionError("a graph has an output")
