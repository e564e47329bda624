"""Norms of tensors of which each rank stores a part: of each tensor, and of gradients together.

A rank adds up powers of the magnitudes of what it stores, one all-reduce adds up those of the ranks, and the norm is a
root of that. Of infinite order it is the largest magnitude on any rank, or the smallest; of order 0 a count.

    root(powers([a.local, b.local], spec, order=2.0, ...), 2.0)     the norms of a and b
    gradient_norm(params)                                           of all their gradients together, to clip by it
"""

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.core._torch import norms
from fsdp_compile.core.exact_sums import exact_sums, powers_of_norm
from fsdp_compile.tensors.shard_spec import ShardSpec
from fsdp_compile.tensors.sharded_rules import plain
from fsdp_compile.tensors.sharded_tensor import FlatGradient, ShardedTensor, gradients

_SPECS, _TENSOR_PARALLEL = map(operator.attrgetter, ("specs", "tensor_parallel"))


def power(norm: Tensor, order: float) -> Tensor:
    """What is added up for a norm of `order`."""
    return norm if math.isinf(order) or order == 0 else norm**order


def root(total: Tensor, order: float) -> Tensor:
    """The norm, whose powers add up to `total`."""
    return total if math.isinf(order) or order == 0 else total ** (1 / order)


def combined(order: float) -> tuple[str, float]:
    """How powers of several ranks are combined, "sum", "max" or "min"; and those of nothing."""
    if math.isinf(order):
        return ("max", 0.0) if order > 0 else ("min", math.inf)
    return "sum", 0.0 if order >= 0 else math.inf


def powers(
    stored: Sequence[Tensor | None],
    spec: ShardSpec | None,
    order: float,
    dtype: torch.dtype,
    device: torch.device,
    together: bool = False,
) -> Tensor:
    """The powers over all ranks that norms of `order` are roots of, in `dtype`; in float64 where sums are exact.

    Args:
        stored: what this rank stores of each tensor, all of one dtype; None: nothing.
        spec: how one of them is sharded, and all over the same ranks; None: every rank has all of them.
        together: whether all tensors are one.

    Returns:
        Those of each tensor, `[len(stored)]`; `together`, of all of them, `()`.
    """
    op, neutral = combined(order)
    parts = [each for each in stored if each is not None]
    if spec is not None and spec.ranks.same_bits and op == "sum" and order >= 0:
        sets = [parts] if together else [[] if each is None else [each] for each in stored]
        sums = exact_sums(sets, functools.partial(powers_of_norm, order=order), device, spec.all_reduce)
        return sums[0] if together else sums
    found = iter(norms(parts, order, dtype) if parts else ())
    none = torch.full((), neutral, dtype=dtype, device=device)
    of_each = power(torch.stack([none if each is None else next(found) for each in stored] or [none]), order)
    if together:
        of_each = of_each.sum() if op == "sum" else of_each.amax() if op == "max" else of_each.amin()
    return of_each if spec is None else spec.all_reduce(of_each, op)


# Note [Where the norm is computed]
# Clipping needs the norm of all gradients before it changes the first one, so no update can begin before the last
# reduce has ended. At the end the norm costs one read of each gradient shard, in one kernel on a GPU, which takes less
# than the all-reduce that follows. In the backward graph the sums of squares would be further outputs, also for loops
# that do not clip.
#
# Each rank sees for itself which gradients lie side by side in a flat shard. What it sends does not depend on that: one
# number for each group of ranks, device and dtype, in the order of their names.


def gradient_norm(
    params: Iterable[nn.Parameter], whole: Sequence[tuple[Tensor, ShardSpec]] = (), order: float = 2.0
) -> Tensor:
    """The norm of the gradients of all `params` together, over all ranks; equal on all of them, with shape `()`.

    Equals `torch.nn.utils.get_total_norm` up to rounding, in float32 or wider, as it sums over flat shards, whose
    padding is zero. Takes one all-reduce for each group of ranks, device and dtype, two where sums are exact; the host
    does not wait.

    Args:
        params: those that are clipped.
        whole: parts of flat shards' gradients, 1-D, of other parameters, and how one of these is sharded.
        order: above 0, or infinity.
    """
    grads = gradients(params)
    flats = FlatGradient.all_of([grad for grad in grads if type(grad) is ShardedTensor])
    if any(map(_TENSOR_PARALLEL, chain.from_iterable(map(_SPECS, flats)))):
        flats = []  # its parameters are reduced over groups of their own
    found: list[tuple[Tensor, ShardSpec | None]] = [*whole, *((flat.grad, flat.specs[0]) for flat in flats)]
    for grad in grads:
        if type(grad) is not ShardedTensor:
            found.append((plain(grad), None))
        elif not flats:
            found.append((grad.local, grad.spec))
    groups: dict[Any, tuple[ShardSpec | None, list[Tensor | None]]] = {}
    for tensor, spec in found:
        key = (spec and spec.reducing_groups, str(tensor.device), tensor.dtype)
        groups.setdefault(key, (spec, []))[1].append(tensor if tensor.numel() else None)
    totals: list[Tensor] = []
    for key in sorted(groups, key=str):
        (spec, stored), (_, device, dtype) = groups[key], key
        wide = torch.promote_types(dtype, torch.float32)
        totals.append(powers(stored, spec, order, wide, torch.device(device), together=True).to(wide))
    if not totals:
        return torch.zeros(())
    widest = functools.reduce(torch.promote_types, {total.dtype for total in totals})
    joined = torch.stack([total.to(totals[0].device, widest) for total in totals])
    return root(joined.amax() if math.isinf(order) else joined.sum(), order)
