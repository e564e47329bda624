"""Marker operators `fsdp_flat::*`: one node each in a traced graph, real bodies for eager execution.

    unshard(handle)       -> the full flat parameter                  forward, when traced
    views(full)           -> one full view per parameter              plain aten views, autograd included
    reduce_grads(packed)  -> this rank's slice of the mean            backward, the derivative of unshard
    pack_grads(grads)     -> one buffer laid out like the parameters  only in graphs: a pass puts it in place of the
                                                                      concatenation that autograd derives from `views`;
                                                                      Inductor may put it `into` a buffer that it names
    add_accumulated(packed) -> the sum of it and of the gradients     backward, before a reduce of a unit that no_sync
                               accumulated under no_sync              was ever in force for
    defer_reduce(packed)  -> a scalar that carries no values          backward, instead of a reduce: the eager runtime
                                                                      accumulates the gradients, or a hook reduces them
    cast_shard(shard)     -> it in another dtype, in one buffer       only in Inductor's graphs
    wait_all_gather(full, sent) -> `full`, filled by a collective     only in Inductor's graphs: `sent` lives so long
    check_ranks(sequence, groups) -> nothing, a tensor to order by    only in Inductor's graphs: ranks compare what they
                                                                      are about to run
    record_time(graph, ...)  -> the same                              only where a profile is recorded

Why operators and not an `autograd.Function`: a library operator with a registered derivative stays a single node
through Dynamo and AOTAutograd, and it does not switch off AOTAutograd's cache.

`add_accumulated` and `defer_reduce` have their real bodies in eager/graphs.py. They name a flat parameter by
`flat_param_id`, a tensor on the CPU: an input of the graph, so that equal units can share one. What is deferred is no
gradient of the flat shard in the graph, but of `deferred`, which connects the graph to it.

The layout travels as `FlatParamLayout.text`: one string constant, guarded once, the same on every rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from fsdp_compile.comm import collectives
from fsdp_compile.comm.averaging import averaging
from fsdp_compile.core.layout import FlatParamLayout

_TAGS = (torch.Tag.pt2_compliant_tag,)
_OPAQUE = (*_TAGS, torch.Tag.cudagraph_unsafe)  # a replay would not call them

torch.library.define(
    "fsdp_flat::unshard",
    "(Tensor handle, Tensor? number, Tensor? entry, str layout, str group, int group_size, "
    "bool? reshard_after_forward, str replicas='', ScalarType? compute_dtype=None, ScalarType? reduce_dtype=None, "
    "int replica_count=1, str neighbours='', int neighbour_count=1) -> Tensor",
    tags=_TAGS,
)
torch.library.define("fsdp_flat::views", "(Tensor(a) full, str layout) -> Tensor(a)[]", tags=_TAGS)
torch.library.define(
    "fsdp_flat::reduce_grads",
    "(Tensor packed, str layout, str group, int group_size, str replicas='', int replica_count=1, "
    "str neighbours='', int neighbour_count=1) -> Tensor",
    tags=_TAGS,
)
torch.library.define("fsdp_flat::pack_grads", "(Tensor?[] grads, str layout, Tensor? into=None) -> Tensor", tags=_TAGS)
torch.library.define(
    "fsdp_flat::add_accumulated", "(Tensor packed, Tensor number, bool in_place=False) -> Tensor", tags=_OPAQUE
)
torch.library.define("fsdp_flat::add_accumulated_", "(Tensor(a!) packed, Tensor number) -> ()", tags=_OPAQUE)
torch.library.define(
    "fsdp_flat::defer_reduce", "(Tensor packed, Tensor number, str layout, bool owned=False) -> Tensor", tags=_OPAQUE
)
torch.library.define("fsdp_flat::cast_shard", "(Tensor shard, ScalarType dtype) -> Tensor", tags=_TAGS)
torch.library.define("fsdp_flat::wait_all_gather", "(Tensor full, Tensor sent) -> Tensor", tags=_TAGS)
torch.library.define(
    "fsdp_flat::check_ranks", "(str sequence, str[] groups, float timeout, Device device) -> Tensor", tags=_TAGS
)
torch.library.define(
    "fsdp_flat::record_time", "(str graph, int stretch, int number, Device device) -> Tensor", tags=_OPAQUE
)

UNSHARD = torch.ops.fsdp_flat.unshard.default
VIEWS = torch.ops.fsdp_flat.views.default
REDUCE_GRADS = torch.ops.fsdp_flat.reduce_grads.default
PACK_GRADS = torch.ops.fsdp_flat.pack_grads.default
ADD_ACCUMULATED = torch.ops.fsdp_flat.add_accumulated.default
ADD_ACCUMULATED_ = torch.ops.fsdp_flat.add_accumulated_.default
DEFER_REDUCE = torch.ops.fsdp_flat.defer_reduce.default
CAST_SHARD = torch.ops.fsdp_flat.cast_shard.default
WAIT_ALL_GATHER = torch.ops.fsdp_flat.wait_all_gather.default
CHECK_RANKS = has_side_effect(torch.ops.fsdp_flat.check_ranks.default)
RECORD_TIME = has_side_effect(torch.ops.fsdp_flat.record_time.default)
MARKERS = (UNSHARD, REDUCE_GRADS, PACK_GRADS, DEFER_REDUCE)


def alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own: no autograd history, no shared version counter."""
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def view_parameters(full: Tensor, layout: str) -> list[Tensor]:
    """Views of `full`, 1-D `[layout.numel]`, in the parameters' shapes, cut by a single split.

    The split's derivative concatenates the gradients, zeros for padding and for unused parameters: it packs them.
    """
    parsed = FlatParamLayout.parse(layout)
    runs = full.split_with_sizes([segment.numel for segment in parsed.segments])
    views = [full.new_empty(shape) for shape in parsed.shapes] if 0 in parsed.numels else [full] * len(parsed.shapes)
    for run, segment in zip(runs, parsed.segments, strict=True):
        if segment.parameter is not None:
            views[segment.parameter] = run.view(parsed.shapes[segment.parameter])
    return views


torch.library.impl("fsdp_flat::views", "CompositeImplicitAutograd", view_parameters)


@torch.library.impl("fsdp_flat::unshard", "default")
def _unshard(
    handle: Tensor,
    number: Tensor | None,
    entry: Tensor | None,
    layout: str,
    group: str,
    group_size: int,
    reshard_after_forward: bool | None,
    replicas: str = "",
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    replica_count: int = 1,
    neighbours: str = "",
    neighbour_count: int = 1,
) -> Tensor:
    shard = handle if compute_dtype is None else handle.to(compute_dtype)
    if FlatParamLayout.parse(layout).world_size > 1:
        part = collectives.all_gather(shard, group_size, group)
        return collectives.all_gather(part, neighbour_count, neighbours) if neighbours else part
    return handle.clone() if shard is handle else shard  # an operator may not return its input; a pass drops the copy


@torch.library.register_fake("fsdp_flat::unshard")
def _unshard_fake(
    handle: Tensor,
    number: Tensor | None,
    entry: Tensor | None,
    layout: str,
    group: str,
    group_size: int,
    reshard_after_forward: bool | None,
    replicas: str = "",
    compute_dtype: torch.dtype | None = None,
    *_: Any,
) -> Tensor:
    return handle.new_empty(FlatParamLayout.parse(layout).numel, dtype=compute_dtype or handle.dtype)


def _save_layout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    handle, number, entry, *where, _, replicas, compute_dtype, reduce_dtype, copies, neighbours, count = inputs
    ctx.save_for_backward(*([] if number is None else [number]))
    ctx.hands_over = entry is not None
    said = (*where, replicas, copies, neighbours, count)
    ctx.where = said if neighbours else said[: 5 if replicas else 3]
    ctx.compute_dtype, ctx.dtype = compute_dtype or handle.dtype, handle.dtype
    ctx.reduce_dtype = reduce_dtype or ctx.compute_dtype


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    packed = grad if ctx.reduce_dtype == ctx.compute_dtype else grad.to(ctx.reduce_dtype)
    if ctx.hands_over:
        return None, None, DEFER_REDUCE(packed, *ctx.saved_tensors, ctx.where[0]), *[None] * 10
    if ctx.saved_tensors:
        packed = ADD_ACCUMULATED(packed, *ctx.saved_tensors)
    mean = REDUCE_GRADS(packed, *ctx.where)
    return mean if ctx.reduce_dtype == ctx.dtype else mean.to(ctx.dtype), *[None] * 12


torch.library.register_autograd("fsdp_flat::unshard", _unshard_backward, setup_context=_save_layout)


@torch.library.impl("fsdp_flat::reduce_grads", "default")
def _reduce_grads(
    packed: Tensor,
    layout: str,
    group: str,
    group_size: int,
    replicas: str = "",
    replica_count: int = 1,
    neighbours: str = "",
    neighbour_count: int = 1,
) -> Tensor:
    how = averaging(packed.dtype, group_size * neighbour_count * replica_count)
    addends = packed / how.before if how.before > 1 else packed
    if FlatParamLayout.parse(layout).world_size > 1:
        if neighbours:
            addends = collectives.reduce_scatter(addends, neighbour_count, neighbours, how.op)
        reduced = collectives.reduce_scatter(addends, group_size, group, how.op)
    elif group_size > 1:
        reduced = collectives.all_reduce(addends, group, how.op)
    else:
        return packed.clone()  # an operator may not return its input
    if replicas:
        reduced = collectives.all_reduce(reduced, replicas, how.op)
    return reduced.div_(how.after) if how.after > 1 else reduced


@torch.library.register_fake("fsdp_flat::reduce_grads")
def _reduce_grads_fake(packed: Tensor, layout: str, *_: Any) -> Tensor:
    return packed.new_empty(FlatParamLayout.parse(layout).shard_numel)


@torch.library.impl("fsdp_flat::pack_grads", "default")
def _pack_grads(grads: list[Tensor | None], layout: str, into: Tensor | None = None) -> Tensor:
    parsed = FlatParamLayout.parse(layout)
    packed = _first(grads).new_empty(parsed.numel)
    for segment in parsed.segments:
        window = packed.narrow(0, segment.offset, segment.numel)
        grad = None if segment.parameter is None else grads[segment.parameter]
        if grad is None:
            window.zero_()  # padding and unused parameters: what is sent must be finite
        else:
            window.view(grad.shape).copy_(grad)
    return packed


@torch.library.register_fake("fsdp_flat::pack_grads")
def _pack_grads_fake(grads: list[Tensor | None], layout: str, into: Tensor | None = None) -> Tensor:
    return _first(grads).new_empty(FlatParamLayout.parse(layout).numel)


@torch.library.register_fake("fsdp_flat::add_accumulated")
def _add_accumulated_fake(packed: Tensor, number: Tensor, in_place: bool = False) -> Tensor:
    return torch.empty_like(packed)


@torch.library.register_fake("fsdp_flat::add_accumulated_")
def _add_accumulated_in_place_fake(packed: Tensor, number: Tensor) -> None:
    return None


@torch.library.register_fake("fsdp_flat::defer_reduce")
def _defer_reduce_fake(packed: Tensor, number: Tensor, layout: str, owned: bool = False) -> Tensor:
    return packed.new_empty((), dtype=torch.float32)


@torch.library.register_fake("fsdp_flat::cast_shard")
def _cast_shard_fake(shard: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(shard, dtype=dtype)


@torch.library.register_fake("fsdp_flat::wait_all_gather")
def _wait_all_gather_fake(full: Tensor, sent: Tensor) -> Tensor:
    return torch.empty_like(full)


@torch.library.register_fake("fsdp_flat::check_ranks")
def _check_ranks_fake(sequence: str, groups: list[str], timeout: float, device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


@torch.library.register_fake("fsdp_flat::record_time")
def _record_time_fake(graph: str, stretch: int, number: int, device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def _first(grads: list[Tensor | None]) -> Tensor:
    return next(grad for grad in grads if grad is not None)
