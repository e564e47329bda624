"""What operators do with sharded tensors: `RULES` maps each operator to its rule.

elementwise    on local data, as are foreach and fused operators
reductions     in sharded_reductions.py
views          lazy (`ShardedView`): reading one gathers, writing one gathers and writes back
random fills   every rank draws all elements
all others     gather, compute the same on every rank, write back what was written
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
# In place, an operand stands for all ranks, since the target does.

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.core._torch import FakeTensor, executes_formula, gives_gradients_of_leaves, leaves_of, never_compile
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.tensors._torch import ASKS_TO_DISPATCH
from fsdp_compile.tensors.shard_spec import ShardSpec
from fsdp_compile.tensors.sharded_tensor import RULES, FlatGradient, Rule, ShardedTensor, bump_version
from fsdp_compile.tensors.sharded_view import ShardedView
from fsdp_compile.tensors.tensor_parallel import is_dtensor
from fsdp_compile.tensors.unsharded_tensor import UnreducedGradient, UnshardedTensor, refuse_unreduced

aten = torch.ops.aten
log = logging.getLogger(__name__)


def is_sharded(value: Any) -> bool:
    """Whether this rank stores a part of `value`."""
    return type(value) is ShardedTensor


def operand(spec: ShardSpec, value: Any) -> Any:
    """`value` as an operand beside local data of tensors sharded by `spec`: tensors are cut to this rank's part."""
    if not isinstance(value, Tensor):
        return value
    if type(value) is ShardedTensor and value.spec.same_ranges(spec):
        return value.local
    full = plain(value)
    return spec.local_of(full) if full.dim() else full


def plain(value: Any) -> Any:
    """`value` with all elements: what is sharded, in whichever way, is gathered, anything else returned as it is."""
    if type(value) is UnreducedGradient:
        refuse_unreduced("an operator with sharded operands")
    if is_dtensor(value):
        with torch.no_grad():
            return value.detach().full_tensor()  # type: ignore[attr-defined]  # a DTensor
    if isinstance(value, ShardedTensor):
        return value.elements()
    return value.read() if type(value) is ShardedView else value


def wrap(result: Any, spec: ShardSpec) -> Any:
    """Wrap the local results of an operator as sharded tensors."""
    if isinstance(result, Tensor):
        wrapped = ShardedTensor(result, spec)
        if ASKS_TO_DISPATCH:  # autograd detaches results that it saves, and nothing tells who asks
            wrapped.is_dtensor = False
        return wrapped
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


def average_gradients(args: Iterable[Any]) -> None:
    """Average the plain gradients that parameters among `args` get, by a hook on each parameter.

    Raises:
        NotImplementedError: Dynamo traces this with gradients, and breaks the graph. Where collectives of its backward
            go depends on what a rank stores.
    """
    for arg in args:  # also without grad mode: the forward of a torch.autograd.Function has none
        if isinstance(arg, ShardedTensor):
            if isinstance(arg.local, FakeTensor):
                if arg.requires_grad and torch.is_grad_enabled():
                    raise NotImplementedError(
                        "a sharded parameter is used outside of its unit's forward, as from parameters(): the graph "
                        "breaks there; read module.name, which is gathered in the graph"
                    )
            elif arg.requires_grad and arg.is_leaf and "_averages" not in vars(arg):
                vars(arg)["_averages"] = arg.register_hook(partial(_average_gradient, weakref.ref(arg)))
        elif isinstance(arg, (list, tuple)):
            average_gradients(arg)


@never_compile
def _average_gradient(param_ref: Callable[[], Any], gradient: Tensor | None) -> Tensor | None:
    """Hook: turn a plain gradient into the mean over ranks, sharded as the parameter is."""
    if gradient is None or type(gradient) is ShardedTensor:  # None: under no_sync nothing is reduced
        return None
    if gradient.requires_grad:
        raise RuntimeError(
            "create_graph=True is not supported for a parameter that is used outside of its unit's forward: "
            "derivatives of second order are not averaged over ranks"
        )
    param: Any = param_ref()
    if not getattr(param.grad, "is_reduced", True):
        return None  # is added to what this rank has accumulated under no_sync, and reduced with it
    if type(param) is not ShardedTensor and param.is_alone:
        raise RuntimeError(
            "a backward within summon_full_params(rank0_only=True): other ranks, which store a part of the gradient, "
            "run none; compute under torch.no_grad(), or summon on all ranks"
        )
    full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    mean = param.spec.ranks.average(full)
    if type(param) is not ShardedTensor:  # within summon_full_params
        return mean.clone()
    if "_warned" not in vars(param):
        vars(param)["_warned"] = True
        warn_caller(
            f"parameter {param.spec.named()} is used outside of the forward of its unit, as where a module of the unit "
            f"runs alone: each operator gathers it anew, and its whole gradient is averaged; if that takes long, run "
            f"the sharded module, or call fully_shard on the module that runs alone"
        )
    return ShardedTensor(param.spec.local_of(mean).clone(), param.spec)


# --- gathering --------------------------------------------------------------------------------------------------------


@cache
def _log_once(name: str) -> None:
    log.info("%s gathers sharded tensors: every rank computes all of its result", name)


def gather(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on full tensors, on every rank, and write back what was written."""
    average_gradients(args)
    full: dict[int, Tensor] = {}

    def gathered(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(gathered, value))
        if not isinstance(value, (ShardedTensor, ShardedView)) and not is_dtensor(value):
            return value
        if id(value) not in full:
            if not isinstance(value, UnshardedTensor):
                _log_once(func._schema.name)
            full[id(value)] = value.elements() if isinstance(value, UnshardedTensor) else plain(value)
        return full[id(value)]

    _refuse_other_dtensors(func, args, kwargs)
    result = func(*map(gathered, args), **{key: gathered(value) for key, value in kwargs.items()})
    if not written_arguments(func):
        return result
    if func.namespace == "c10d":
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(each, torch.ScriptObject):  # a `Work`, before whose end nothing can be written back
                each.wait()  # type: ignore[attr-defined]  # methods of such objects are not declared
    originals: dict[int, Any] = {}
    for position in written_arguments(func):
        for each in leaves_of(
            args[position] if position < len(args) else kwargs.get(func._schema.arguments[position].name)
        ):
            if not isinstance(each, (ShardedTensor, ShardedView)):
                continue
            value = full[id(each)]
            if isinstance(each, UnshardedTensor):
                bump_version(each.local)  # whose memory was written
            elif value.shape == each.shape:
                each.write(value)
            else:
                raise NotImplementedError(
                    f"{func._schema.name} changes the shape of a sharded tensor in place: use it out of place, or "
                    f"edit the parameter within summon_full_params"
                )
            originals[id(value)] = each
    if isinstance(result, (list, tuple)):
        return type(result)(originals.get(id(each), each) for each in result)
    return originals.get(id(result), result)


def _refuse_other_dtensors(func: Any, args: Any, kwargs: Any) -> None:
    """Raise ValueError for a DTensor beside sharded tensors that is written, or that autograd needs a gradient of."""
    positions = written_arguments(func)
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for each in filter(is_dtensor, leaves_of(value)):
            if position in positions or each.requires_grad:
                raise ValueError(  # no TypeError, after which Python would ask the DTensor
                    f"{func._schema.name}: expected no other DTensor beside a sharded tensor where it is written or "
                    f"trained; call full_tensor() of the sharded one, and distribute_tensor"
                )


@cache
def written_arguments(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an operator writes. Schemas of `torch.distributed` do not say so."""
    if func.namespace == "c10d":
        return () if func._schema.name == "c10d::send" else (0,)
    arguments = enumerate(func._schema.arguments)
    return tuple(i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


# --- which rule an operator has ---------------------------------------------------------------------------------------

_ELEMENTWISE = ("copy_", "fill_", "zero_", "lerp", "lerp_", "masked_fill", "masked_fill_", "where")
_REFUSED = ("set_", "resize_", "resize_as_", "set_data")


def _choose_rule(func: Any) -> Rule:
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

_spec_of, _local_of = attrgetter("spec"), attrgetter("local")

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
    if set(map(type, targets)) == {ShardedTensor}:
        if func in _SCALING and (flats := FlatGradient.all_of(targets)):
            _scale_flats(func, flats, targets, *args[1:], **kwargs)
            return None
        return _foreach_local(func, args, kwargs, list(map(_spec_of, targets)))
    # Lists that mix sharded and plain tensors are split in two; plain targets take full operands. A new tensor is
    # sharded if an operand of its shape is.
    lists = [i for i, arg in enumerate(args) if isinstance(arg, (list, tuple)) and len(arg) == len(targets)]
    specs: dict[int, ShardSpec] = {}
    for i, target in enumerate(targets):
        for each in (target,) if mutable else (args[j][i] for j in lists):
            if is_sharded(each) and each.shape == target.shape:
                specs[i] = each.spec
    results: list[Any] = [None] * len(targets)
    for chosen in (list(specs), [i for i in range(len(targets)) if i not in specs]):
        some = [[arg[i] for i in chosen] if j in lists else arg for j, arg in enumerate(args)]
        if not chosen:
            continue
        if chosen[0] in specs:
            made = _foreach(func, some, kwargs) if mutable else _foreach_local(func, some, kwargs, list(specs.values()))
        else:
            made = func(*[[*map(plain, arg)] if isinstance(arg, list) else arg for arg in some], **kwargs)
        for i, each in zip(chosen, made or (), strict=False):
            results[i] = each
    return None if mutable else results


def _foreach_local(func: Any, args: Any, kwargs: Any, specs: list[ShardSpec]) -> Any:
    """On local data of tensors that are sharded by `specs`."""
    local = [_local_operands(arg, specs) for arg in args]
    result = func(*local, **{key: _local_operands(value, specs) for key, value in kwargs.items()})
    if not func._schema.is_mutable:
        return list(map(ShardedTensor, result, specs))
    for position in written_arguments(func):
        if position < len(args) and args[position]:
            bump_version(local[position])
            bump_version(args[position])
    return result


def _scale_flats(func: Any, flats: Sequence[FlatGradient], grads: Any, *args: Any, **kwargs: Any) -> None:
    of_flats = [flat.grad for flat in flats]
    func(of_flats, *args, **kwargs)
    bump_version(of_flats)
    bump_version(grads)


def multiply(grads: Sequence[Tensor], factor: Tensor) -> bool:
    """If `grads` are all segments of some flat gradients, multiply these by `factor`, 0-d; return whether they are."""
    flats = FlatGradient.all_of(grads)
    if not flats or any(flat.grad.device != factor.device for flat in flats):
        return False
    _scale_flats(aten._foreach_mul_.Tensor, flats, grads, factor)
    return True


def _local_operands(arg: Any, specs: list[ShardSpec]) -> Any:
    if not isinstance(arg, (list, tuple)) or not arg or not isinstance(arg[0], Tensor):
        return arg
    if set(map(type, arg)) == {ShardedTensor} and list(map(_spec_of, arg)) == specs:
        return list(map(_local_of, arg))
    return [operand(spec, value) for spec, value in zip(specs, arg, strict=True)]


# --- random fills -----------------------------------------------------------------------------------------------------


def _random(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw all elements on every rank, so that generators and results are those of one process."""
    target, *rest = args
    is_fill = func._schema.is_mutable or func._schema.name.endswith("_like")  # the values there do not matter
    if type(target) is not ShardedTensor or not is_fill or any(isinstance(each, Tensor) for each in rest):
        return gather(func, args, kwargs)
    drawn = func(target.local.new_empty(target.spec.shape), *rest, **kwargs)
    if not func._schema.is_mutable:
        return ShardedTensor(target.spec.local_of(drawn).clone(), target.spec)
    target.write(drawn)
    return target


# --- views and copies -------------------------------------------------------------------------------------------------


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    average_gradients(args)
    source = args[0]
    if type(source) not in (ShardedTensor, ShardedView):
        return gather(func, args, kwargs)
    is_view = type(source) is ShardedView
    base, steps = (source.base, source.steps) if is_view else (source, ())
    full = torch.empty(base.shape, dtype=base.dtype, device="meta")
    likes = func(source.outline if is_view else full, *args[1:], **kwargs)

    def step(view: Tensor, index: int | None = None) -> Any:
        views = func(view, *args[1:], **kwargs)
        return views if index is None else views[index]

    def viewed(like: Tensor, index: int | None = None) -> Tensor:
        view = ShardedView(base, (*steps, partial(step, index=index)), like)
        view.is_dtensor = source.is_dtensor and is_view and func is aten.detach.default
        is_all = view.geometry == (full.shape, full.stride(), 0)  # as of a matrix that was transposed twice
        return ShardedTensor(base.local, base.spec) if is_all else view

    return [viewed(like, i) for i, like in enumerate(likes)] if isinstance(likes, (list, tuple)) else viewed(likes)


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
    if type(args[0]) is ShardedView and args[0].is_dtensor and func not in _OF_SHAPES_ALONE:  # in a state dict
        return args[0].over(_like(func, (args[0].base, *args[1:]), kwargs))
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
    is_alike, is_strided = torch.Size(size) == like.shape, func is aten.new_empty_strided.default
    if is_strided:  # into which autograd copies a gradient, if a hook holds on to it
        is_alike = is_alike and tuple(rest[0]) == like.stride() and is_sharded(like)
    if is_alike and type(like) is ShardedView and like.is_dtensor:  # in a state dict
        return like.over(_new(func, (like.base, like.base.shape, *rest), kwargs))
    if is_alike and is_sharded(like):
        return ShardedTensor(func(like.local, [like.spec.numel], *[[1]] if is_strided else rest, **kwargs), like.spec)
    return func(torch.empty(0, dtype=like.dtype, device=like.device), size, *rest, **kwargs)


def _local_only(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].local, *args[1:], **kwargs) if is_sharded(args[0]) else gather(func, args, kwargs)


RULES.choose, RULES.gather = _choose_rule, gather
for _rule, _operators in (
    (_same, (aten.detach.default, aten.lift_fresh.default, aten.alias.default)),
    (_like, (aten.clone.default, aten._to_copy.default, aten._pin_memory.default)),
    (_like, (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)),
    (_new, (aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default)),
    (_new, (aten.new_empty_strided.default,)),
    (_local_only, (aten.is_pinned.default, aten.record_stream.default)),
    (lambda func, args, kwargs: args[0].shape == args[1].shape, (aten.is_same_size.default,)),
    (lambda func, args, kwargs: type(args[0]) is type(args[1]), (aten._has_compatible_shallow_copy_type.default,)),
):
    RULES |= dict.fromkeys(_operators, _rule)
