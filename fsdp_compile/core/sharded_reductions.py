"""Reductions of sharded tensors: on the rows of which this rank stores some elements, then one all-reduce.

A reduction has a neutral element, which stands for what other ranks store, and an operation that combines the ranks:

    sum, mean      0       sum        any     0     max
    amax, max      -inf    max        all     1     min
    amin, min      inf     min        norm    0     sum of powers; of infinite order max or min

Results are plain and equal on all ranks. `REDUCTIONS` has the rule of each operator.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.core.sharded_operands import Rule, average_gradients, bump_version, gather, is_sharded, operand, plain
from fsdp_compile.core.sharded_tensor import ShardedTensor

aten = torch.ops.aten

Reduce = Callable[[Tensor, list[int], bool], Tensor]  # of a plain tensor, over dims, with keepdim


def _of_sharded(rule: Rule) -> Rule:
    """`rule` where the first operand is a sharded tensor; of a view, the operator gathers."""

    def of_any(func: Any, args: Any, kwargs: Any) -> Any:
        if not is_sharded(args[0]):
            return gather(func, args, kwargs)
        average_gradients(args)
        return rule(func, args, kwargs)

    return of_any


def _reduced(x: ShardedTensor, dims: Any, keepdim: bool, fill: Any, op: str, reduce: Reduce) -> Tensor:
    """`reduce` over all ranks, plain. `fill` is its neutral element, `op` combines the ranks."""
    spec, ndim = x.spec, x.dim()
    if not ndim or not dims or len({dim % ndim for dim in dims}) == ndim:
        values = x.local if x.local.numel() else x.local.new_full((1,), fill)
        total = spec.all_reduce(reduce(values, [0], False), op)
        return total.view([1] * ndim) if keepdim else total
    dims = sorted({dim % ndim for dim in dims})
    if spec.tensor_parallel is not None:
        return reduce(x.full_tensor(), dims, keepdim)
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


def _dims(args: Any, kwargs: Any, at: int = 1) -> tuple[Any, bool]:
    dims = args[at] if len(args) > at else kwargs.get("dim")
    keepdim = args[at + 1] if len(args) > at + 1 else kwargs.get("keepdim", False)
    return ([dims] if isinstance(dims, int) else dims), keepdim


# --- sums and extremes ------------------------------------------------------------------------------------------------


@_of_sharded
def _sum(func: Any, args: Any, kwargs: Any) -> Any:
    """Of half-precision numbers too the sum is rounded once, as on one process."""
    x = args[0]
    continuous = x.dtype.is_floating_point or x.dtype.is_complex
    wanted = kwargs.get("dtype") or (x.dtype if continuous else torch.int64)
    precise = torch.promote_types(wanted, torch.float32) if wanted.is_floating_point else wanted
    total = _reduced(x, *_dims(args, kwargs), 0, "sum", lambda x, dims, keep: x.sum(dims, keep, dtype=precise))
    return total.to(wanted)


@_of_sharded
def _mean(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    wanted = kwargs.get("dtype") or x.dtype
    if not wanted.is_floating_point:
        return gather(func, args, kwargs)
    precise = torch.promote_types(wanted, torch.float32)
    total = _sum(func, args, {**kwargs, "dtype": precise})
    return total.div_(x.numel() / total.numel() if total.numel() else 1).to(wanted)


def _extreme(fill: float, op: str, reduce: Reduce) -> Rule:
    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        if not x.numel():
            return gather(func, args, kwargs)
        return _reduced(x, *_dims(args, kwargs), _limit(x.dtype, fill), op, reduce)

    return _of_sharded(rule)


def _amax(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return x.amax(dims, keepdim=keep)


def _amin(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return x.amin(dims, keepdim=keep)


_max, _min = _extreme(-math.inf, "max", _amax), _extreme(math.inf, "min", _amin)


def _limit(dtype: torch.dtype, fill: float) -> Any:
    """`fill`, infinite, or the last number in that direction if `dtype` has no infinity."""
    if dtype.is_floating_point:
        return fill
    if dtype is torch.bool:
        return fill > 0
    return torch.iinfo(dtype).max if fill > 0 else torch.iinfo(dtype).min


@_of_sharded
def _any(func: Any, args: Any, kwargs: Any) -> Any:
    return _reduced(_truth(args[0]), *_dims(args, kwargs), 0, "max", _amax).bool()


@_of_sharded
def _all(func: Any, args: Any, kwargs: Any) -> Any:
    return _reduced(_truth(args[0]), *_dims(args, kwargs), 1, "min", _amin).bool()


def _truth(x: ShardedTensor) -> ShardedTensor:
    return ShardedTensor((x.local != 0).to(torch.uint8), x.spec)


# --- norms ------------------------------------------------------------------------------------------------------------


@_of_sharded
def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    x, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    [norm] = _norms([x], float(2 if order is None else order), *_dims(args, kwargs, 2))
    return norm.to(kwargs.get("dtype") or x.dtype)


def _foreach_norm(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """One all-reduce for each group of ranks and device, however many tensors there are."""
    tensors, order = args[0], float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    average_gradients(tensors)
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


def _norms(tensors: Sequence[ShardedTensor], order: float, dims: Any = None, keepdim: bool = False) -> Sequence[Tensor]:
    """Norms of sharded tensors of one group, in at least float32: powers are summed, or extremes taken, over ranks."""
    first = tensors[0]
    precise = torch.float32
    for dtype in {each.dtype for each in tensors}:
        precise = torch.promote_types(precise, dtype)
    op, fill = "sum", 0.0 if order >= 0 else math.inf
    if math.isinf(order):
        op = "max" if order > 0 else "min"

    def power(norm: Tensor) -> Tensor:
        return norm if math.isinf(order) or order == 0 else norm**order

    def root(total: Tensor) -> Tensor:
        return total if math.isinf(order) or order == 0 else total ** (1 / order)

    def of_rows(x: Tensor, dims: list[int], keep: bool) -> Tensor:
        return power(torch.linalg.vector_norm(x, order, dims, keep, dtype=precise))

    if dims and len(dims) < first.dim():
        return [root(_reduced(first, dims, keepdim, fill, op, of_rows))]
    stored = [each.local for each in tensors if each.local.numel()]
    norms = iter(aten._foreach_norm.Scalar(stored, order, dtype=precise) if stored else ())
    neutral = first.local.new_full((), fill, dtype=precise)
    powers = power(torch.stack([next(norms) if each.local.numel() else neutral for each in tensors]))
    total = root(first.spec.all_reduce(powers, op))
    return [each.view([1] * first.dim()) for each in total.unbind()] if keepdim else total.unbind()


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
    """Unscale local gradients; all ranks learn whether any of them has an infinity or NaN."""
    grads, found_inf, inv_scale = args
    func([each.local if is_sharded(each) else each for each in grads], found_inf, inv_scale)
    sharded = [each for each in grads if is_sharded(each)]
    bump_version([each.local for each in sharded])
    for spec in {each.spec.reducing_groups: each.spec for each in sharded}.values():
        found_inf.copy_(spec.all_reduce(found_inf, "max"))


REDUCTIONS: dict[Any, Rule] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.amax.default: _max,
    aten.max.default: _max,
    aten.amin.default: _min,
    aten.min.default: _min,
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    aten.all.default: _all,
    aten.all.dim: _all,
    aten.all.dims: _all,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.equal.default: _equal,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
