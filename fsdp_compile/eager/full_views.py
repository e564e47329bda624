"""The differentiable step from a unit's shards to full views, and back from gradients to a reduce."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.ops import alias
from fsdp_compile.eager.reduce import reduce_gradients, reduce_packed


class UnshardParams(torch.autograd.Function):
    """The full views of the flat parameters that train; backward frees them, packs their gradients and reduces them.

    Note on lifetime: the views own this node, so it must not own the `UnshardedUnit` that owns the views.
    """

    @staticmethod
    def forward(ctx: Any, gathered: Any, flats: list[FlatParam], *handles: Tensor) -> tuple[Tensor, ...]:
        """The views of all parameters of `flats`, full shapes; `handles` are those of `flats`."""
        _note(ctx, gathered, flats)
        views, frozen = [], []
        for buffer in gathered.buffers:
            if buffer.flat in flats:
                found = buffer.views()
                views += found
                frozen += [found[index] for index in buffer.flat.frozen]
        ctx.mark_non_differentiable(*frozen)
        return tuple(views)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # one per parameter, full shape
        """The gradients of the handles, 1-D `[shard_numel]`, being reduced."""
        _end(ctx)
        return (None, None, *reduce_gradients(ctx.unit, ctx.flats, grads, ctx.streams, ctx.full_precision))


class UnshardFlats(torch.autograd.Function):
    """The same without cutting: a compiled graph cuts the views and packs their gradients."""

    @staticmethod
    def forward(ctx: Any, gathered: Any, flats: list[FlatParam], *handles: Tensor) -> tuple[Tensor, ...]:
        """The flat parameters of `flats`, `[layout.numel]` each."""
        _note(ctx, gathered, flats)
        return tuple(alias(buffer.full) for buffer in gathered.buffers if buffer.flat in flats)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *packed: Tensor | None) -> tuple[Any, ...]:  # [layout.numel] each
        """The gradients of the handles, 1-D `[shard_numel]`, being reduced."""
        _end(ctx)
        return (None, None, *reduce_packed(ctx.unit, ctx.flats, packed, ctx.streams, ctx.full_precision))


def _note(ctx: Any, gathered: Any, flats: list[FlatParam]) -> None:
    ctx.set_materialize_grads(False)
    ctx.unit, ctx.flats, ctx.gathered = gathered.unit, flats, weakref.ref(gathered)
    ctx.streams, ctx.full_precision = gathered.streams, gathered.full_precision


def _end(ctx: Any) -> None:
    gathered = ctx.gathered()
    if gathered is not None:
        gathered.gradients_ready()
