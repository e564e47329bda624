"""Marker operators `fsdp_flat::*`: one node each in a traced graph, real bodies for eager execution.

    unshard(handle)           -> one full view per parameter        forward
    pack_grads(gradients)     -> one flat buffer laid out like the parameters    backward, the derivative of unshard ...
    reduce_grads(flat buffer) -> this rank's slice of the mean      ... in two steps

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
    "(Tensor handle, str layout, str group, int group_size, bool reshard_after_forward) -> Tensor[]",
    tags=_TAGS,
)
torch.library.define("fsdp_flat::pack_grads", "(Tensor?[] grads, str layout) -> Tensor", tags=_TAGS)
torch.library.define(
    "fsdp_flat::reduce_grads", "(Tensor packed, str layout, str group, int group_size) -> Tensor", tags=_TAGS
)

UNSHARD = torch.ops.fsdp_flat.unshard.default
PACK_GRADS = torch.ops.fsdp_flat.pack_grads.default
REDUCE_GRADS = torch.ops.fsdp_flat.reduce_grads.default
MARKERS = (UNSHARD, PACK_GRADS, REDUCE_GRADS)


def alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own: no autograd history, no shared version counter."""
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def view_parameters(full: Tensor, layout: FlatParamLayout) -> list[Tensor]:
    """Views of `full`, 1-D `[layout.numel]`, in the parameters' shapes."""
    return [
        full.narrow(0, offset, numel).view(shape)
        for shape, offset, numel in zip(layout.shapes, layout.offsets, layout.numels, strict=True)
    ]


@torch.library.impl("fsdp_flat::unshard", "default")
def _unshard(handle: Tensor, layout: str, group: str, group_size: int, reshard_after_forward: bool) -> list[Tensor]:
    parsed = FlatParamLayout.parse(layout)
    sharded = parsed.world_size > 1
    full = collectives.all_gather(handle, group_size, group) if sharded else alias(handle)
    return view_parameters(full, parsed)


@torch.library.register_fake("fsdp_flat::unshard")
def _unshard_fake(
    handle: Tensor, layout: str, group: str, group_size: int, reshard_after_forward: bool
) -> list[Tensor]:
    return [handle.new_empty(shape) for shape in FlatParamLayout.parse(layout).shapes]


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


@torch.library.impl("fsdp_flat::reduce_grads", "default")
def _reduce_grads(packed: Tensor, layout: str, group: str, group_size: int) -> Tensor:
    if FlatParamLayout.parse(layout).world_size > 1:
        return collectives.reduce_scatter(packed, group_size, group)
    return collectives.all_reduce(packed, group) if group_size > 1 else packed.clone()


@torch.library.register_fake("fsdp_flat::reduce_grads")
def _reduce_grads_fake(packed: Tensor, layout: str, group: str, group_size: int) -> Tensor:
    return packed.new_empty(FlatParamLayout.parse(layout).shard_numel)


def _save_layout(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, ctx.layout, ctx.group, ctx.group_size, _ = inputs
    ctx.set_materialize_grads(False)  # an unused parameter's gradient arrives as None, not as a tensor of zeros


def _unshard_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    packed = PACK_GRADS(grads, ctx.layout)
    return REDUCE_GRADS(packed, ctx.layout, ctx.group, ctx.group_size), None, None, None, None


torch.library.register_autograd("fsdp_flat::unshard", _unshard_backward, setup_context=_save_layout)
