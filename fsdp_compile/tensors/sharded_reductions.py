"""Rules of operators that reduce sharded tensors, or compare them; norms of gradients.

Each rank reduces the rows of which it stores some elements, then one all-reduce combines the ranks. A reduction has a
neutral element, which stands for what other ranks store, and an operation that combines the ranks. Its result is plain
and equal on all ranks:

    sum, mean      0       sum        any     0     max
    amax, max      -inf    max        all     1     min
    amin, min      inf     min        norm    0     sum of powers; of infinite order max

A norm is a root of powers, whose sum over the ranks is that of magnitudes; of order 0 it is a count, below 0 gathered.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.core._torch import norms, without_torch_function
from fsdp_compile.core.exact_sums import exact_sums, powers_of_norm
from fsdp_compile.tensors.shard_spec import ShardSpec
from fsdp_compile.tensors.sharded_rules import average_gradients, gather, is_sharded, operand, plain
from fsdp_compile.tensors.sharded_tensor import RULES, FlatGradient, Rule, ShardedTensor, bump_version, gradients

aten = torch.ops.aten

_tensor_parallel_of, _dtype_of, _requires_grad = map(attrgetter, ("spec.tensor_parallel", "dtype", "requires_grad"))
_SPECS, _TENSOR_PARALLEL = map(attrgetter, ("specs", "tensor_parallel"))

Reduction = Callable[[Tensor, list[int], bool], Tensor]  # of a plain tensor, over dims, with keepdim


def _of_sharded(rule: Rule) -> Rule:
    """Apply `rule` if the first operand is a sharded tensor; otherwise gather."""

    def of_any(func: Any, args: Any, kwargs: Any) -> Any:
        if not is_sharded(args[0]):
            return gather(func, args, kwargs)
        average_gradients(args)
        return rule(func, args, kwargs)

    return of_any


def _reduce_over_ranks(x: ShardedTensor, dims: Any, keepdim: bool, fill: Any, op: str, reduce: Reduction) -> Tensor:
    """Reduce over all ranks, plain. `fill` is the neutral element of `reduce`, `op` combines the ranks."""
    spec, ndim = x.spec, x.dim()
    if _is_total(x, dims):
        total = spec.all_reduce(reduce(x.local if spec.numel else x.local.new_full((1,), fill), [0], False), op)
        return total.view([1] * ndim) if keepdim else total
    dims = sorted({dim % ndim for dim in dims})
    is_exact = spec.ranks.same_bits and op == "sum" and x.dtype.is_floating_point
    if is_exact or spec.tensor_parallel is not None:
        return reduce(x.elements(), dims, keepdim)
    low, high = spec.rows
    neutral = reduce(x.local.new_full((1, *x.shape[1:]), fill), dims, True)
    mine = here = reduce(spec.rows_of(x.local, fill), dims, True) if high > low else neutral
    if 0 not in dims:
        mine = neutral.expand(x.shape[0], *neutral.shape[1:]).clone()
        mine[low:high] = here[: high - low]
    total = spec.all_reduce(mine.contiguous(), op)
    return total if keepdim else total.squeeze(dims)


def _is_total(x: ShardedTensor, dims: Any) -> bool:
    return not x.dim() or not dims or len({dim % x.dim() for dim in dims}) == x.dim()


def _dims_and_keepdim(args: Any, kwargs: Any, at: int = 1) -> tuple[Any, bool]:
    dims = args[at] if len(args) > at else kwargs.get("dim")
    keepdim = args[at + 1] if len(args) > at + 1 else kwargs.get("keepdim", False)
    return ([dims] if isinstance(dims, int) else dims), keepdim


# --- sums and extremes ------------------------------------------------------------------------------------------------


def _sum(func: Any, args: Any, kwargs: Any) -> Any:
    """Half-precision sums too are rounded once, as on one process."""
    x = args[0]
    wanted = kwargs.get("dtype") or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
    precise = torch.promote_types(wanted, torch.float32) if wanted.is_floating_point else wanted
    dims, keepdim = _dims_and_keepdim(args, kwargs)
    if x.spec.ranks.same_bits and x.dtype.is_floating_point and wanted.is_floating_point and _is_total(x, dims):
        [total] = exact_sums([[x.local]], lambda values: values, x.device, x.spec.all_reduce)
        return total.to(wanted).view([1] * x.dim() if keepdim else [])
    total = _reduce_over_ranks(x, dims, keepdim, 0, "sum", lambda x, dims, keep: x.sum(dims, keep, dtype=precise))
    return total.to(wanted)


def _mean(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    wanted = kwargs.get("dtype") or x.dtype
    if not wanted.is_floating_point:
        return gather(func, args, kwargs)
    total = _sum(func, args, {**kwargs, "dtype": torch.promote_types(wanted, torch.float32)})
    return total.div_(x.numel() / total.numel() if total.numel() else 1).to(wanted)


def _extreme(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if not x.numel():
        return gather(func, args, kwargs)
    is_max = func.overloadpacket in (aten.amax, aten.max)
    op, reduce = ("max", torch.amax) if is_max else ("min", torch.amin)
    least, most = (0, 1) if x.dtype is torch.bool else (-math.inf, math.inf)
    if not (x.dtype.is_floating_point or x.dtype is torch.bool):
        least, most = torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max
    return _reduce_over_ranks(x, *_dims_and_keepdim(args, kwargs), least if is_max else most, op, reduce)


def _any_or_all(func: Any, args: Any, kwargs: Any) -> Any:
    truth = ShardedTensor((args[0].local != 0).to(torch.uint8), args[0].spec)
    fill, op, reduce = (0, "max", torch.amax) if func.overloadpacket is aten.any else (1, "min", torch.amin)
    return _reduce_over_ranks(truth, *_dims_and_keepdim(args, kwargs), fill, op, reduce).bool()


# --- norms ------------------------------------------------------------------------------------------------------------


def _power(norm: Tensor, order: float) -> Tensor:
    """What is added up for a norm of `order`."""
    return norm if math.isinf(order) or order == 0 else norm**order


def _root(total: Tensor, order: float) -> Tensor:
    """The norm, whose powers add up to `total`."""
    return total if math.isinf(order) or order == 0 else total ** (1 / order)


def _powers(
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
    op = "max" if math.isinf(order) else "sum"
    parts = [each for each in stored if each is not None]
    if spec is not None and spec.ranks.same_bits and op == "sum":
        sets = [parts] if together else [[] if each is None else [each] for each in stored]
        sums = exact_sums(sets, functools.partial(powers_of_norm, order=order), device, spec.all_reduce)
        return sums[0] if together else sums
    found = iter(norms(parts, order, dtype) if parts else ())
    none = torch.zeros((), dtype=dtype, device=device)
    of_each = _power(torch.stack([none if each is None else next(found) for each in stored] or [none]), order)
    if together:
        of_each = of_each.sum() if op == "sum" else of_each.amax()
    return of_each if spec is None else spec.all_reduce(of_each, op)


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    x, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if (order := float(2 if order is None else order)) < 0:
        return gather(func, args, kwargs)
    [norm] = _norms([x], order, *_dims_and_keepdim(args, kwargs, 2))
    return norm.to(kwargs.get("dtype") or x.dtype)


def _foreach_norm(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """One all-reduce for each group of ranks and device, however many tensors there are."""
    tensors, order = args[0], float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    with without_torch_function():
        if any(map(_requires_grad, tensors)):
            average_gradients(tensors)
        kinds = {(flat.specs[0].ranks.group, flat.grad.device, flat.grad.dtype) for flat in FlatGradient.of(tensors)}
        if len(kinds) == 1 and order >= 0 and not any(map(_tensor_parallel_of, tensors)):  # the work for each runs in C
            return list(_norms(tensors, order).to(dtype or tensors[0].dtype).unbind())
    found: list[Any] = [None] * len(tensors)
    groups: dict[Any, list[int]] = {}
    for i, each in enumerate(tensors):
        is_split = is_sharded(each) and order >= 0
        groups.setdefault((each.spec.reducing_groups, each.device) if is_split else None, []).append(i)
    for group, chosen in groups.items():
        alike = [tensors[i] for i in chosen]
        of_group = _norms(alike, order) if group else aten._foreach_norm.Scalar([*map(plain, alike)], order, dtype)
        for i, norm in zip(chosen, of_group, strict=True):
            found[i] = norm.to(dtype or tensors[i].dtype)
    return found


def _norms(tensors: Sequence[ShardedTensor], order: float, dims: Any = None, keepdim: bool = False) -> Tensor:
    """Norms of an order from 0 on of sharded tensors of one group, `[len(tensors), ...]`, in at least float32."""
    first = tensors[0]
    precise = functools.reduce(torch.promote_types, set(map(_dtype_of, tensors)), torch.float32)

    def of_rows(x: Tensor, dims: list[int], keep: bool) -> Tensor:
        return _power(torch.linalg.vector_norm(x, order, dims, keep, dtype=precise), order)

    if dims and len(dims) < first.dim():
        op = "max" if math.isinf(order) else "sum"
        return _root(_reduce_over_ranks(first, dims, keepdim, 0.0, op, of_rows), order).unsqueeze(0)
    stored = [each.local if each.spec.numel else None for each in tensors]
    total = _root(_powers(stored, first.spec, order, precise, first.device), order).to(precise)
    return total.view([-1, *[1] * first.dim()]) if keepdim else total


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
    found += [(plain(grad), None) for grad in grads if type(grad) is not ShardedTensor]
    found += [(grad.local, grad.spec) for grad in grads if type(grad) is ShardedTensor and not flats]
    groups: dict[Any, tuple[ShardSpec | None, list[Tensor | None]]] = {}
    for tensor, spec in found:
        key = (spec and spec.reducing_groups, str(tensor.device), tensor.dtype)
        groups.setdefault(key, (spec, []))[1].append(tensor if tensor.numel() else None)
    totals: list[Tensor] = []
    for key in sorted(groups, key=str):
        (spec, stored), (_, device, dtype) = groups[key], key
        wide = torch.promote_types(dtype, torch.float32)
        totals.append(_powers(stored, spec, order, wide, torch.device(device), together=True).to(wide))
    if not totals:
        return torch.zeros(())
    widest = functools.reduce(torch.promote_types, {total.dtype for total in totals})
    joined = torch.stack([total.to(totals[0].device, widest) for total in totals])
    return _root(joined.amax() if math.isinf(order) else joined.sum(), order)


# --- what all ranks must find alike -----------------------------------------------------------------------------------


def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    one, other = args
    spec = next((each.spec for each in args if is_sharded(each)), None)
    if spec is None:
        return gather(func, args, kwargs)
    if one.shape != other.shape:
        return False
    here, there = (local if local.dim() else spec.local_of(local) for local in (operand(spec, each) for each in args))
    same = torch.tensor([torch.equal(here, there)], dtype=torch.uint8, device=one.device)
    return bool(spec.all_reduce(same, "min").item())


def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    """Unscale local gradients; all ranks learn whether any rank found an infinity or NaN."""
    grads, found_inf, inv_scale = args
    flats = [flat.grad for flat in FlatGradient.all_of(grads)]
    sharded = [each for each in grads if is_sharded(each)]
    func(flats or [each.local if is_sharded(each) else each for each in grads], found_inf, inv_scale)
    bump_version(flats or [each.local for each in sharded])
    for spec in {each.spec.reducing_groups: each.spec for each in sharded}.values():
        found_inf.copy_(spec.all_reduce(found_inf, "max"))


for _rule, _operators in (
    (_of_sharded(_sum), (aten.sum.default, aten.sum.dim_IntList)),
    (_of_sharded(_mean), (aten.mean.default, aten.mean.dim)),
    (_of_sharded(_extreme), (aten.amax.default, aten.max.default, aten.amin.default, aten.min.default)),
    (_of_sharded(_any_or_all), (aten.any.default, aten.any.dim, aten.any.dims)),
    (_of_sharded(_any_or_all), (aten.all.default, aten.all.dim, aten.all.dims)),
    (_of_sharded(_norm), (aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim)),
    (_foreach_norm, (aten._foreach_norm.Scalar,)),
    (_equal, (aten.equal.default,)),
    (_unscale, (aten._amp_foreach_non_finite_check_and_unscale_.default,)),
):
    RULES |= dict.fromkeys(_operators, _rule)
