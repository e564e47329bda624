"""`ShardedTensor`: a tensor of the full shape, for C++ and Python, of which this rank stores one range of elements.

    shape, dim, numel, stride    of the full tensor, which is contiguous
    local                        what this rank stores, 1-D: memory of the unit's shard, maybe without elements
    spec                         which elements these are, on which ranks: a `ShardSpec`

Parameters of sharded units, their gradients and their optimizer state are sharded tensors. Stock code computes with
them what it computes on one process, or raises; all ranks must run the same operators in the same order.
sharded_rules.py has what each operator does, and Note [Gradients of what is computed from sharded parameters];
docs/sharded_tensors.md has the table for users.

unsharded_tensor.py has subclasses with all elements here, sharded_view.py lazy views.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement

from fsdp_compile.comm import collectives
from fsdp_compile.core._torch import (
    NO_TORCH_FUNCTION,
    FakeTensor,
    change_wrapper,
    never_compile,
    new_wrapper,
    register_foreach_type,
    set_plain_grad,
    swap_wrapper,
    unchanged,
    without_torch_function,
)
from fsdp_compile.core.traced_writes import note_written
from fsdp_compile.tensors._torch import COPIES_ROWS, asked_by
from fsdp_compile.tensors.as_dtensor import AsDTensor
from fsdp_compile.tensors.shard_spec import Chunk, FlatSharding, ShardRanks, ShardSpec
from fsdp_compile.tensors.tensor_parallel import TensorParallel, is_dtensor
from fsdp_compile.tensors.write_items import chunks_of, tensor_of, with_own_storage, write_items

_SHAPE, _GRAD, _FLAT, _SPEC, _NUMEL = map(operator.attrgetter, ("shape", "grad", "_flat", "spec", "numel"))


def bump_version(written: Tensor | Sequence[Tensor]) -> None:
    """Count a change of local data: nobody counts versions below `__torch_dispatch__` (2.11, 2.13)."""
    torch.autograd.graph.increment_version(written)
    if type(written) is FakeTensor:  # not isinstance: optimizers come here for each parameter
        note_written([written])
    elif type(written) is list and written and type(written[0]) is FakeTensor:
        note_written(written)


Rule = Callable[[Any, Any, Any], Any]  # func, args, kwargs -> what func returns


class Rules(dict[Any, Rule]):
    """The rule of each operator with sharded operands, filled by sharded_rules.py; `choose` finds a missing one."""

    choose: Callable[[Any], Rule]
    gather: Rule  # that which holds for any operator

    def __missing__(self, func: Any) -> Rule:
        rule = self[func] = self.choose(func)
        return rule


RULES = Rules()


class ShardedTensor(AsDTensor, Tensor):
    """A tensor of shape `spec.shape`, of which this rank stores `local`, 1-D `[spec.numel]`."""

    spec: ShardSpec
    __torch_function__ = NO_TORCH_FUNCTION

    @functools.cached_property
    def local(self) -> Tensor:
        """What this rank stores, 1-D `[spec.numel]`. A gradient made by `of_each` splits it off on first use."""
        flat: FlatGradient = vars(self)["_flat"]
        return flat.segments[id(self.spec)] if self.spec.numel else flat.grad[:0]

    @staticmethod
    def __new__(cls, local: Tensor, spec: ShardSpec, requires_grad: bool = False) -> "ShardedTensor":
        """A sharded tensor over `local`, with its dtype and device; nothing is copied."""
        self: ShardedTensor = new_wrapper(
            cls, spec.shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        self.local, self.spec = local, spec
        return self

    @classmethod
    def of_each(cls, flat: "FlatGradient") -> list["ShardedTensor"]:
        """One sharded tensor for each parameter of a flat gradient, which is split when one is first read."""
        new = functools.partial(new_wrapper, cls, dtype=flat.grad.dtype, device=flat.grad.device)
        made: list[ShardedTensor] = list(map(new, map(_SHAPE, flat.specs)))
        for tensor, spec in zip(made, flat.specs, strict=True):
            tensor.spec, tensor._flat = spec, flat  # type: ignore[attr-defined]  # read by `local`
        return made

    # torch's stub declares a static method without `func`.
    @classmethod
    @never_compile
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's has no types
        try:
            return RULES[func](func, args, kwargs or {})
        except RuntimeError as error:
            if getattr(error, "__notes__", ()):  # a collective has failed
                error.add_note(f"It is a part of {func}.")
            raise

    # --- as a DTensor: as_dtensor.py has the rest ---------------------------------------------------------------------

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """What this rank stores, 1-D, or `[rows, ...]` with `shards="rows"`; it shares memory with this tensor.

        Differentiable: each rank's elements get the gradient of what that rank computes from them.

        Raises:
            ValueError: `grad_placements` are given, which describe gradients of rows.
        """
        if grad_placements is not None:
            raise ValueError(f"grad_placements: {self.spec.named()}, stores a range of its elements, whose gradients "
                             f"are of that range; leave them out, or call full_tensor()")  # fmt: skip
        if asked_by() == COPIES_ROWS:
            return self
        local = _local_part(self) if is_tracked(self) else self.local
        return self.spec.rows_of(local, 0) if self.has_rows else local

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The full tensor, plain, on every rank: one all-gather, in which all ranks take part.

        Differentiable: the gradient is the mean over ranks of what each of them computes, as that of forward is.

        Args:
            grad_placements: for each dimension of `device_mesh` a `Partial()`: the gradient is the sum over ranks; or
                a `Replicate()`: they compute the same, which is the mean.

        Raises:
            ValueError: other `grad_placements`.
        """
        addends = self.addends(grad_placements) if grad_placements else 1
        if not is_tracked(self):
            device = self.device_mesh.device_type  # where this may come from, after which it was offloaded
            return self.spec.gather(self.local.to(device)) if self.is_cpu and device != "cpu" else self.elements()
        full = unchanged(self)
        if addends > 1:
            full.register_hook(lambda grad: grad * addends)
        return full

    def elements(self) -> Tensor:
        """The full tensor as `full_tensor` gathers it, without autograd."""
        return self.spec.gather(self.local)

    def write(self, full: Tensor) -> None:
        """Copy the elements of `full`, plain, into this tensor."""
        self.local.copy_(self.spec.local_of(full))
        bump_version(self.local)

    # --- as a tensor --------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        """This tensor without autograd; it shares memory."""
        return self.detach()

    @data.setter
    @never_compile
    def data(self, value: Tensor) -> None:
        if self.spec.is_whole and value.numel() == self.numel():  # (E-WB-4)
            value = value.reshape(self.shape)
        check_full_shape(self, value, "to change this rank's elements alone, copy into to_local(); ")
        if isinstance(value, ShardedTensor) and not value.spec.same_ranges(self.spec):
            value.spec.ranks.check_here()
            raise ValueError(f"data is sharded in another way, {value.spec}; call full_tensor() on it")
        if is_dtensor(value):
            value = value.full_tensor()
        local = value.local if isinstance(value, ShardedTensor) else self.spec.local_of(value.detach())
        set_local(self, local, self.spec)

    def numpy(self, *, force: bool = False) -> Any:
        """As `Tensor.numpy`. TypeError if this rank has only a part."""
        whole = self._whole()
        if self.requires_grad and not force:
            raise RuntimeError("numpy() of a tensor that requires grad; call detach() first")
        return whole.numpy(force=force)

    def tolist(self) -> Any:
        """As `Tensor.tolist`. TypeError if this rank has only a part."""
        return self._whole().tolist()

    def _whole(self) -> Tensor:
        if self.spec.is_whole:
            return self.local.view(self.shape)
        raise TypeError(
            "a sharded tensor cannot become an array or a list, as this rank has a part of it; call full_tensor() on "
            "all ranks first, or to_local() for this rank's part"
        )

    def data_ptr(self) -> int:
        """0, as of each DTensor: it has no memory in which its elements lie by its strides; `to_local()` has some."""
        return 0

    def storage(self) -> NoReturn:
        """Raise TypeError: what writes files by the storages of tensors would write this rank's part alone."""
        raise TypeError(
            f"expected full values to be written, found {self.spec.named()}, of which this rank stores a part; on all "
            f"ranks: full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
            f"cpu_offload=True)); then on the first one: model.save_pretrained(folder, state_dict=full)"
        )

    def share_memory_(self) -> "ShardedTensor":
        """Move this rank's elements to shared memory. Torch's own function would crash."""
        self.local.share_memory_()
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        first, numel = self.spec.first, self.spec.numel
        here = f"elements {first} to {first + numel - 1}" if numel else "no elements"
        what = "Parameter" if isinstance(self, nn.Parameter) else type(self).__name__
        return (
            f"{what}(shape={tuple(self.shape)}, dtype={self.dtype}, sharded over {self.spec.ranks.size} ranks, {here} "
            f"on rank {self.spec.ranks.rank}: {self.local.detach()}; full_tensor() gathers it)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTensor":
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("deepcopy of the result of a computation; detach() it first")
            copied = type(self)(self.local.detach().clone(), self.spec, self.requires_grad)
            copied._is_param = isinstance(self, nn.Parameter)
            if self.grad is not None and not copied._is_param:  # as torch copies them: parameters without gradients
                copied.grad = self.grad.__deepcopy__(memo)
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_param = isinstance(self, nn.Parameter)
        return _unpickled, (type(self), self.local.detach().clone(), self.spec, self.requires_grad, is_param)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["local"], self.spec

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], spec: Any, size: Any, stride: Any) -> "ShardedTensor":
        return cls(inner["local"], spec)

    # --- as torch.distributed.checkpoint asks: local data is read and written where it lies ---------------------------

    chunks = property(lambda self: self.spec.chunks)

    def view_of(self, chunk: Chunk) -> Tensor:
        """One of `chunks` in its n-D shape: memory of the shard, on a CPU in a storage without other bytes."""
        view = self.local.detach()[chunk.start : chunk.start + chunk.numel].view(chunk.sizes)
        return with_own_storage(view) if view.is_cpu else view

    __create_chunk_list__, __create_write_items__, __get_tensor_shard__ = chunks_of, write_items, tensor_of


def is_tracked(tensor: Tensor) -> bool:
    """Whether autograd records what is computed from it."""
    return tensor.requires_grad and torch.is_grad_enabled()


def has_hooks(param: Any) -> bool:
    """Whether users registered hooks on `param`; that of `average_gradients` in sharded_rules.py does not count."""
    own = "_averages" in vars(param)
    return param._post_accumulate_grad_hooks is not None or len(param._backward_hooks or ()) > own


class _LocalPart(torch.autograd.Function):
    """This rank's elements of a sharded tensor, 1-D, and their gradient. Replicas get the mean of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> Tensor:
        ctx.spec = tensor.spec
        return tensor.local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        replicas = ctx.spec.ranks.replicas
        with ctx.spec.waiting_for("all-reduce"):
            mean = grad if replicas is None else collectives.all_reduce(grad, replicas, "avg")
        return ShardedTensor(mean, ctx.spec)


@torch.compiler.disable
def _local_part(tensor: ShardedTensor) -> Tensor:
    part: Tensor = _LocalPart.apply(tensor)
    return part


class FlatGradient:
    """The gradient of a flat shard; the gradients of its parameters share its memory.

    Args:
        grad: 1-D, laid out as the shard.
        specs: for each parameter how it is sharded.
        split: splits `grad` into one segment for each parameter with elements here.
    """

    def __init__(self, grad: Tensor, specs: Sequence[ShardSpec], split: Callable[[Tensor], list[Tensor]]) -> None:
        self.grad, self.specs, self._split = grad, specs, split

    @functools.cached_property
    def segments(self) -> dict[int, Tensor]:
        """For each parameter with elements here its segment, by the id of its spec; split off on first use."""
        return dict(zip(map(id, filter(_NUMEL, self.specs)), self._split(self.grad), strict=True))

    @staticmethod
    def behind(params: Sequence[nn.Parameter], specs: Sequence[ShardSpec]) -> "list[FlatGradient]":
        """The flat gradients that the gradients of `params` are segments of, each once; [] if some gradient is none."""
        with without_torch_function():
            grads = list(map(_GRAD, params))
        flats = FlatGradient.of(grads)  # at every step of an optimizer: the work for each parameter runs in C
        return flats if flats and all(map(operator.is_, map(_SPEC, grads), specs)) else []

    @staticmethod
    def of(grads: Sequence[Tensor]) -> "list[FlatGradient]":
        """The flat gradients that `grads` are segments of, each once; [] if one of them is none."""
        try:
            return list(dict.fromkeys(map(_FLAT, grads)))
        except AttributeError:
            return []

    @staticmethod
    def all_of(grads: Sequence[Tensor]) -> "list[FlatGradient]":
        """The flat gradients all of whose segments `grads` are, and nothing else; [] if they are not."""
        flats = FlatGradient.of(grads)
        is_all = sum(len(flat.specs) for flat in flats) == len(grads) == len(set(map(id, map(_SPEC, grads))))
        return flats if is_all else []


def check_full_shape(tensor: ShardedTensor, data: Tensor, instead: str = "") -> None:
    """Raise ValueError unless `data`, to be assigned to `tensor.data`, has the full shape; `instead`: advice."""
    if data.shape != tensor.shape:
        raise ValueError(
            f"data: expected a tensor of the full shape {tuple(tensor.shape)}, found {tuple(data.shape)}; {instead}to "
            f"change the shape, as resize_token_embeddings does, do that before fully_shard"
        )


def _unpickled(kind: type, local: Tensor, spec: ShardSpec, requires_grad: bool, is_param: bool) -> ShardedTensor:
    tensor: ShardedTensor = kind(local, spec, requires_grad)
    tensor._is_param = is_param
    return tensor


_PICKLED = (_unpickled, ShardedTensor, ShardSpec, ShardRanks, FlatSharding, TensorParallel)
torch.serialization.add_safe_globals([*_PICKLED])
# Version 0.2 had these modules in core, where they still can be imported.
torch.serialization.add_safe_globals(
    [(each, f"{each.__module__.replace('.tensors.', '.core.')}.{each.__qualname__}") for each in _PICKLED]
)


# --- parameters that become sharded tensors and change ----------------------------------------------------------------


def gradients(params: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of those of `params` that have one."""
    with without_torch_function():
        return [grad for grad in map(_GRAD, params) if grad is not None]


def set_grad(param: nn.Parameter, grad: Tensor) -> Tensor:
    """Set `param.grad` to `grad`, of the parameter's shape and any dtype and device; return the new `.grad` (E-GRAD-2).
    It shares memory with `grad`, and is `grad` itself if dtype and device are those of the parameter.
    """
    if (grad.dtype, grad.device) == (param.dtype, param.device):
        param.grad = grad
        return grad
    if not isinstance(grad, ShardedTensor):
        return set_plain_grad(param, grad)
    local = torch.empty(grad.local.shape, dtype=param.dtype, device=param.device)
    param.grad = shown = ShardedTensor(local, grad.spec)
    set_local(shown, grad.local, grad.spec, type(grad))  # autograd does not look again
    return shown


register_foreach_type(ShardedTensor)

_moves = 0


def moves() -> int:
    """How often sharded tensors were given other memory: while that stays, each of them lies where it lay."""
    return _moves


def set_local(tensor: Tensor, local: Tensor, spec: ShardSpec, kind: type[ShardedTensor] | None = None) -> None:
    """Turn `tensor`, plain or sharded, into a sharded tensor of class `kind` over `local`: the same object.

    Its attributes and hooks stay. Autograd's node for a parameter stays too, unless dtype or device change.
    """
    global _moves
    _moves += 1
    kind = kind or (type(tensor) if isinstance(tensor, ShardedTensor) else ShardedTensor)
    if not isinstance(tensor, ShardedTensor):
        swap_wrapper(tensor, kind(local, spec, tensor.requires_grad))
    elif (tensor.dtype, tensor.device) != (local.dtype, local.device):
        change_wrapper(tensor, ShardedTensor(local, spec))
    vars(tensor).update(local=local, spec=spec)
    vars(tensor).pop("_flat", None)  # no segment of a flat gradient any more
    if type(tensor) is not kind:
        tensor.__class__ = kind
