"""The differentiable step from a unit's shards to full views, and back from gradients to a reduce."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdp_compile.eager.reduce import reduce_gradients
from fsdp_compile.flat_param import FlatParam


class FullViews(torch.autograd.Function):
    """The full views of the flat parameters that train; backward frees them, packs their gradients and reduces them.

    Note on lifetime: the views own this node, so it must not own the `Gathered` that owns the views.
    """

    @staticmethod
    def forward(ctx: Any, gathered: Any, flats: list[FlatParam], *handles: Tensor) -> tuple[Tensor, ...]:
        """The views of all parameters of `flats`, full shapes; `handles` are those of `flats`."""
        ctx.set_materialize_grads(False)
        ctx.unit, ctx.flats, ctx.gathered = gathered.unit, flats, weakref.ref(gathered)
        ctx.streams, ctx.full_precision = gathered.streams, gathered.full_precision
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
        gathered = ctx.gathered()
        if gathered is not None:
            gathered.gradients_ready()
        return (None, None, *reduce_gradients(ctx.unit, ctx.flats, grads, ctx.streams, ctx.full_precision))
