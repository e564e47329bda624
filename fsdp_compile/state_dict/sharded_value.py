"""`ShardedValue`: a tensor of the original shape of which this rank stores some elements, as state dicts hold it.

state = model.state_dict()                       {"blocks.0.weight": ShardedValue of shape (64, 96), ...}
torch.distributed.checkpoint.save(state, ...)    every rank writes its chunks, under original names and shapes
torch.distributed.checkpoint.load(state, ...)    every rank reads its chunks, straight into its shard
"""

# Note [Values in sharded state dicts]
# A `ShardedValue` is a DTensor to torch, so that code which stages, offloads or gathers DTensors does so here too. No
# placement of DTensor describes a range of the flattened tensor, however. The value claims to be replicated, which is
# the placement with the fewest consequences, and overrides every operation that would act on that claim. Operations
# that only ask (shape, dtype, device) run as on any tensor; those that checkpoints need (copy_, to, clone, detach) act
# on the local elements; all others raise, because computing with this rank's elements alone would be silently wrong.
# Code that makes another DTensor "like this one" gets a replicated DTensor with all elements, which can be loaded too.
# A value shares its memory with the shard: loading into it changes the parameter, and saving it copies nothing.

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_compile.comm import collectives
from fsdp_compile.core.shard_spec import Chunk, FlatSharding
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.core.unshard_spec import shard_order
from fsdp_compile.state_dict._torch import DTensorSpec, call_plainly, new_dtensor, replicated_spec


class ShardSpec:
    """What this rank stores of a sharded tensor, or of a scalar that belongs to that tensor, such as a step count.

    A state dict of a large model has thousands of values and is made anew for each save and load. What follows from
    shapes and offsets alone is computed here, once for all values that are sharded alike.

    Args:
        sharding: how the tensor is sharded.
        mesh: the ranks, 1-D.
        is_scalar: whether this describes a scalar, of which every rank that stores some of the tensor has a copy.
    """

    def __init__(self, sharding: FlatSharding, mesh: DeviceMesh, is_scalar: bool = False) -> None:
        self.sharding, self.mesh, self.is_scalar = sharding, mesh, is_scalar
        self.shape = () if is_scalar else sharding.shape
        self._dtensor_specs: dict[torch.dtype, DTensorSpec] = {}

    @cached_property
    def _rank_and_range(self) -> tuple[int, int, int]:
        coordinate = self.mesh.get_coordinate()
        if not coordinate:
            raise RuntimeError(f"mesh: expected one that this rank is in, found {self.mesh}; pass its own mesh")
        return coordinate[0], *self.sharding.local_range(coordinate[0])

    @property
    def first(self) -> int:
        """Index of the first element that this rank stores, in the flattened tensor; 0 if it stores none."""
        return self._rank_and_range[1]

    def chunks_of(self, rank: int) -> tuple[Chunk, ...]:
        """What `rank` stores, as chunks."""
        if self.is_scalar:
            return (Chunk((), (), 0),) if self.sharding.local_range(rank)[1] else ()
        return self.sharding.chunks(rank)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """What this rank stores, as chunks."""
        return self.chunks_of(self._rank_and_range[0])

    @cached_property
    def numel(self) -> int:
        """How many elements this rank stores."""
        return sum(chunk.numel for chunk in self.chunks)

    def local_of(self, full: Tensor) -> Tensor:
        """What this rank stores of a tensor of the full shape, 1-D; a view where `full` is contiguous."""
        first = 0 if self.is_scalar else self.first
        return full.reshape(-1)[first : first + self.numel]

    @cached_property
    def storage_metadata(self) -> list[ChunkStorageMetadata]:
        """The chunks as DCP describes them."""
        return [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in self.chunks]

    @property
    def is_written(self) -> bool:
        """Whether this rank writes what it stores. Of the copies of a scalar, that of the rank with the first element.

        If several ranks offered their copies, DCP would choose the same rank for all of them, which then writes longer.
        """
        return not self.is_scalar or self.first == 0

    def dtensor_spec(self, dtype: torch.dtype) -> DTensorSpec:
        """What a DTensor with these values says of itself."""
        if dtype not in self._dtensor_specs:
            self._dtensor_specs[dtype] = replicated_spec(self.mesh, self.shape, _strides(self.shape), dtype)
        return self._dtensor_specs[dtype]

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardSpec, (self.sharding, self.mesh, self.is_scalar)  # without what is computed from these


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


# --- the value --------------------------------------------------------------------------------------------------------


class ShardedValue(DTensor):
    """A tensor of which each rank of a mesh stores one range of the flattened elements, as `spec` says.

    It may also be a scalar that belongs to such a tensor. See Note [Values in sharded state dicts].

    Args:
        local: what this rank stores, 1-D `[n]` with n >= 0; it is not copied. For a scalar `[1]` or `[0]`.
        spec: what that is of the tensor; one object for all values that are sharded alike.

    Raises:
        ValueError: `local` does not have the shape that `spec` says.
    """

    spec: ShardSpec

    def __new__(cls, local: Tensor, spec: ShardSpec) -> "ShardedValue":
        """To torch this is a DTensor of the full shape, with the dtype of `local`."""
        if local.shape != (spec.numel,):
            raise ValueError(f"local: expected shape ({spec.numel},) for {spec.sharding}, found {tuple(local.shape)}")
        value: ShardedValue = new_dtensor(cls, local, spec.dtensor_spec(local.dtype))
        value.spec = spec
        return value

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def local(self) -> Tensor:
        """What this rank stores, 1-D: memory of the shard, not a copy."""
        return self._local_tensor

    def view_of(self, chunk: Chunk) -> Tensor:
        """One of `spec.chunks` in its n-D shape: memory of the shard, not a copy.

        On the CPU its storage has exactly its size: writers copy a tensor that is smaller than its storage.
        """
        elements = self.local[chunk.start : chunk.start + chunk.numel]
        if elements.device.type == "cpu":
            start = elements.storage_offset() * elements.element_size()
            storage = elements.untyped_storage()[start : start + elements.nbytes]
            return torch.empty(0, dtype=elements.dtype).set_(storage, 0, chunk.sizes, _strides(chunk.sizes))
        return elements.view(chunk.sizes)

    # What torch.distributed.checkpoint asks for:

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        if not self.spec.is_written:
            return []
        properties = TensorProperties.create_from_tensor(self.local)
        size = torch.Size(self.spec.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.spec.storage_metadata
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return list(self.spec.storage_metadata)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for chunk in self.spec.chunks:
            if chunk.offsets == index.offset:
                return self.view_of(chunk)
        expected = [chunk.offsets for chunk in self.spec.chunks]
        raise ValueError(
            f"{index.fqn}: expected the offsets of one of this rank's chunks, {expected}, found {index.offset}"
        )

    # What DTensor has beside tensor functions:

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The tensor in its original shape, on every rank of the mesh: one all-gather, in which all take part."""
        mesh, spec = self.device_mesh, self.spec
        sizes = [sum(chunk.numel for chunk in spec.chunks_of(rank)) for rank in range(mesh.size())]
        kind = mesh.device_type
        device = self.local.device if self.local.device.type == kind else torch.device(kind)
        sent = self.local.new_zeros(max(sizes), device=device)
        sent[: self.local.numel()] = self.local
        rows = collectives.all_gather(sent, mesh.size(), mesh.get_group().group_name).view(mesh.size(), -1)
        shards = [row[:size] for row, size in zip(rows, sizes, strict=True)]
        if spec.is_scalar:
            return torch.cat(shards)[0]
        in_order = sorted(range(mesh.size()), key=lambda rank: spec.sharding.local_range(rank)[0])
        return torch.cat([shards[rank] for rank in in_order]).view(self.shape)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None, **_: Any
    ) -> DTensor:
        """The full tensor as a replicated DTensor, the only placement that this can be turned into.

        Raises:
            ValueError: another mesh or another placement was asked for.
        """
        if device_mesh not in (None, self.device_mesh) or list(placements or [Replicate()]) != [Replicate()]:
            raise ValueError(
                f"placements: expected [Replicate()] on the same mesh, found {placements} on {device_mesh}; call "
                f"full_tensor(), then distribute_tensor"
            )
        return DTensor.from_local(self.full_tensor(), self.device_mesh, [Replicate()], run_check=False)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Itself: what this rank stores has no n-D shape. `local` is the same as a 1-D tensor."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HANDLERS:
            return _HANDLERS[name](*args, **(kwargs or {}))
        if name in _QUERIES or (name == "__get__" and func.__self__.__name__ not in _COMPUTED):
            return call_plainly(func, types, args, kwargs)
        raise RuntimeError(
            f"{name or func}: expected plain tensors, found a ShardedValue, of which this rank stores a shard; call "
            f"full_tensor() on all ranks, or load it with load_state_dict of a sharded model or with "
            f"torch.distributed.checkpoint"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedValue":
        copied = memo[id(self)] = ShardedValue(self.local.clone(), self.spec)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ShardedValue, (self.local.clone(), self.spec)

    def __repr__(self) -> str:  # type: ignore[override]  # as in DTensor: without Tensor's argument
        return f"ShardedValue(shape={self.spec.shape}, local={self.local}, chunks={self.spec.chunks})"


def _to(value: ShardedValue, *args: Any, **kwargs: Any) -> ShardedValue:
    moved = value.local.to(*args, **kwargs)
    return value if moved is value.local else ShardedValue(moved, value.spec)


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, ShardedValue):
        raise RuntimeError(
            "copy_: expected a plain tensor to copy from, found a ShardedValue, of which this rank stores a shard; "
            "call full_tensor() on all ranks"
        )
    if source.shape != target.shape:
        raise ValueError(f"copy_: expected shape {tuple(target.shape)}, found {tuple(source.shape)}")
    target.local.copy_(source.local if isinstance(source, ShardedValue) else target.spec.local_of(source), non_blocking)
    return target


_HANDLERS: dict[str, Callable[..., Any]] = {
    "data_ptr": lambda value: 0,  # it has no memory of its own; torch would take the offset of `local` for an address
    "to": _to,
    "cpu": lambda value, *_, **__: _to(value, "cpu"),
    "detach": lambda value: value,
    "clone": lambda value, *_, **__: ShardedValue(value.local.clone(), value.spec),
    "copy_": _copy_,
    "new_empty": lambda value, size, *, dtype=None, device=None, **_: ShardedValue(  # which a stager of DCP fills
        value.local.new_empty(value.local.shape, dtype=dtype, device=device), value.spec
    ),
}
_QUERIES = {"size", "dim", "numel", "nelement", "stride", "element_size", "ndimension", "is_floating_point"}
_QUERIES |= {"is_complex", "is_contiguous", "__hash__", "__len__", "storage_offset", "untyped_storage", "is_pinned"}
_COMPUTED = {"T", "H", "mT", "mH", "real", "imag", "data"}  # attributes whose values are computed

torch.serialization.add_safe_globals([ShardedValue, ShardSpec, FlatSharding])


# --- a parameter and the values that belong to it ---------------------------------------------------------------------


class ManagedParameter:
    """A sharded parameter: it turns local elements of the parameter, or of its optimizer state, into values and back.

    It is cheap to make: whatever it tells is looked up when it is asked for.
    """

    def __init__(self, unit: Unit, index: int) -> None:
        self.unit, self.index = unit, index

    @property
    def name(self) -> str:
        """The parameter's name in its unit."""
        return self.unit.names[self.index]

    @property
    def param(self) -> nn.Parameter:
        """The parameter itself."""
        return self.unit.params[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its original shape."""
        return self._spec(False).shape

    @property
    def is_stored_here(self) -> bool:
        """Whether this rank stores some of its elements."""
        return self._spec(False).numel > 0

    @property
    def first(self) -> int:
        """Index of the first of these elements in the flattened parameter; 0 if there are none."""
        return self._spec(False).first

    def _spec(self, is_scalar: bool) -> ShardSpec:
        """What the parameter's values, or its scalars, have in common. The unit owns it."""
        unit = self.unit
        key = (self.index, is_scalar, unit.device.type)
        spec = unit.shard_specs.get(key)
        if not isinstance(spec, ShardSpec):
            flat, at = unit.in_flat(self.index)
            layout = flat.layout
            order = shard_order(unit.stages)
            sharding = FlatSharding(layout.shapes[at], layout.offsets[at], layout.shard_numel, order)
            spec = unit.shard_specs[key] = ShardSpec(sharding, unit.mesh, is_scalar)
        return spec

    def value(self, local: Tensor) -> Tensor:
        """A value of the original shape over `local`, the elements `[n]` that this rank stores; not a copy.

        It is a plain tensor if the parameter has no elements: no rank stores any, yet a checkpoint must have its name.
        """
        if not math.prod(self.shape):
            return local.view(self.shape)
        return ShardedValue(local, self._spec(False))

    def scalar(self, local: Tensor) -> ShardedValue:
        """A scalar that belongs to the parameter, over `local`, of shape `()`, or `[0]` where it is absent."""
        return ShardedValue(local.view(-1), self._spec(True))

    def is_alike(self, value: Any) -> TypeGuard[ShardedValue]:
        """Whether `value` is sharded as the parameter is, so that no rank needs what other ranks store of it."""
        return isinstance(value, ShardedValue) and value.spec.sharding == self._spec(False).sharding

    def local_of(self, value: Tensor) -> Tensor | None:
        """What this rank stores, 1-D `[n]`, of a value of the original shape; None if it has another shape.

        It shares memory with the value if it can. All ranks gather a value that is distributed in another way.
        """
        if self.is_alike(value) and not value.spec.is_scalar:
            return value.local
        if tuple(value.shape) != self.shape:
            return None
        return self._spec(False).local_of(full_tensor(value))


def full_tensor(value: Any) -> Any:
    """A DTensor gathered from all ranks; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def managed(param: nn.Parameter) -> ManagedParameter | None:
    """`param` as a sharded parameter; None if all ranks have all of its elements, or while it is summoned."""
    member = unit_of(param)
    return ManagedParameter(*member) if member and member[0].is_sharded and member[0].summoned is None else None
