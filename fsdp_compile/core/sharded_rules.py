"""What operators do with sharded tensors: `RULES` maps each operator to its rule.

elementwise    on local data, as are foreach and fused operators
reductions     on the rows of which this rank stores some elements, then one all-reduce
views          lazy (`ShardedView`): reading one gathers, writing one gathers and writes back
random fills   every rank draws all elements
all others     gather, compute the same on every rank, write back what was written

A reduction has a neutral element, which stands for what other ranks store, and an operation that combines the ranks.
Its result is plain and equal on all ranks:

    sum, mean      0       sum        any     0     max
    amax, max      -inf    max        all     1     min
    amin, min      inf     min        norm    0     sum of powers; of infinite order max or min
"""

# Note [Gradients of what is computed from sharded parameters]
# Gradients that come through a unit's forward are averaged by its reduce. A parameter may also be used as it is: a
# penalty on its norm, or a product with `model.weight` outside of any unit. Then its gradient is the mean over ranks of
# what each rank would get, as in data parallelism without sharding.
#   - Sharded tensors have one meaning on all ranks, while a plain tensor may be this rank's data. What combines the two
#     gathers, because no rank's part of the result would be right for another rank.
#   - Autograd's formulas are such code too: they take plain gradients, of this rank, beside what was saved of the
#     parameters. The plain gradients that result are averaged and cut when they arrive at a parameter, by a hook.
#   - Where a formula gives gradients of parameters alone, as that of `p.pow(2)`, its plain operands are averaged first,
#     which is exact because backward is linear in the gradients. The gradient of a sum has one element that differs, so
#     that the penalty above sends no more than that.
# In place, an operand stands for all ranks, since the target does. Plain parameters, as those of NO_SHARD are,
# have a hook of the same meaning (`average_plain_gradients`).

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_compile.core._torch import (
    FakeTensor,
    executes_formula,
    gives_gradients_of_leaves,
    without_torch_function,
)
from fsdp_compile.core.averaging import average_gradients
from fsdp_compile.core.exact_sums import exact_sums, powers_of_norm
from fsdp_compile.core.shard_spec import ShardSpec
from fsdp_compile.core.sharded_tensor import (
    RULES,
    FlatGradient,
    Rule,
    ShardedTensor,
    ShardedView,
    bump_version,
)
from fsdp_compile.core.unsharded_tensor import UnreducedGradient, UnshardedTensor, refuse_unreduced

aten = torch.ops.aten
log = logging.getLogger(__name__)


def is_sharded(value: Any) -> bool:
    """Whether this rank stores a part of `value`."""
    return type(value) is ShardedTensor


def operand(spec: ShardSpec, value: Any) -> Any:
    """`value` as an operand beside local data of tensors sharded by `spec`: tensors are cut to this rank's part."""
    if type(value) is ShardedTensor:
        if value.spec is spec or value.spec.same_ranges(spec):
            return value.local
        value = value.elements()
    elif not isinstance(value, Tensor):
        return value
    else:
        value = plain(value)
    return spec.local_of(value) if value.dim() else value


def plain(value: Any) -> Any:
    """`value` with all elements: what is sharded, in whichever way, is gathered, anything else returned as it is."""
    if type(value) is ShardedTensor or type(value) is UnshardedTensor:
        return value.elements()
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.detach().full_tensor()  # type: ignore[attr-defined]  # a DTensor
    if type(value) is UnreducedGradient:
        refuse_unreduced("an operator with sharded operands")
    return value.read() if type(value) is ShardedView else value


def wrap(result: Any, spec: ShardSpec) -> Any:
    """Wrap the local results of an operator as sharded tensors."""
    if isinstance(result, Tensor):
        return ShardedTensor(result, spec)
    return type(result)(wrap(each, spec) for each in result) if isinstance(result, (tuple, list)) else result


# --- gradients --------------------------------------------------------------------------------------------------------


def meets_data(tensors: list[Any]) -> bool:
    """Whether sharded tensors are combined with plain ones that may hold this rank's data.
    0-d tensors count only beside parameters and in backward: optimizers use 0-d tensors that are equal on all ranks.
    """
    if all(type(each) is ShardedTensor for each in tensors):
        return False
    scalars = executes_formula() or any(each.requires_grad for each in tensors)
    return any(type(each) not in (ShardedTensor, ShardedView) and (scalars or each.dim()) for each in tensors)


def averaged_in_backward(tensors: list[Any]) -> list[Any] | None:
    """The operands of an autograd formula with plain ones averaged over all ranks; None if that would be wrong."""
    if torch.is_grad_enabled() or not executes_formula() or not gives_gradients_of_leaves(ShardedTensor, tensors):
        return None
    ranks = next(each.spec.ranks for each in tensors if type(each) is ShardedTensor)
    return [
        ranks.average(each) if isinstance(each, Tensor) and not is_sharded(each) and each.is_floating_point() else each
        for each in tensors
    ]


# --- gathering --------------------------------------------------------------------------------------------------------


@cache
def _log_once(name: str) -> None:
    log.info("%s gathers sharded tensors: every rank computes all of its result", name)


def gather(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on full tensors, on every rank, and write back what was written."""
    _log_once(func._schema.name)
    average_gradients(args)
    full: dict[int, Tensor] = {}

    def gathered(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(gathered, value))
        if not isinstance(value, (ShardedTensor, ShardedView)):
            return value
        if id(value) not in full:
            full[id(value)] = plain(value)
        return full[id(value)]

    result = func(*map(gathered, args), **{key: gathered(value) for key, value in kwargs.items()})
    if not func._schema.is_mutable:
        return result
    originals: dict[int, Any] = {}
    for position in written_arguments(func):
        name = func._schema.arguments[position].name
        value = args[position] if position < len(args) else kwargs.get(name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, (ShardedTensor, ShardedView)):
                if not isinstance(each, UnshardedTensor):  # whose memory was written
                    each.write(full[id(each)])
                originals[id(full[id(each)])] = each
    if isinstance(result, (list, tuple)):
        return type(result)(originals.get(id(each), each) for each in result)
    return originals.get(id(result), result)


@cache
def written_arguments(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple(i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


# --- which rule an operator has ---------------------------------------------------------------------------------------

_ELEMENTWISE = ("copy_", "fill_", "zero_", "lerp", "lerp_", "masked_fill", "masked_fill_", "where")
_REFUSED = ("set_", "resize_", "resize_as_", "set_data")


def _choose(func: Any) -> Rule:
    name = func._schema.name.removeprefix("aten::")
    if name in _REFUSED:
        return _refuse
    if name.startswith(("_fused_", "_foreach_")) and not name.startswith(("_foreach_norm", "_foreach_max")):
        return _foreach
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random
    if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE:
        return _elementwise
    return _view if func.is_view else gather


def _refuse(func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[0], ShardedTensor) and isinstance(args[0].local, FakeTensor):  # Dynamo breaks the graph
        raise NotImplementedError(
            "a graph cannot assign to the .data of a sharded parameter; assign it outside of what is compiled"
        )
    raise TypeError(
        f"{func._schema.name}: expected a plain tensor, found a sharded one, whose memory is part of its unit's shard; "
        f"copy into it, or edit it within summon_full_params"
    )


# --- elementwise ------------------------------------------------------------------------------------------------------


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    values = [*args, *kwargs.values()]
    tensors: list[Any] = [value for value in values if isinstance(value, Tensor)]
    mutable = func._schema.is_mutable
    target = kwargs.get("out", args[0]) if mutable else None
    if mutable and not is_sharded(target):
        return gather(func, args, kwargs)
    if not mutable or torch.is_grad_enabled():  # else an optimizer edits parameters
        average_gradients(tensors)
    if meets_data(tensors):
        averaged = averaged_in_backward(values) if func in _LINEAR else None
        if averaged is not None:
            args, kwargs = averaged[: len(args)], dict(zip(kwargs, averaged[len(args) :], strict=True))
        elif not mutable:
            return gather(func, args, kwargs)
        elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError(
                f"{func._schema.name} in place, recorded by autograd, with a plain operand, which may differ by rank: "
                f"write it out of place, as x = x * y for x.mul_(y)"
            )
    if target is not None:
        spec = target.spec
    else:
        shape = tensors[0].shape if len(tensors) == 1 else torch.broadcast_shapes(*[each.shape for each in tensors])
        spec = next((each.spec for each in tensors if is_sharded(each) and each.shape == shape), None)
        # A 0-d tensor has 1-D local data, which would be promoted otherwise beside another such tensor.
        if spec is None or (not shape and len({tensor.dtype for tensor in tensors}) > 1):
            return gather(func, args, kwargs)
    result = func(*[operand(spec, arg) for arg in args], **{key: operand(spec, kwargs[key]) for key in kwargs})
    if target is None:
        return wrap(result, spec)
    bump_version(target.local)
    return target


_LINEAR = {aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.neg.default}


# --- foreach and fused ------------------------------------------------------------------------------------------------

_spec_of, _local_of, _numel_of = attrgetter("spec"), attrgetter("local"), attrgetter("spec.numel")
_group_of, _tensor_parallel_of = attrgetter("spec.ranks.group", "device"), attrgetter("spec.tensor_parallel")
_dtype_of, _requires_grad = attrgetter("dtype"), attrgetter("requires_grad")

# What scales all gradients of a unit alike, and keeps the zeros between them, runs once on the flat one.
_SCALING = {
    *(aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor),
    *(aten._foreach_div_.Scalar, aten._foreach_div_.Tensor),
    *(aten._foreach_zero_.default, aten._foreach_neg_.default),
}


def _foreach(func: Any, args: Any, kwargs: Any) -> Any:
    args = [plain(arg) if isinstance(arg, Tensor) else arg for arg in args]  # scalars
    targets = args[0] if isinstance(args[0], (list, tuple)) else args[1]  # _foreach_pow(2.0, tensors)
    mutable = func._schema.is_mutable
    if not mutable and torch.is_grad_enabled():
        average_gradients(args)
        tensors = [each for arg in args if isinstance(arg, (list, tuple)) for each in arg if isinstance(each, Tensor)]
        if meets_data(tensors):
            return gather(func, args, kwargs)
    if set(map(type, targets)) != {ShardedTensor}:
        return _foreach_mixed(func, args, kwargs, targets)
    if func in _SCALING and (flats := FlatGradient.all_of(targets)):
        _scale(func, flats, targets, *args[1:], **kwargs)
        return None
    specs = list(map(_spec_of, targets))
    local = [_locals(arg, specs) for arg in args]
    result = func(*local, **{key: _locals(value, specs) for key, value in kwargs.items()})
    if mutable:
        for position in written_arguments(func):
            if position < len(args) and args[position]:
                bump_version(local[position])
                bump_version(args[position])
        return result
    return list(map(ShardedTensor, result, specs))


def _scale(func: Any, flats: Sequence[FlatGradient], grads: Any, *args: Any, **kwargs: Any) -> None:
    of_flats = [flat.grad for flat in flats]
    func(of_flats, *args, **kwargs)
    bump_version(of_flats)
    bump_version(grads)


def multiply(grads: Sequence[Tensor], factor: Tensor) -> bool:
    """If `grads` are all segments of some flat gradients, multiply these by `factor`, 0-d; return whether they are."""
    flats = FlatGradient.all_of(grads)
    if not flats or any(flat.grad.device != factor.device for flat in flats):
        return False
    _scale(aten._foreach_mul_.Tensor, flats, grads, factor)
    return True


def _locals(arg: Any, specs: list[ShardSpec]) -> Any:
    if not isinstance(arg, (list, tuple)) or not arg or not isinstance(arg[0], Tensor):
        return arg
    if set(map(type, arg)) == {ShardedTensor} and list(map(_spec_of, arg)) == specs:
        return list(map(_local_of, arg))
    return [operand(spec, value) for spec, value in zip(specs, arg, strict=True)]


def _foreach_mixed(func: Any, args: Any, kwargs: Any, targets: Any) -> Any:
    """Split lists that mix sharded and plain tensors in two; plain targets take full operands.
    A new tensor is sharded if an operand of its shape is.
    """
    lists = [i for i, arg in enumerate(args) if isinstance(arg, (list, tuple)) and len(arg) == len(targets)]
    mutable = func._schema.is_mutable
    specs: dict[int, ShardSpec] = {}
    for i, target in enumerate(targets):
        for each in (target,) if mutable else (args[j][i] for j in lists):
            if is_sharded(each) and each.shape == target.shape:
                specs[i] = each.spec
    results: list[Any] = [None] * len(targets)
    for chosen in (list(specs), [i for i in range(len(targets)) if i not in specs]):
        if not chosen:
            continue
        some = [[arg[i] for i in chosen] if j in lists else arg for j, arg in enumerate(args)]
        if chosen[0] in specs:
            if mutable:
                _foreach(func, some, kwargs)
                continue
            of_chosen = [specs[i] for i in chosen]
            made: Any = map(ShardedTensor, func(*[_locals(arg, of_chosen) for arg in some], **kwargs), of_chosen)
        else:
            made = func(*[[*map(plain, arg)] if isinstance(arg, list) else arg for arg in some], **kwargs) or ()
        for i, each in zip(chosen, made, strict=False):
            results[i] = each
    return None if mutable else results


# --- random fills -----------------------------------------------------------------------------------------------------


def _random(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw all elements on every rank, so that generators and results are those of one process."""
    target = args[0]
    if type(target) is not ShardedTensor or func not in _FILLS:
        return gather(func, args, kwargs)
    drawn = func(target.local.new_empty(target.spec.shape), *args[1:], **kwargs)
    if not func._schema.is_mutable:
        return ShardedTensor(target.spec.local_of(drawn).clone(), target.spec)
    target.write(drawn)
    return target


_FILLS = {
    *(aten.normal_.default, aten.uniform_.default, aten.exponential_.default, aten.geometric_.default),
    *(aten.log_normal_.default, aten.cauchy_.default, aten.bernoulli_.float, aten.random_.default, aten.random_.to),
    *(aten.random_.__getattr__("from"), aten.randn_like.default, aten.rand_like.default),
}  # the values there do not matter


# --- views and copies -------------------------------------------------------------------------------------------------


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    average_gradients(args)
    source = args[0]
    if type(source) not in (ShardedTensor, ShardedView):
        return gather(func, args, kwargs)
    base, steps = (source.base, source.steps) if type(source) is ShardedView else (source, ())
    outline = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta")
    likes = func(outline, *args[1:], **kwargs)
    if isinstance(likes, (list, tuple)):
        return [
            ShardedView(base, (*steps, lambda view, i=i: func(view, *args[1:], **kwargs)[i]), like)
            for i, like in enumerate(likes)
        ]
    if not steps and likes.shape == base.shape and likes.stride() == base.stride():
        return ShardedTensor(base.local, base.spec)
    return ShardedView(base, (*steps, lambda view: func(view, *args[1:], **kwargs)), likes)


def _same(func: Any, args: Any, kwargs: Any) -> Any:
    if func is aten.alias.default:
        average_gradients(args)
    if not is_sharded(args[0]):
        return _view(func, args, kwargs)
    same = ShardedTensor(args[0].local, args[0].spec)
    if (flat := vars(args[0]).get("_flat")) is not None:  # still a segment of that
        vars(same)["_flat"] = flat
    return same


_OF_SHAPES_ALONE = {getattr(aten, f"{each}_like").default for each in ("empty", "zeros", "ones", "full")}


def _like(func: Any, args: Any, kwargs: Any) -> Any:
    if not is_sharded(args[0]):
        return gather(func, args, kwargs)
    # Optimizers make their state like parameters: no gradient comes of that, and hooks cost at every backward.
    if func not in _OF_SHAPES_ALONE or isinstance(args[0].local, FakeTensor):
        average_gradients(args)
    if kwargs.get("memory_format") is not torch.preserve_format:
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return wrap(func(args[0].local, *args[1:], **kwargs), args[0].spec)


def _new(func: Any, args: Any, kwargs: Any) -> Any:
    like, size, *rest = args
    local = like.local if is_sharded(like) else torch.empty(0, dtype=like.dtype, device=like.device)
    if is_sharded(like) and torch.Size(size) == like.shape:
        return ShardedTensor(func(local, [like.spec.numel], *rest, **kwargs), like.spec)
    return func(local, size, *rest, **kwargs)


def _new_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """Autograd copies a gradient into one of these, if a hook holds on to it."""
    like, size, stride = args
    if is_sharded(like) and torch.Size(size) == like.shape and tuple(stride) == like.stride():
        return _new(aten.new_empty.default, (like, size), kwargs)
    return func(torch.empty(0, dtype=like.dtype, device=like.device), size, stride, **kwargs)


def _local_only(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].local, *args[1:], **kwargs) if is_sharded(args[0]) else gather(func, args, kwargs)


Reduction = Callable[[Tensor, list[int], bool], Tensor]  # of a plain tensor, over dims, with keepdim


def _of_sharded(rule: Rule) -> Rule:
    """Apply `rule` if the first operand is a sharded tensor; otherwise gather."""

    def of_any(func: Any, args: Any, kwargs: Any) -> Any:
        if not is_sharded(args[0]):
            return gather(func, args, kwargs)
        average_gradients(args)
        return rule(func, args, kwargs)

    return of_any


def _reduced(x: ShardedTensor, dims: Any, keepdim: bool, fill: Any, op: str, reduce: Reduction) -> Tensor:
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


def _exact_sums(tensors: Sequence[ShardedTensor], addend: Callable[[Tensor], Tensor]) -> Tensor:
    """For each of `tensors`, of one group, the sum of `addend` of its elements, float64 `[len(tensors)]`."""
    first = tensors[0]
    return exact_sums([[each.local] for each in tensors], addend, first.device, first.spec.all_reduce)


def _dims(args: Any, kwargs: Any, at: int = 1) -> tuple[Any, bool]:
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
    dims, keepdim = _dims(args, kwargs)
    if x.spec.ranks.same_bits and x.dtype.is_floating_point and wanted.is_floating_point and _is_total(x, dims):
        [total] = _exact_sums([x], lambda values: values)
        return total.to(wanted).view([1] * x.dim() if keepdim else [])
    total = _reduced(x, dims, keepdim, 0, "sum", lambda x, dims, keep: x.sum(dims, keep, dtype=precise))
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
    return _reduced(x, *_dims(args, kwargs), fill, op, reduce)


def _any_or_all(func: Any, args: Any, kwargs: Any) -> Any:
    truth = ShardedTensor((args[0].local != 0).to(torch.uint8), args[0].spec)
    fill, op, reduce = (0, "max", torch.amax) if func.overloadpacket is aten.any else (1, "min", torch.amin)
    return _reduced(truth, *_dims(args, kwargs), fill, op, reduce).bool()


# --- norms ------------------------------------------------------------------------------------------------------------


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    x, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    [norm] = _norms([x], float(2 if order is None else order), *_dims(args, kwargs, 2))
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
    op, fill = "sum", 0.0 if order >= 0 else math.inf
    if math.isinf(order):
        op = "max" if order > 0 else "min"

    def power(norm: Tensor) -> Tensor:
        if order == 2:
            return norm.square()
        return norm if math.isinf(order) or order == 0 else norm**order

    def root(total: Tensor) -> Tensor:
        if order == 2:
            return total.sqrt()
        return total if math.isinf(order) or order == 0 else total ** (1 / order)

    def of_rows(x: Tensor, dims: list[int], keep: bool) -> Tensor:
        return power(torch.linalg.vector_norm(x, order, dims, keep, dtype=precise))

    if dims and len(dims) < first.dim():
        return root(_reduced(first, dims, keepdim, fill, op, of_rows)).unsqueeze(0)
    if first.spec.ranks.same_bits and op == "sum" and order >= 0:
        total = root(_exact_sums(tensors, partial(powers_of_norm, order=order))).to(precise)
        return total.view([-1, *[1] * first.dim()]) if keepdim else total
    numels = list(map(_numel_of, tensors))
    stored = list(map(_local_of, compress(tensors, numels)))
    norms = iter(aten._foreach_norm.Scalar(stored, order, dtype=precise) if stored else ())
    neutral = torch.full((), fill, dtype=precise, device=first.device)
    powers = power(torch.stack([next(norms) if numel else neutral for numel in numels]))
    total = root(first.spec.all_reduce(powers, op))
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


RULES.choose = _choose
for _rule, _operators in (
    (_same, (aten.detach.default, aten.lift_fresh.default, aten.alias.default)),
    (_like, (aten.clone.default, aten._to_copy.default, aten._pin_memory.default)),
    (_like, (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)),
    (_new, (aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default)),
    (_new_strided, (aten.new_empty_strided.default,)),
    (_local_only, (aten.is_pinned.default, aten.record_stream.default)),
    (lambda func, args, kwargs: args[0].shape == args[1].shape, (aten.is_same_size.default,)),
    (lambda func, args, kwargs: type(args[0]) is type(args[1]), (aten._has_compatible_shallow_copy_type.default,)),
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
