"""Gradient clipping: the norm over all ranks' parts of all gradients, and scaling by it.

    sharded parameters      p-th powers are summed, or maxima taken, over the group that a unit is sharded over
    all others              NO_SHARD units and ignored parameters are whole on every rank and count once

Copies under hybrid sharding are equal and not summed. One collective for each group, of two numbers; every rank takes
part, also one that holds no gradient.
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
        found = unit_of(param)
        if found is not None and param.grad is not None:
            unit, index = found
            if unit.flat_of(index).accumulated is not None:
                raise RuntimeError(
                    f"parameter {unit.names[index]}: expected a reduced gradient, found what this rank has summed up "
                    f"under no_sync; run a backward pass outside no_sync before clipping"
                )


def _grad_dtype(param: nn.Parameter) -> torch.dtype:
    """The dtype of the parameter's gradient, equal on all ranks: also where this rank stores no part of it."""
    found = unit_of(param)
    if found is None:
        return param.dtype if param.grad is None else param.grad.dtype
    unit, index = found
    return unit.flat_of(index).reduction.grad_dtype or param.dtype


def _total_norm(params: list[nn.Parameter], order: float) -> Tensor:
    """The norm over all ranks, a float64 scalar: sums of p-th powers may leave the range of narrower dtypes."""
    sharded: dict[str, tuple[Unit, list[Tensor]]] = {}  # by group, in the order in which all ranks meet them
    whole: list[Tensor] = []
    for param in params:
        found = unit_of(param)
        grads = whole
        if found is not None and found[0].is_sharded:
            grads = sharded.setdefault(found[0].group_name, (found[0], []))[1]
        if param.grad is not None and param.grad.numel():
            grads.append(param.grad.detach())
    device = next(iter(sharded.values()))[0].device if sharded else params[0].device
    totals = [_power(whole, order, device)]
    for group, (unit, grads) in sharded.items():
        totals.append(_over_ranks(_power(grads, order, unit.device), order, group))
    combined = torch.stack([total.to(device) for total in totals])  # [groups, 3]
    power, invalid, count = (combined.amax(0) if math.isinf(order) else combined.sum(0)).unbind()
    if not whole and not any(grads for _, grads in sharded.values()) and not count.item():
        warnings.warn(
            "clip_grad_norm_: expected gradients, found none on any rank; call it after backward and before zero_grad",
            UserWarning,
            stacklevel=4,
        )
    total = power if math.isinf(order) else power ** (1 / order)
    return torch.where(invalid > 0, torch.nan, total)


def _power(grads: list[Tensor], order: float, device: torch.device) -> Tensor:
    """What is reduced over ranks, `[3]`, float64.

    The norm of `grads` to the power `order` (infinity: the norm); whether it is NaN, as a maximum over ranks may lose
    that; whether there are gradients.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    found = []
    for (_, dtype), same in kinds.items():
        precise = torch.promote_types(dtype, torch.float32)  # a sum of squares in float16 ends at 65504
        norm = torch.linalg.vector_norm(torch.stack(norms(same, order, precise)), order)
        found.append(norm.to(device, torch.float64))
    if not found:
        return torch.zeros(3, dtype=torch.float64, device=device)
    total = torch.linalg.vector_norm(torch.stack(found), order)
    power = total if math.isinf(order) else total**order
    return torch.stack([power.nan_to_num(0.0, posinf=torch.inf), power.isnan().double(), torch.ones_like(power)])


def _over_ranks(power: Tensor, order: float, group: str) -> Tensor:
    collectives.start_all_reduce(power, group, "max" if math.isinf(order) else "sum")
    collectives.wait(power)
    return power
