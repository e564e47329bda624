"""`ShardedTensor`: a tensor of the full shape, for C++ and Python, of which this rank stores one range of elements.

    shape, dim, numel, stride    of the full tensor, which is contiguous
    local                        what this rank stores, 1-D: memory of the unit's shard, maybe without elements
    spec                         which elements these are, on which ranks: a `ShardSpec`

Parameters of sharded units, their gradients and their optimizer state are sharded tensors. What stock code does with
them gives what it gives on one process, or raises; all ranks must run the same operators in the same order.

| operation                                         | what it does                                                     |
| ------------------------------------------------- | ---------------------------------------------------------------- |
| `to_local()`, `full_tensor()`                     | shares memory; gathers, on all ranks                             |
| elementwise, in place or with `out=`              | on local data; plain operands are cut to it                      |
| elementwise, new                                  | sharded, if all tensors are; with plain ones, gathered           |
| `_foreach_*`, `_fused_*`                          | on local data; lists with plain tensors among them are split     |
| `detach`, `clone`, `to`, `*_like`, `new_*`        | sharded in the same way                                          |
| sum, mean, norm, amax, amin, any, all, with `dim` | on local rows, then one all-reduce; plain, equal on all ranks    |
| `_foreach_norm`, `clip_grad_norm_`                | one all-reduce for each group of ranks                           |
| unscaling by `GradScaler`                         | local, then the ranks agree whether anything overflowed          |
| `equal`                                           | local, then one all-reduce                                       |
| random fills                                      | every rank draws all elements, as one process does               |
| other views                                       | lazy: reading gathers, writing gathers and writes back           |
| all others (`mm`, `svd`, `var`, ...)              | gather, compute on every rank, write back what was written       |
| `.numpy()`, `.tolist()`                           | refused: call `full_tensor()`                                    |
| `p.data = x`                                      | `p` has the values of `x`, cut to this rank; `x` shares memory   |
| pickle, deepcopy                                  | local data and whose part it is; used on another rank, it raises |
| torch.distributed.checkpoint                      | reads and writes local data where it lies                        |

Gradients are exact as well, see Note [Gradients of what is computed from sharded parameters] in sharded_operands.py.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile.core._torch import (
    NO_TORCH_FUNCTION,
    change_wrapper,
    never_compile,
    new_wrapper,
    register_foreach_type,
    set_plain_grad,
    swap_wrapper,
)
from fsdp_compile.core.shard_spec import Chunk, FlatSharding, ShardRanks, ShardSpec
from fsdp_compile.core.tensor_parallel import TensorParallel

_SHAPE = operator.attrgetter("shape")


class FlatShard:
    """The placement of a sharded tensor: each rank stores one range of the flattened elements.

    DTensor knows no such placement; this one answers what code asks of placements.

    Attributes:
        ranges: for each rank the first element that it stores, and how many.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges = tuple(ranges)

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether it is sharded, as a DTensor says of its dimension 0."""
        return dim in (None, 0)

    def is_replicate(self) -> bool:
        """Whether all ranks store the same: False."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether it is to be reduced: False."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatShard) and other.ranges == self.ranges

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __repr__(self) -> str:
        return f"FlatShard(ranges={self.ranges})"


class ShardedTensor(Tensor):
    """A tensor of shape `spec.shape`, of which this rank stores `local`, 1-D `[spec.numel]`. See the module's table."""

    spec: ShardSpec
    __torch_function__ = NO_TORCH_FUNCTION

    @functools.cached_property
    def local(self) -> Tensor:
        """What this rank stores, 1-D `[spec.numel]`. Only gradients lack it until someone asks: see `of_each`."""
        segment: Tensor = vars(self)["_flat"].segment_of(self.spec)
        return segment

    @staticmethod
    def __new__(cls, local: Tensor, spec: ShardSpec, requires_grad: bool = False) -> "ShardedTensor":
        """A sharded tensor over `local`, whose dtype and device it has; nothing is copied."""
        self: ShardedTensor = new_wrapper(
            cls, spec.shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        self.local, self.spec = local, spec
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def of_each(cls, flat: "FlatGradient") -> list["ShardedTensor"]:
        """One sharded tensor for each parameter of a flat gradient, which is split when one is looked at."""
        new = functools.partial(new_wrapper, cls, dtype=flat.grad.dtype, device=flat.grad.device)
        made: list[ShardedTensor] = list(map(new, map(_SHAPE, flat.specs)))
        for tensor, spec in zip(made, flat.specs, strict=True):
            tensor.spec, tensor._flat = spec, flat  # type: ignore[attr-defined]  # read by `local`
        return made

    # torch's stub declares a static method without `func`.
    @classmethod
    @never_compile
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's has no types
        return _rules()(func)(func, args, kwargs or {})

    # --- as a DTensor -------------------------------------------------------------------------------------------------

    def to_local(self) -> Tensor:
        """What this rank stores, 1-D; it shares memory with this tensor."""
        return self.local

    def full_tensor(self) -> Tensor:
        """The full tensor, plain, on every rank: one all-gather, in which all ranks take part."""
        return self.spec.gather(self.local)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks that it is sharded over, 1-D."""
        return self.spec.mesh(self.device.type)

    @property
    def placements(self) -> tuple[FlatShard, ...]:
        """How it is sharded, for people to read."""
        return (FlatShard(self.spec.ranges),)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None, **_: Any
    ) -> Any:
        """The full tensor as a replicated DTensor, the only placement of DTensors that this can be turned into.

        Raises:
            ValueError: another mesh or another placement was asked for.
        """
        from torch.distributed.tensor import DTensor, Replicate

        if device_mesh not in (None, self.device_mesh) or list(placements or [Replicate()]) != [Replicate()]:
            raise ValueError(
                f"placements: expected [Replicate()] on the same mesh, found {placements} on {device_mesh}; call "
                f"full_tensor(), then distribute_tensor"
            )
        return DTensor.from_local(self.full_tensor(), self.device_mesh, [Replicate()], run_check=False)

    # --- as a tensor --------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        """This tensor without autograd; it shares memory."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        check_full_shape(self, value, "to change this rank's elements alone, copy into to_local(); ")
        if isinstance(value, ShardedTensor) and not value.spec.same_ranges(self.spec):
            value.spec.ranks.check_here()
            raise ValueError(
                f"data: expected a plain tensor or one that is sharded in the same way, found {value.spec}; call "
                f"full_tensor() on it"
            )
        local = value.local if isinstance(value, ShardedTensor) else self.spec.local_of(value.detach())
        set_local(self, local, self.spec)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused: it would be this rank's part."""
        raise TypeError(_REFUSED.format("numpy()", "numpy()"))

    def tolist(self) -> NoReturn:
        """Refused: it would be this rank's part."""
        raise TypeError(_REFUSED.format("tolist()", "tolist()"))

    def __array__(self, dtype: Any = None) -> NoReturn:
        raise TypeError(_REFUSED.format("conversion to an array", "numpy()"))

    def data_ptr(self) -> int:
        """The address of this rank's elements."""
        return self.local.data_ptr()

    def is_pinned(self, device: Any = None) -> bool:
        """Whether this rank's elements are in pinned memory."""
        return self.local.is_pinned()

    def share_memory_(self) -> "ShardedTensor":
        """Move this rank's elements to shared memory."""
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
                raise RuntimeError("deepcopy: expected a leaf, found the result of a computation; detach() it first")
            copied = type(self)(self.local.detach().clone(), self.spec, self.requires_grad)
            copied._is_param = isinstance(self, nn.Parameter)
            if self.grad is not None:
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

    def view_of(self, chunk: Chunk) -> Tensor:
        """One of `spec.chunks` in its n-D shape; it shares memory."""
        return self.local.detach()[chunk.start : chunk.start + chunk.numel].view(chunk.sizes)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return list(self.spec.storage_metadata)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.spec.storage_metadata
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for chunk in self.spec.chunks:
            if chunk.offsets == index.offset:
                return self.view_of(chunk)
        expected = [chunk.offsets for chunk in self.spec.chunks]
        raise ValueError(
            f"{index.fqn}: expected the offsets of one of this rank's chunks, {expected}, found {index.offset}"
        )


class FlatGradient:
    """The gradient of a flat shard, that of its parameters, which share its memory.

    Args:
        grad: 1-D, laid out as the shard.
        specs: for each parameter how it is sharded.
        split: splits `grad` into one segment for each parameter.
    """

    def __init__(self, grad: Tensor, specs: Sequence[ShardSpec], split: Callable[[Tensor], list[Tensor]]) -> None:
        self.grad, self.specs, self._split = grad, specs, split
        self._segments: dict[int, Tensor] = {}  # by the id of a parameter's spec

    def segment_of(self, spec: ShardSpec) -> Tensor:
        """The segment of the parameter that is sharded as `spec`, one of `specs`, says."""
        if not self._segments:
            self._segments = dict(zip(map(id, self.specs), self._split(self.grad), strict=True))
        return self._segments[id(spec)]

    @staticmethod
    def of(params: Sequence[nn.Parameter]) -> "FlatGradient | None":
        """The one whose segments the gradients of all `params` are; None if any has another gradient, or none."""
        shared: FlatGradient | None = None
        for param in params:
            grad = param.grad
            flat: FlatGradient | None = vars(grad).get("_flat") if type(grad) is ShardedTensor else None
            if flat is None or flat is not (shared or flat) or vars(grad)["spec"] is not vars(param)["spec"]:
                return None
            own = vars(grad).get("local")  # if somebody has looked, or has assigned to its `data`
            if own is not None and own is not flat.segment_of(vars(param)["spec"]):
                return None
            shared = flat
        return shared


_REFUSED = (
    "{}: expected a plain tensor, found one of which this rank stores a part; call full_tensor().{} on all ranks, or "
    "to_local() for this rank's part"
)


@functools.cache
def _rules() -> Callable[[Any], Callable[..., Any]]:
    """What gives the rule of an operator. Imported at the first operator: rules make sharded tensors."""
    from fsdp_compile.core.sharded_ops import rule_of

    return rule_of


def check_full_shape(tensor: ShardedTensor, data: Tensor, instead: str = "") -> None:
    """Raise ValueError unless `data`, which becomes the data of `tensor`, has its full shape; `instead`: what to do."""
    if data.shape != tensor.shape:
        raise ValueError(
            f"data: expected a tensor of the full shape {tuple(tensor.shape)}, found {tuple(data.shape)}; {instead}to "
            f"change the shape, as resize_token_embeddings does, do that before fully_shard"
        )


def _unpickled(kind: type, local: Tensor, spec: ShardSpec, requires_grad: bool, is_param: bool) -> ShardedTensor:
    tensor: ShardedTensor = kind(local, spec, requires_grad)
    tensor._is_param = is_param
    return tensor


torch.serialization.add_safe_globals([_unpickled, ShardedTensor, ShardSpec, ShardRanks, FlatSharding, TensorParallel])


# --- parameters that become sharded tensors and change ----------------------------------------------------------------


def set_grad(param: nn.Parameter, grad: Tensor) -> Tensor:
    """Let `param.grad` be `grad`, of the parameter's shape and any dtype and device; return what it is (E-GRAD-2).

    It shares memory with `grad`, and is `grad` itself where dtype and device are those of the parameter.
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


def set_local(tensor: Tensor, local: Tensor, spec: ShardSpec, kind: type[ShardedTensor] | None = None) -> None:
    """Let `tensor`, plain or a sharded tensor, be one of class `kind` over `local`: the same object.

    Its attributes stay, and hooks on it. Autograd's node for a parameter stays too, unless dtype or device change.
    """
    kind = kind or (type(tensor) if isinstance(tensor, ShardedTensor) else ShardedTensor)
    if not isinstance(tensor, ShardedTensor):
        swap_wrapper(tensor, kind(local, spec, tensor.requires_grad))
    elif (tensor.dtype, tensor.device) != (local.dtype, local.device):
        change_wrapper(tensor, ShardedTensor(local, spec))
    vars(tensor).update(local=local, spec=spec)
    if type(tensor) is not kind:
        tensor.__class__ = kind
