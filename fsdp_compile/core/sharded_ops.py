"""What operators do with sharded tensors: `rule_of` gives the rule of an operator, looked up once and then cached.

elementwise    on local data, and so are foreach and fused operators
reductions     on the rows of which this rank stores some elements, then one all-reduce
views          remembered as `ShardedView`, not done; reading one gathers, writing one gathers and writes back
all others     gather, compute the same on every rank, write back what was written
"""

# Note [Gradients of what is computed from sharded parameters]
# Gradients that come through a unit's forward are averaged by its reduce. A parameter may also be used as it is: a
# penalty on its norm, or a product with `model.weight` outside of any unit. The plain results of that are equal on all
# ranks, but what is computed from them may not be, so their gradients differ by rank, and the parameter's gradient is
# the mean over ranks, as it would be in data parallelism without sharding. Autograd calls the rules below with this
# rank's gradients as plain operands. So in a backward pass, a plain operand is averaged before it is cut to a shard,
# which is exact because backward is linear in the gradients and all other plain operands are equal on all ranks. What
# reaches a parameter as a plain gradient is averaged by a hook that the first such use registers.
# In a forward whose results require grad, plain operands may be this rank's data. Then no rank's part of the result
# would be right for another rank, so what combines such operands with sharded parameters gathers these.

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.core._torch import NO_TORCH_FUNCTION, current_backward, foreach_norm, new_wrapper
from fsdp_compile.core.shard_spec import ShardSpec
from fsdp_compile.core.sharded_tensor import ShardedTensor, UnreducedGradient, UnshardedTensor, refuse_unreduced

aten = torch.ops.aten
log = logging.getLogger(__name__)

Rule = Callable[[Any, Any, Any], Any]  # func, args, kwargs -> what func returns

_bump = torch.autograd.graph.increment_version  # nobody counts versions below `__torch_dispatch__` (torch 2.11, 2.13)


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
    return _view if func.is_view else _gather


_ELEMENTWISE = ("copy_", "fill_", "zero_", "lerp", "lerp_", "masked_fill", "masked_fill_", "where")
_REFUSED = ("set_", "resize_", "resize_as_", "set_data")


def _refuse(func: Any, args: Any, kwargs: Any) -> Any:
    raise TypeError(
        f"{func._schema.name}: expected a plain tensor, found a sharded one, whose memory is part of its unit's shard; "
        f"copy into it, or edit it within summon_full_params"
    )


# --- operands ---------------------------------------------------------------------------------------------------------


def _is_sharded(value: Any) -> bool:
    return type(value) is ShardedTensor


def _operand(spec: ShardSpec, value: Any) -> Any:
    """An operand beside local data of tensors that are sharded as `spec` says."""
    if type(value) is ShardedTensor:
        if value.spec is spec or value.spec == spec:
            return value.local
        value = value.full_tensor()
    elif type(value) is ShardedView:
        value = value.read()
    elif not isinstance(value, Tensor):
        return value
    elif type(value) is UnreducedGradient:
        refuse_unreduced("an operator with sharded operands")
    elif type(value) is UnshardedTensor:
        value = value.full_tensor()
    elif current_backward() != -1 and value.is_floating_point():
        value = _average(spec, value)
    return spec.local_of(value) if value.dim() else value


def _average(spec: ShardSpec, gradient: Tensor) -> Tensor:
    """The mean over all ranks of a plain tensor; of expanded dimensions, one element is sent."""
    strides = gradient.stride()
    distinct = gradient[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    return spec.ranks.average(distinct.contiguous()).expand(gradient.shape)


def _watch(args: Any) -> None:
    """See to it that plain gradients of parameters among `args` are averaged over the ranks."""
    if not torch.is_grad_enabled():
        return
    for arg in args:
        if isinstance(arg, (list, tuple)):
            _watch(arg)
        elif type(arg) is ShardedTensor and arg.requires_grad and arg.is_leaf and "_averages" not in vars(arg):
            vars(arg)["_averages"] = arg.register_hook(_Averages(arg.spec))


class _Averages:
    """A hook on a parameter that turns a plain gradient into the mean over ranks, sharded as the parameter is."""

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec

    def __call__(self, gradient: Tensor) -> Tensor | None:
        if type(gradient) is ShardedTensor:
            return None
        plain = gradient.read() if type(gradient) is ShardedView else gradient
        return ShardedTensor(self.spec.local_of(_average(self.spec, plain)).clone(), self.spec)

    def __deepcopy__(self, memo: Any) -> "_Averages":
        return self


def _wrap(result: Any, spec: ShardSpec) -> Any:
    if isinstance(result, Tensor):
        return ShardedTensor(result, spec)
    return type(result)(_wrap(each, spec) for each in result) if isinstance(result, (tuple, list)) else result


def _plain(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        if type(value) is UnreducedGradient:
            refuse_unreduced("an operator with sharded operands")
        return value.full_tensor()
    return value.read() if type(value) is ShardedView else value


# --- elementwise ------------------------------------------------------------------------------------------------------


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    if func._schema.is_mutable:
        target = kwargs["out"] if "out" in kwargs else args[0]
        if type(target) is not ShardedTensor:
            return _gather(func, args, kwargs)
        spec = target.spec
        func(*[_operand(spec, arg) for arg in args], **{key: _operand(spec, value) for key, value in kwargs.items()})
        _bump(target.local)
        return target
    _watch(args)
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    shape = torch.broadcast_shapes(*[tensor.shape for tensor in tensors])
    alike = next((each for each in tensors if type(each) is ShardedTensor and each.shape == shape), None)
    if alike is None or _combines_data(tensors) or not _same_category(tensors):
        return _gather(func, args, kwargs)
    spec = alike.spec
    kwargs = {key: _operand(spec, value) for key, value in kwargs.items()}
    return _wrap(func(*[_operand(spec, arg) for arg in args], **kwargs), spec)


def _combines_data(tensors: list[Tensor]) -> bool:
    """Whether parameters that require grad meet plain tensors, which may be this rank's data."""
    if not torch.is_grad_enabled() or current_backward() != -1:
        return False
    return any(map(_is_sharded, tensors)) and any(
        type(each) is not ShardedTensor for each in tensors
    ) and any(each.requires_grad for each in tensors)  # fmt: skip


def _same_category(tensors: list[Tensor]) -> bool:
    """Whether dtypes are promoted as for full tensors: local data has one dimension where a scalar has none."""
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) == 1 or any(tensor.dim() for tensor in tensors)


# --- foreach and fused ------------------------------------------------------------------------------------------------

_spec_of, _local_of = attrgetter("spec"), attrgetter("local")


@cache
def _written(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple(i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _foreach(func: Any, args: Any, kwargs: Any) -> Any:
    first = args[0] if isinstance(args[0], (list, tuple)) else args[1]  # _foreach_pow(2.0, tensors)
    if set(map(type, first)) != {ShardedTensor}:
        return _foreach_mixed(func, args, kwargs)
    specs = list(map(_spec_of, first))
    local = [_locals(arg, specs) for arg in args]
    result = func(*local, **{key: _locals(value, specs) for key, value in kwargs.items()})
    if func._schema.is_mutable:
        for position in _written(func):
            if position < len(args) and args[position]:
                _bump(local[position])
                _bump(args[position])
        return result
    return [ShardedTensor(each, spec) for each, spec in zip(result, specs, strict=True)]


def _locals(arg: Any, specs: list[ShardSpec]) -> Any:
    """For a list of tensors the local data, in the order of `specs`; any other argument as it is."""
    if not isinstance(arg, (list, tuple)) or not arg or not isinstance(arg[0], Tensor):
        return arg
    if set(map(type, arg)) == {ShardedTensor} and list(map(_spec_of, arg)) == specs:
        return list(map(_local_of, arg))
    return [_operand(spec, value) for spec, value in zip(specs, arg, strict=True)]


def _foreach_mixed(func: Any, args: Any, kwargs: Any) -> Any:
    """Sharded and plain tensors side by side: the lists are split in two; plain targets take full operands."""
    lists = [i for i, arg in enumerate(args) if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
    target, mutable = args[lists[0]], func._schema.is_mutable
    sharded = [i for i, each in enumerate(target) if _is_sharded(each)]
    if not mutable:  # a new tensor is sharded like any of its operands
        sharded = [i for i in range(len(target)) if any(_is_sharded(args[j][i]) and args[j][i].shape == target[i].shape
                                                        for j in lists)]  # fmt: skip
    results: list[Any] = [None] * len(target)
    for chosen in (sharded, [i for i in range(len(target)) if i not in sharded]):
        if not chosen:
            continue
        of_chosen = [[arg[i] for i in chosen] if j in lists else arg for j, arg in enumerate(args)]
        if chosen is sharded:
            specs = [next(args[j][i].spec for j in lists if _is_sharded(args[j][i])) for i in chosen]
            local = [_locals(arg, specs) for arg in of_chosen]
            result = func(*local, **kwargs)
            for position in _written(func):
                _bump([each for i, each in enumerate(local[position]) if _is_sharded(of_chosen[position][i])])
            result = result and [ShardedTensor(each, spec) for each, spec in zip(result, specs, strict=True)]
        else:
            result = func(*[[*map(_plain, arg)] if j in lists else arg for j, arg in enumerate(of_chosen)], **kwargs)
        for i, each in zip(chosen, result or [], strict=False):
            results[i] = each
    return None if mutable else results


# --- gathering --------------------------------------------------------------------------------------------------------


@cache
def _log_once(name: str) -> None:
    log.info("%s gathers sharded tensors: every rank computes all of its result", name)


def _gather(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on full tensors, on every rank, and write back what was written."""
    _log_once(func._schema.name)
    _watch(args)
    full: dict[int, Tensor] = {}

    def gathered(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(gathered, value))
        if isinstance(value, (ShardedTensor, ShardedView)):
            if id(value) not in full:
                full[id(value)] = _plain(value)
            return full[id(value)]
        return value

    result = func(*map(gathered, args), **{key: gathered(value) for key, value in kwargs.items()})
    if not func._schema.is_mutable:
        return result
    names = [argument.name for argument in func._schema.arguments]
    by_name = dict(zip(names, args, strict=False)) | kwargs
    originals: dict[int, Any] = {}
    for name in (names[position] for position in _written(func)):
        value = by_name.get(name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, (ShardedTensor, ShardedView)):
                _write_back(each, full[id(each)])
                originals[id(full[id(each)])] = each
    if isinstance(result, (list, tuple)):
        return type(result)(originals.get(id(each), each) for each in result)
    return originals.get(id(result), result)


def _write_back(target: Any, full: Tensor) -> None:
    if type(target) is ShardedView:
        target.write()
    elif type(target) is ShardedTensor:
        target.local.copy_(target.spec.local_of(full))
        _bump(target.local)


def _random(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw all elements on every rank, so that generators and results are those of one process."""
    target = args[0]
    if type(target) is not ShardedTensor:
        return _gather(func, args, kwargs)
    if func not in _FILLS:
        return _gather(func, args, kwargs)
    drawn = func(target.local.new_empty(target.spec.shape), *args[1:], **kwargs)
    if not func._schema.is_mutable:
        return ShardedTensor(target.spec.local_of(drawn).clone(), target.spec)
    _write_back(target, drawn)
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


# --- views ------------------------------------------------------------------------------------------------------------


class ShardedView(Tensor):
    """A view of a sharded tensor: `steps` lead from the full tensor to it. All ranks read and write it together."""

    base: ShardedTensor
    steps: tuple[Callable[[Tensor], Tensor], ...]
    _gathered: tuple[int, Tensor, Tensor] | None  # the base's version, the full tensor and the view of it
    __torch_function__ = NO_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, base: ShardedTensor, steps: tuple[Callable[[Tensor], Tensor], ...], like: Tensor) -> "ShardedView":
        """A view of `base` of the shape and strides of `like`."""
        self: ShardedView = new_wrapper(
            cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=base.device
        )
        self.base, self.steps = base, steps
        self._gathered = None
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def read(self) -> Tensor:
        """The view's elements, plain; gathered anew if the base was changed since."""
        version = self.base.local._version
        if self._gathered is None or self._gathered[0] != version:
            full = view = self.base.full_tensor()
            for step in self.steps:
                view = step(view)
            self._gathered = (version, full, view)
        return self._gathered[2]

    def write(self) -> None:
        """Let the base be what the tensor from `read` has been changed into."""
        if self._gathered is not None:
            _, full, view = self._gathered
            _write_back(self.base, full)
            self._gathered = (self.base.local._version, full, view)

    def full_tensor(self) -> Tensor:
        """The view's elements, plain, on every rank."""
        return self.read()

    numpy, tolist, __array__ = ShardedTensor.numpy, ShardedTensor.tolist, ShardedTensor.__array__

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedView(shape={tuple(self.shape)} of {self.base!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return rule_of(func)(func, args, kwargs or {})


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    _watch(args)
    source = args[0]
    if type(source) not in (ShardedTensor, ShardedView):
        return _gather(func, args, kwargs)
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
    return ShardedTensor(args[0].local, args[0].spec) if _is_sharded(args[0]) else _view(func, args, kwargs)


def _like(func: Any, args: Any, kwargs: Any) -> Any:
    if not _is_sharded(args[0]):
        return _gather(func, args, kwargs)
    _watch(args)
    if kwargs.get("memory_format") is not torch.preserve_format:
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return _wrap(func(args[0].local, *args[1:], **kwargs), args[0].spec)


def _new(func: Any, args: Any, kwargs: Any) -> Any:
    like, size, *rest = args
    local = like.local if _is_sharded(like) else torch.empty(0, dtype=like.dtype, device=like.device)
    if _is_sharded(like) and torch.Size(size) == like.shape:
        return ShardedTensor(func(local, [like.spec.numel], *rest, **kwargs), like.spec)
    return func(local, size, *rest, **kwargs)


def _local_only(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].local, *args[1:], **kwargs) if _is_sharded(args[0]) else _gather(func, args, kwargs)


# --- reductions -------------------------------------------------------------------------------------------------------

Reduce = Callable[[Tensor, list[int], bool], Tensor]  # of a plain tensor, over dims, with keepdim


def _reduced(x: ShardedTensor, dims: Any, keepdim: bool, fill: Any, op: str, reduce: Reduce) -> Tensor:
    """`reduce` over all ranks, plain. `fill` is its neutral element, `op` combines the ranks."""
    spec, ndim = x.spec, x.dim()
    if not ndim or dims is None or not len(dims) or len({dim % ndim for dim in dims}) == ndim:
        values = x.local if x.local.numel() else x.local.new_full((1,), fill)
        total = spec.all_reduce(reduce(values, [0], False), op)
        return total.view([1] * ndim) if keepdim else total
    dims = sorted({dim % ndim for dim in dims})
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


def _limit(dtype: torch.dtype, fill: float) -> Any:
    """`fill`, or the last number in that direction if `dtype` has no infinity."""
    if dtype.is_floating_point or not math.isinf(fill):
        return fill
    if dtype is torch.bool:
        return fill > 0
    return torch.iinfo(dtype).max if fill > 0 else torch.iinfo(dtype).min


def _dims(args: Any, kwargs: Any, at: int = 1) -> tuple[Any, bool]:
    dims = args[at] if len(args) > at else kwargs.get("dim")
    keepdim = args[at + 1] if len(args) > at + 1 else kwargs.get("keepdim", False)
    return ([dims] if isinstance(dims, int) else dims), keepdim


def _reduction(fill: float, op: str, reduce: Reduce) -> Rule:
    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        if not _is_sharded(args[0]):
            return _gather(func, args, kwargs)
        _watch(args)
        x = args[0]
        wanted = kwargs.get("dtype") or (torch.int64 if op == "sum" and not _is_continuous(x.dtype) else x.dtype)
        if wanted != x.dtype:
            x = ShardedTensor(x.local.to(wanted), x.spec)
        dims, keepdim = _dims(args, kwargs)
        return _reduced(x, dims, keepdim, _limit(x.dtype, fill), op, reduce)

    return rule


def _is_continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


_sum = _reduction(0.0, "sum", lambda x, dims, keep: x.sum(dims, keepdim=keep))
_max = _reduction(-math.inf, "max", lambda x, dims, keep: x.amax(dims, keepdim=keep))
_min = _reduction(math.inf, "min", lambda x, dims, keep: x.amin(dims, keepdim=keep))


def _mean(func: Any, args: Any, kwargs: Any) -> Any:
    if not _is_sharded(args[0]):
        return _gather(func, args, kwargs)
    total = _sum(func, args, kwargs)
    return total.div_(args[0].numel() // max(total.numel(), 1))


def _truth(func: Any, args: Any, kwargs: Any) -> Any:
    if not _is_sharded(args[0]):
        return _gather(func, args, kwargs)
    x = ShardedTensor((args[0].local != 0).to(torch.uint8), args[0].spec)
    dims, keepdim = _dims(args, kwargs)
    if "any" in func._schema.name:
        return _reduced(x, dims, keepdim, 0, "max", lambda x, dims, keep: x.amax(dims, keepdim=keep)).bool()
    return _reduced(x, dims, keepdim, 1, "min", lambda x, dims, keep: x.amin(dims, keepdim=keep)).bool()


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    if not _is_sharded(args[0]):
        return _gather(func, args, kwargs)
    _watch(args)
    x, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dims, keepdim = _dims(args, kwargs, 2)
    [norm] = _norms([x], float(2 if order is None else order), dims, keepdim)
    return norm.to(kwargs.get("dtype") or x.dtype)


def _foreach_norm(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """One all-reduce for each group of ranks and device, however many tensors there are."""
    tensors, order = args[0], float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    norms: list[Any] = [None] * len(tensors)
    kinds: dict[Any, list[int]] = {}
    for i, each in enumerate(tensors):
        kinds.setdefault((each.spec.ranks.group, each.device) if _is_sharded(each) else None, []).append(i)
    for kind, chosen in kinds.items():
        alike = [tensors[i] for i in chosen]
        of_kind = _norms(alike, order) if kind else foreach_norm([*map(_plain, alike)], order)
        for i, norm in zip(chosen, of_kind, strict=True):
            norms[i] = norm.to(kwargs.get("dtype") or tensors[i].dtype)
    return norms


def _norms(tensors: Sequence[ShardedTensor], order: float, dims: Any = None, keepdim: bool = False) -> Sequence[Tensor]:
    """Norms of sharded tensors of one group, in at least float32: powers are summed, or extremes taken, over ranks."""
    first = tensors[0]
    precise = torch.promote_types(first.dtype, torch.float32)
    op, fill = "sum", 0.0
    power, root = (1.0, 1.0) if math.isinf(order) or order == 0 else (order, 1 / order)
    if math.isinf(order):
        op, fill = ("max", 0.0) if order > 0 else ("min", math.inf)
    elif order < 0:
        fill = math.inf
    if dims is not None and len(dims) and len(dims) < first.dim():

        def reduce(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
            return torch.linalg.vector_norm(x, order, dims, keepdim, dtype=precise) ** power

        return [_reduced(first, dims, keepdim, fill, op, reduce) ** root]
    stored = [i for i, each in enumerate(tensors) if each.local.numel()]
    powers = first.local.new_full((len(tensors),), math.inf if op == "min" else 0.0, dtype=precise)
    if stored:
        here = torch.stack(foreach_norm([tensors[i].local for i in stored], order, dtype=precise)) ** power
        at = torch.tensor(stored, device=here.device)
        powers = here if len(stored) == len(tensors) else powers.index_copy(0, at, here)
    total = first.spec.all_reduce(powers, op) ** root
    return [each.view([1] * first.dim()) for each in total.unbind()] if keepdim else total.unbind()


def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    one, other = args
    spec = one.spec if _is_sharded(one) else other.spec if _is_sharded(other) else None
    if spec is None:
        return _gather(func, args, kwargs)
    if one.shape != other.shape:
        return False
    same = torch.equal(_operand(spec, one), _operand(spec, other))
    return bool(spec.all_reduce(torch.tensor([same], dtype=torch.uint8, device=one.device), "min").item())


def _unscale(func: Any, args: Any, kwargs: Any) -> None:
    """Unscale local gradients; the ranks agree whether any of them has an infinity or NaN."""
    grads, found_inf, inv_scale = args
    func([each.local if _is_sharded(each) else each for each in grads], found_inf, inv_scale)
    sharded = [each for each in grads if _is_sharded(each)]
    _bump([each.local for each in sharded])
    for spec in {each.spec.ranks: each.spec for each in sharded}.values():
        found_inf.copy_(spec.all_reduce(found_inf, "max"))


_RULES: dict[Any, Rule] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
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
    aten.is_pinned.default: _local_only,
    aten.record_stream.default: _local_only,
    aten.is_same_size.default: lambda func, args, kwargs: args[0].shape == args[1].shape,
    aten._has_compatible_shallow_copy_type.default: lambda func, args, kwargs: type(args[0]) is type(args[1]),
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.amax.default: _max,
    aten.max.default: _max,
    aten.amin.default: _min,
    aten.min.default: _min,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.any.default: _truth,
    aten.any.dim: _truth,
    aten.any.dims: _truth,
    aten.all.default: _truth,
    aten.all.dim: _truth,
    aten.all.dims: _truth,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.equal.default: _equal,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
