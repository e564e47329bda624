"""Marker operators `fsdp_flat::*`: one node each in a traced graph, real bodies for eager execution.

    unshard(handle)       -> the full flat parameter                  forward, when traced
    views(full)           -> one full view per parameter              plain aten views, autograd included
    reduce_grads(packed)  -> this rank's slice of the mean            backward, the derivative of unshard
    pack_grads(grads)     -> one buffer laid out like the parameters  only in graphs: a pass puts it in place of the
                                                                      concatenation that autograd derives from `views`

Why operators and not an `autograd.Function`: a library operator with a registered derivative stays a single node
through Dynamo and AOTAutograd, and it does not switch off AOTAutograd's cache.

The layout travels as `FlatParamLayout.text`: one string constant, guarded once, the same on every rank.
"""

from typing import Any

import torch
from torch import Tensor

from fsdp_compile import collectives
from fsdp_compile.layout import FlatParamLayout

_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define(
    "fsdp_flat::unshard",
    "(Tensor handle, str layout, str group, int group_size, bool reshard_after_forward, str replicas='', "
    "ScalarType? reduce_dtype=None) -> Tensor",
    tags=_TAGS,
)
torch.library.define("fsdp_flat::views", "(Tensor(a) full, str layout) -> Tensor(a)[]", tags=_TAGS)
torch.library.define(
    "fsdp_flat::reduce_grads",
    "(Tensor packed, str layout, str group, int group_size, str replicas='') -> Tensor",
    tags=_TAGS,
)
torch.library.define("fsdp_flat::pack_grads", "(Tensor?[] grads, str layout) -> Tensor", tags=_TAGS)

UNSHARD = torch.ops.fsdp_flat.unshard.default
VIEWS = torch.ops.fsdp_flat.views.default
REDUCE_GRADS = torch.ops.fsdp_flat.reduce_grads.default
PACK_GRADS = torch.ops.fsdp_flat.pack_grads.default
MARKERS = (UNSHARD, REDUCE_GRADS, PACK_GRADS)


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
def _unshard(handle: Tensor, layout: str, group: str, group_size: int, *_: Any) -> Tensor:
    if FlatParamLayout.parse(layout).world_size > 1:
        return collectives.all_gather(handle, group_size, group)
    return handle.clone()  # an operator may not return its input; compiled code drops the copy


@torch.library.register_fake("fsdp_flat::unshard")
def _unshard_fake(handle: Tensor, layout: str, *_: Any) -> Tensor:
    return handle.new_empty(FlatParamLayout.parse(layout).numel)


def _save_layout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    handle, *where, _, replicas, ctx.reduce_dtype = inputs
    ctx.where = (*where, replicas) if replicas else tuple(where)
    ctx.dtype = handle.dtype


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.reduce_dtype is None:
        return REDUCE_GRADS(grad, *ctx.where), *[None] * 6
    return REDUCE_GRADS(grad.to(ctx.reduce_dtype), *ctx.where).to(ctx.dtype), *[None] * 6


torch.library.register_autograd("fsdp_flat::unshard", _unshard_backward, setup_context=_save_layout)


@torch.library.impl("fsdp_flat::reduce_grads", "default")
def _reduce_grads(packed: Tensor, layout: str, group: str, group_size: int, replicas: str = "") -> Tensor:
    if FlatParamLayout.parse(layout).world_size > 1:
        mean = collectives.reduce_scatter(packed, group_size, group)
        return collectives.all_reduce(mean, replicas) if replicas else mean
    return collectives.all_reduce(packed, group) if group_size > 1 else packed.clone()


@torch.library.register_fake("fsdp_flat::reduce_grads")
def _reduce_grads_fake(packed: Tensor, layout: str, group: str, group_size: int, replicas: str = "") -> Tensor:
    return packed.new_empty(FlatParamLayout.parse(layout).shard_numel)


@torch.library.impl("fsdp_flat::pack_grads", "default")
def _pack_grads(grads: list[Tensor | None], layout: str) -> Tensor:
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
def _pack_grads_fake(grads: list[Tensor | None], layout: str) -> Tensor:
    return _first(grads).new_empty(FlatParamLayout.parse(layout).numel)


def _first(grads: list[Tensor | None]) -> Tensor:
    return next(grad for grad in grads if grad is not None)
