"""What sharded tensors are to the operators that take them: local data, gathered tensors, or views not yet done.

Local      `operand` gives what stands beside the local data of another sharded tensor, `wrap` makes results sharded
Gathered   `gather` computes on full tensors, on every rank, and writes back what was written
Views      a `ShardedView` remembers how it follows from a sharded tensor; reading it gathers
Gradients  `average_gradients` sees to plain gradients of parameters, `averaged_in_backward` to those within formulas
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
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.core._torch import (
    NO_TORCH_FUNCTION,
    FakeTensor,
    executes_formula,
    gives_gradients_of_leaves,
    never_compile,
    new_wrapper,
)
from fsdp_compile.core.shard_spec import ShardSpec
from fsdp_compile.core.sharded_tensor import ShardedTensor
from fsdp_compile.core.unsharded_tensor import UnreducedGradient, UnshardedTensor, refuse_unreduced

log = logging.getLogger(__name__)

Rule = Callable[[Any, Any, Any], Any]  # func, args, kwargs -> what func returns

bump_version = torch.autograd.graph.increment_version  # nobody counts versions below `__torch_dispatch__` (2.11, 2.13)


def is_sharded(value: Any) -> bool:
    """Whether this rank stores a part of `value`."""
    return type(value) is ShardedTensor


def operand(spec: ShardSpec, value: Any) -> Any:
    """What `value`, anything, is beside local data of tensors that are sharded as `spec` says."""
    if type(value) is ShardedTensor:
        if value.spec is spec or value.spec.same_ranges(spec):
            return value.local
        value = value.full_tensor()
    elif not isinstance(value, Tensor):
        return value
    else:
        value = plain(value)
    return spec.local_of(value) if value.dim() else value


def plain(value: Any) -> Any:
    """`value`, anything, with all elements: a sharded tensor or a view of one is gathered."""
    if type(value) is ShardedTensor or type(value) is UnshardedTensor:
        return value.full_tensor()
    if type(value) is UnreducedGradient:
        refuse_unreduced("an operator with sharded operands")
    return value.read() if type(value) is ShardedView else value


def wrap(result: Any, spec: ShardSpec) -> Any:
    """What an operator gave for local data, as sharded tensors."""
    if isinstance(result, Tensor):
        return ShardedTensor(result, spec)
    return type(result)(wrap(each, spec) for each in result) if isinstance(result, (tuple, list)) else result


# --- gradients --------------------------------------------------------------------------------------------------------


def meets_data(tensors: list[Any]) -> bool:
    """Whether sharded tensors are combined with plain ones that may be this rank's data.

    Scalars that are tensors are, beside parameters and in backward. Optimizers also compute with such scalars, which
    are equal on all ranks.
    """
    if all(type(each) is ShardedTensor for each in tensors):
        return False
    scalars = executes_formula() or any(each.requires_grad for each in tensors)
    return any(type(each) not in (ShardedTensor, ShardedView) and (scalars or each.dim()) for each in tensors)


def averaged_in_backward(tensors: list[Any]) -> list[Any] | None:
    """Operands of a formula of autograd, the plain ones averaged over all ranks; None if that would not be right."""
    if torch.is_grad_enabled() or not executes_formula() or not gives_gradients_of_leaves(ShardedTensor, tensors):
        return None
    spec = next(each.spec for each in tensors if type(each) is ShardedTensor)
    return [
        _average(spec, each) if isinstance(each, Tensor) and not is_sharded(each) and each.is_floating_point() else each
        for each in tensors
    ]


def average_gradients(args: Iterable[Any]) -> None:
    """See to it that parameters among `args` get the mean over ranks of plain gradients.

    Raises:
        RuntimeError: the compiler traces this, and gradients are wanted. Where it puts collectives, in forward or in
            backward, depends on the size of what a rank stores.
    """
    for arg in args:  # also without grad mode: the forward of a torch.autograd.Function has none
        if type(arg) is ShardedTensor:
            if isinstance(arg.local, FakeTensor):
                if arg.requires_grad and torch.is_grad_enabled():
                    raise RuntimeError(
                        "expected a compiled forward to use parameters as `module.name`, which gives unsharded ones, "
                        "found it to use a sharded one, as from parameters(); compute that outside of what is compiled"
                    )
            elif arg.requires_grad and arg.is_leaf and "_averages" not in vars(arg):
                vars(arg)["_averages"] = arg.register_hook(_Averages(arg.spec))
        elif isinstance(arg, (list, tuple)):
            average_gradients(arg)


def has_hooks(param: Any) -> bool:
    """Whether users have hooks on `param`: those of `average_gradients` let sharded gradients pass."""
    own = "_averages" in vars(param)
    return param._post_accumulate_grad_hooks is not None or len(param._backward_hooks or ()) > own


class _Averages:
    """A hook on a parameter that turns a plain gradient into the mean over ranks, sharded as the parameter is."""

    def __init__(self, spec: ShardSpec) -> None:
        self.spec = spec

    @never_compile
    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or type(gradient) is ShardedTensor:  # None: under no_sync nothing is reduced
            return None
        if gradient.requires_grad:
            raise RuntimeError(
                "backward: expected create_graph=False, found True for a parameter that is used outside of its unit's "
                "forward; derivatives of second order are not averaged over ranks"
            )
        return ShardedTensor(self.spec.local_of(_average(self.spec, plain(gradient))).clone(), self.spec)


def _average(spec: ShardSpec, gradient: Tensor) -> Tensor:
    """The mean over all ranks of a plain tensor; of expanded dimensions, one element is sent."""
    distinct = gradient[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in gradient.stride())]
    return spec.ranks.average(distinct.contiguous()).expand(gradient.shape)


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
        if isinstance(value, (ShardedTensor, ShardedView)):
            if id(value) not in full:
                full[id(value)] = plain(value)
            return full[id(value)]
        return value

    result = func(*map(gathered, args), **{key: gathered(value) for key, value in kwargs.items()})
    if not func._schema.is_mutable:
        return result
    names = [argument.name for argument in func._schema.arguments]
    by_name = dict(zip(names, args, strict=False)) | kwargs
    originals: dict[int, Any] = {}
    for name in (names[position] for position in written_arguments(func)):
        value = by_name.get(name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, (ShardedTensor, ShardedView)):
                write_back(each, full[id(each)])
                originals[id(full[id(each)])] = each
    if isinstance(result, (list, tuple)):
        return type(result)(originals.get(id(each), each) for each in result)
    return originals.get(id(result), result)


@cache
def written_arguments(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple(i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def write_back(target: Any, full: Tensor) -> None:
    """Let `target` have the elements of `full`, which is what `plain(target)` gave, changed since."""
    if type(target) is ShardedView:
        target.write()
    elif type(target) is ShardedTensor:
        target.local.copy_(target.spec.local_of(full))
        bump_version(target.local)


# --- views ------------------------------------------------------------------------------------------------------------


class ShardedView(Tensor):
    """A view of a sharded tensor: `steps` lead from the full tensor to it. All ranks read and write it together."""

    base: ShardedTensor
    steps: tuple[Callable[[Tensor], Tensor], ...]
    _gathered: tuple[int, Tensor, Tensor] | None  # the base's version, its elements, and the view of them
    __torch_function__ = NO_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, base: ShardedTensor, steps: tuple[Callable[[Tensor], Tensor], ...], like: Tensor) -> "ShardedView":
        """A view of `base` of the shape and strides of `like`."""
        self: ShardedView = new_wrapper(
            cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=base.device
        )
        self.base, self.steps, self._gathered = base, steps, None
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
            write_back(self.base, full)
            self._gathered = (self.base.local._version, full, view)

    def full_tensor(self) -> Tensor:
        """The view's elements, plain, on every rank."""
        return self.read()

    numpy, tolist, __array__ = ShardedTensor.numpy, ShardedTensor.tolist, ShardedTensor.__array__

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return f"ShardedView(shape={tuple(self.shape)} of {self.base!r})"

    # torch's stub declares a static method without `func`.
    @classmethod
    @never_compile
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's has no types
        return ShardedTensor.__torch_dispatch__(func, types, args, kwargs)
