"""What operators do with sharded tensors: `rule_of` gives the rule of an operator, looked up once and then cached.

elementwise    on local data, and so are foreach and fused operators
reductions     on the rows of which this rank stores some elements, then one all-reduce (sharded_reductions.py)
views          remembered as `ShardedView`, not done; reading one gathers, writing one gathers and writes back
random fills   every rank draws all elements
all others     gather, compute the same on every rank, write back what was written (sharded_operands.py)
"""

from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.core._torch import FakeTensor
from fsdp_compile.core.shard_spec import ShardSpec
from fsdp_compile.core.sharded_operands import (
    Rule,
    ShardedView,
    average_gradients,
    averaged_in_backward,
    bump_version,
    gather,
    is_sharded,
    meets_data,
    operand,
    plain,
    wrap,
    write_back,
    written_arguments,
)
from fsdp_compile.core.sharded_reductions import REDUCTIONS
from fsdp_compile.core.sharded_tensor import ShardedTensor

aten = torch.ops.aten


@cache
def rule_of(func: Any) -> Rule:
    """What operator `func` does if an operand is a sharded tensor or a view of one."""
    if func in _RULES:
        return _RULES[func]
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


_ELEMENTWISE = ("copy_", "fill_", "zero_", "lerp", "lerp_", "masked_fill", "masked_fill_", "where")
_REFUSED = ("set_", "resize_", "resize_as_", "set_data")


def _refuse(func: Any, args: Any, kwargs: Any) -> Any:
    raise TypeError(
        f"{func._schema.name}: expected a plain tensor, found a sharded one, whose memory is part of its unit's shard; "
        f"copy into it, or edit it within summon_full_params"
    )


# --- elementwise ------------------------------------------------------------------------------------------------------


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    values = [*args, *kwargs.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
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
                f"{func._schema.name}: expected sharded operands, found a plain one, which may differ by rank, for an "
                f"edit in place that autograd records; write it out of place, as x = x * y for x.mul_(y)"
            )
    spec = target.spec if target is not None else _common_spec(tensors)
    if spec is None:
        return gather(func, args, kwargs)
    result = func(*[operand(spec, arg) for arg in args], **{key: operand(spec, kwargs[key]) for key in kwargs})
    if target is None:
        return wrap(result, spec)
    bump_version(target.local)
    return target


_LINEAR = {aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.neg.default}


def _common_spec(tensors: list[Any]) -> ShardSpec | None:
    """How the result of an elementwise operator is sharded; None if it has the shape or dtype of no local data.

    Local data has one dimension where a tensor has none, and so would be promoted otherwise beside another such tensor.
    """
    shape = tensors[0].shape
    if len(tensors) > 1:
        shape = torch.broadcast_shapes(*[tensor.shape for tensor in tensors])
        if not shape and len({tensor.dtype for tensor in tensors}) > 1:
            return None
    return next((each.spec for each in tensors if is_sharded(each) and each.shape == shape), None)


# --- foreach and fused ------------------------------------------------------------------------------------------------

_spec_of, _local_of = attrgetter("spec"), attrgetter("local")


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


def _locals(arg: Any, specs: list[ShardSpec]) -> Any:
    """For a list of tensors the local data, in the order of `specs`; any other argument as it is."""
    if not isinstance(arg, (list, tuple)) or not arg or not isinstance(arg[0], Tensor):
        return arg
    if set(map(type, arg)) == {ShardedTensor} and list(map(_spec_of, arg)) == specs:
        return list(map(_local_of, arg))
    return [operand(spec, value) for spec, value in zip(specs, arg, strict=True)]


def _foreach_mixed(func: Any, args: Any, kwargs: Any, targets: Any) -> Any:
    """Sharded and plain tensors among targets: the lists are split in two, and plain targets take full operands.

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
    if type(target) is not ShardedTensor:
        return gather(func, args, kwargs)
    if func not in _FILLS:
        return gather(func, args, kwargs)
    drawn = func(target.local.new_empty(target.spec.shape), *args[1:], **kwargs)
    if not func._schema.is_mutable:
        return ShardedTensor(target.spec.local_of(drawn).clone(), target.spec)
    write_back(target, drawn)
    return target


_FILLS = {aten.normal_.default, aten.uniform_.default, aten.exponential_.default, aten.geometric_.default}
_FILLS |= {
    aten.log_normal_.default,
    aten.cauchy_.default,
    aten.random_.default,
    aten.random_.to,
    aten.random_.__getattr__("from"),
}
_FILLS |= {aten.bernoulli_.float, aten.randn_like.default, aten.rand_like.default}  # the values there do not matter


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


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    average_gradients(args)
    return _same(func, args, kwargs)


def _same(func: Any, args: Any, kwargs: Any) -> Any:
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


_RULES: dict[Any, Rule] = {
    aten.detach.default: _same,
    aten.alias.default: _alias,
    aten.lift_fresh.default: _same,
    aten.clone.default: _like,
    aten._to_copy.default: _like,
    aten.empty_like.default: _like,
    aten.zeros_like.default: _like,
    aten.ones_like.default: _like,
    aten.full_like.default: _like,
    aten._pin_memory.default: _like,
    aten.new_zeros.default: _new,
    aten.new_ones.default: _new,
    aten.new_empty.default: _new,
    aten.new_full.default: _new,
    aten.new_empty_strided.default: _new_strided,
    aten.is_pinned.default: _local_only,
    aten.record_stream.default: _local_only,
    aten.is_same_size.default: lambda func, args, kwargs: args[0].shape == args[1].shape,
    aten._has_compatible_shallow_copy_type.default: lambda func, args, kwargs: type(args[0]) is type(args[1]),
}
_RULES |= REDUCTIONS
