"""Rules of operators that reduce sharded tensors, or compare them.

Each rank reduces the rows of which it stores some elements, then one all-reduce combines the ranks. A reduction has a
neutral element, which stands for what other ranks store, and an operation that combines the ranks. Its result is plain
and equal on all ranks:

    sum, mean      0       sum        any     0     max
    amax, max      -inf    max        all     1     min
    amin, min      inf     min        norm    0     sum of powers; of infinite order max or min
"""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.core._torch import without_torch_function
from fsdp_compile.core.exact_sums import exact_sums
from fsdp_compile.tensors.averaging import average_gradients
from fsdp_compile.tensors.norms import combined, power, powers, root
from fsdp_compile.tensors.sharded_rules import gather, is_sharded, operand, plain
from fsdp_compile.tensors.sharded_tensor import RULES, FlatGradient, Rule, ShardedTensor, bump_version

aten = torch.ops.aten

_tensor_parallel_of, _dtype_of, _requires_grad = map(attrgetter, ("spec.tensor_parallel", "dtype", "requires_grad"))

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
    if spec.ranks.same_bits and op == "sum" and x.dtype.is_floating_point and not _is_total(x, dims):
        return reduce(x.elements(), [dim % ndim for dim in dims], keepdim)
    if _is_total(x, dims):
        values = x.local if x.local.numel() else x.local.new_full((1,), fill)
        total = spec.all_reduce(reduce(values, [0], False), op)
        return total.view([1] * ndim) if keepdim else total
    dims = sorted({dim % ndim for dim in dims})
    if spec.tensor_parallel is not None:
        return reduce(x.elements(), dims, keepdim)
    low, high = spec.rows
    here = reduce(spec.rows_of(x.local, fill), dims, True) if high > low else None
    neutral = reduce(x.local.new_full((1, *x.shape[1:]), fill), dims, True)
    if 0 in dims:
        mine = neutral if here is None else here
    else:
        mine = neutral.expand(x.shape[0], *neutral.shape[1:]).clone()
        if here is not None:
            mine[low:high] = here
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
    continuous = x.dtype.is_floating_point or x.dtype.is_complex
    wanted = kwargs.get("dtype") or (x.dtype if continuous else torch.int64)
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
    precise = torch.promote_types(wanted, torch.float32)
    total = _sum(func, args, {**kwargs, "dtype": precise})
    return total.div_(x.numel() / total.numel() if total.numel() else 1).to(wanted)


def _extreme(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if not x.numel():
        return gather(func, args, kwargs)
    is_max = func in (aten.amax.default, aten.max.default)
    if x.dtype.is_floating_point:
        fill: Any = -math.inf if is_max else math.inf
    elif x.dtype is torch.bool:
        fill = not is_max
    else:
        fill = torch.iinfo(x.dtype).min if is_max else torch.iinfo(x.dtype).max
    op, reduce = ("max", torch.amax) if is_max else ("min", torch.amin)
    return _reduce_over_ranks(x, *_dims_and_keepdim(args, kwargs), fill, op, reduce)


def _any_or_all(func: Any, args: Any, kwargs: Any) -> Any:
    truth = ShardedTensor((args[0].local != 0).to(torch.uint8), args[0].spec)
    fill, op, reduce = (0, "max", torch.amax) if func.overloadpacket is aten.any else (1, "min", torch.amin)
    return _reduce_over_ranks(truth, *_dims_and_keepdim(args, kwargs), fill, op, reduce).bool()


# --- norms ------------------------------------------------------------------------------------------------------------


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    x, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    [norm] = _norms([x], float(2 if order is None else order), *_dims_and_keepdim(args, kwargs, 2))
    return norm.to(kwargs.get("dtype") or x.dtype)


def _foreach_norm(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """One all-reduce for each group of ranks and device, however many tensors there are."""
    tensors, order = args[0], float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    with without_torch_function():
        if any(map(_requires_grad, tensors)):
            average_gradients(tensors)
        kinds = {(flat.specs[0].ranks.group, flat.grad.device, flat.grad.dtype) for flat in FlatGradient.of(tensors)}
        if len(kinds) == 1 and not any(map(_tensor_parallel_of, tensors)):  # the work for each runs in C
            return list(_norms(tensors, order).to(dtype or tensors[0].dtype).unbind())
    norms: list[Any] = [None] * len(tensors)
    groups: dict[Any, list[int]] = {}
    for i, each in enumerate(tensors):
        groups.setdefault((each.spec.reducing_groups, each.device) if is_sharded(each) else None, []).append(i)
    for group, chosen in groups.items():
        alike = [tensors[i] for i in chosen]
        of_group = _norms(alike, order) if group else aten._foreach_norm.Scalar([*map(plain, alike)], order, dtype)
        for i, norm in zip(chosen, of_group, strict=True):
            norms[i] = norm.to(dtype or tensors[i].dtype)
    return norms


def _norms(tensors: Sequence[ShardedTensor], order: float, dims: Any = None, keepdim: bool = False) -> Tensor:
    """Norms of sharded tensors of one group, `[len(tensors), ...]`, in at least float32."""
    first = tensors[0]
    precise = torch.float32
    for dtype in set(map(_dtype_of, tensors)):
        precise = torch.promote_types(precise, dtype)

    def of_rows(x: Tensor, dims: list[int], keep: bool) -> Tensor:
        return power(torch.linalg.vector_norm(x, order, dims, keep, dtype=precise), order)

    if dims and len(dims) < first.dim():
        op, neutral = combined(order)
        return root(_reduce_over_ranks(first, dims, keepdim, neutral, op, of_rows), order).unsqueeze(0)
    stored = [each.local if each.spec.numel else None for each in tensors]
    total = root(powers(stored, first.spec, order, precise, first.device), order).to(precise)
    return total.view([-1, *[1] * first.dim()]) if keepdim else total


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
