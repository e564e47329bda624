"""Gradient clipping: the norm over the shards of all gradients, and scaling by it.

    sharded parameters      p-th powers are summed, or maxima taken, over the group that a unit is sharded over
    all others              NO_SHARD units and ignored parameters are the same on every rank and count once

Replicas under hybrid sharding are equal and not summed. There is one collective for each group, of three numbers; every
rank takes part, also one that has no gradient.
"""

import math
import warnings
from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.comm import collectives
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.eager._torch import norms


def clip_grad_norm(module: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    """Scale the gradients below `module` so that their norm over all ranks is at most `max_norm`; the norm before."""
    order = _checked_order(norm_type)
    params = list(module.parameters())  # each once, however often it is used
    _check_reduced(params)
    total = _total_norm(params, order)
    widest = reduce(torch.promote_types, map(_grad_dtype, params))
    scale_dtype = torch.promote_types(widest, torch.float32)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total.to(scale_dtype))
    return total.to(widest)


def _checked_order(norm_type: float) -> float:
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type: expected a number above 0 or 'inf', found {norm_type!r}; pass 2.0 or 'inf'")
    return order


def _check_reduced(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        managed = unit_of(param)
        if managed is not None and param.grad is not None:
            unit, index = managed
            if unit.flat_of(index).accumulated is not None:
                raise RuntimeError(
                    f"parameter {unit.names[index]}: expected a reduced gradient, found what this rank has summed up "
                    f"under no_sync; run a backward pass outside no_sync before clipping"
                )


def _grad_dtype(param: nn.Parameter) -> torch.dtype:
    """The dtype of the parameter's gradient, equal on all ranks: also where this rank stores no part of it."""
    managed = unit_of(param)
    if managed is None:
        return param.dtype if param.grad is None else param.grad.dtype
    unit, index = managed
    return unit.flat_of(index).reduction.grad_dtype or param.dtype


def _total_norm(params: list[nn.Parameter], order: float) -> Tensor:
    """The norm over all ranks, a float64 scalar: sums of p-th powers may leave the range of narrower dtypes."""
    sharded: dict[str, tuple[Unit, list[Tensor]]] = {}  # by group, in the order in which all ranks meet them
    unsharded: list[Tensor] = []
    for param in params:
        managed = unit_of(param)
        grads = unsharded
        if managed is not None and managed[0].is_sharded:
            grads = sharded.setdefault(managed[0].group_name, (managed[0], []))[1]
        if param.grad is not None and param.grad.numel():
            grads.append(param.grad.detach())
    device = next(iter(sharded.values()))[0].device if sharded else params[0].device
    totals = [_power(unsharded, order, device)]
    for group, (unit, grads) in sharded.items():
        totals.append(_over_ranks(_power(grads, order, unit.device), order, group))
    combined = torch.stack([total.to(device) for total in totals])  # [groups, 3]
    power, invalid, count = (combined.amax(0) if math.isinf(order) else combined.sum(0)).unbind()
    if not unsharded and not any(grads for _, grads in sharded.values()) and not count.item():
        warnings.warn(
            "clip_grad_norm_: expected gradients, found none on any rank; call it after backward and before zero_grad",
            UserWarning,
            stacklevel=4,
        )
    total = power if math.isinf(order) else power ** (1 / order)
    return torch.where(invalid > 0, torch.nan, total)


def _power(grads: list[Tensor], order: float, device: torch.device) -> Tensor:
    """Three numbers that are reduced over ranks, `[3]`, float64.

    They are the norm of `grads` to the power `order` (for infinity, the norm); whether it is NaN, as a maximum over
    ranks may lose that; and whether there are gradients.
    """
    by_kind: dict[Any, list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    of_kinds = []
    for (_, dtype), same in by_kind.items():
        precise = torch.promote_types(dtype, torch.float32)  # a sum of squares in float16 ends at 65504
        norm = torch.linalg.vector_norm(torch.stack(norms(same, order, precise)), order)
        of_kinds.append(norm.to(device, torch.float64))
    if not of_kinds:
        return torch.zeros(3, dtype=torch.float64, device=device)
    total = torch.linalg.vector_norm(torch.stack(of_kinds), order)
    power = total if math.isinf(order) else total**order
    return torch.stack([power.nan_to_num(0.0, posinf=torch.inf), power.isnan().double(), torch.ones_like(power)])


def _over_ranks(power: Tensor, order: float, group: str) -> Tensor:
    collectives.start_all_reduce(power, group, "max" if math.isinf(order) else "sum")
    collectives.wait(power)
    return power
