"""`ShardedValue`: the value in a state dict of a tensor of the original shape of which this rank stores some elements.

state = model.state_dict()                       {"blocks.0.weight": ShardedValue of shape (64, 96), ...}
torch.distributed.checkpoint.save(state, ...)    every rank writes its chunks, under original names and shapes
torch.distributed.checkpoint.load(state, ...)    every rank reads its chunks, straight into its shard
"""

# Note [Values in sharded state dicts]
# A `ShardedValue` shares its memory with the shard: loading into it changes the parameter, and saving it copies nothing
# and communicates nothing. To torch it is a DTensor, so that code which stages, offloads or gathers DTensors does so
# here too. No placement of DTensor describes a range of the flattened tensor: the value answers with a `FlatShard`, and
# overrides every operation that would act on a placement. Queries (shape, dtype, device) run as on any tensor; what
# checkpoints need (copy_, to, clone, detach) acts on the local elements; everything else computes with the value as a
# `ShardedTensor`, on all ranks together. Code that makes another DTensor "like this one" gets one that is sharded along
# dimension 0, which can be loaded too.
#
# Where the kind was set, as FSDP1 does, scripts expect what FSDP1 gives: rows of dimension 0 on each rank, in a DTensor
# or in torch's own ShardedTensor. Other ranks store a part of these rows, so `state_dict()` exchanges them at once, in
# one all-to-all for each unit (`torch_values`). A value that did so when `to_local()` is first called would wait for
# ever in a script that looks at one rank alone, which FSDP1's values allow. DCP's functions and
# `fsdp_compile.checkpoint` ask for the state themselves, and get a `ShardedValue` whatever is set.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_compile.comm import collectives
from fsdp_compile.comm._torch import group_named
from fsdp_compile.core._torch import StridedShard
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.state_dict._torch import (
    ChunkedTensor,
    DTensorSpec,
    TensorMeta,
    call_plainly,
    chunked_tensor,
    tree_map_only,
)
from fsdp_compile.tensors._torch import COPIES_ROWS, called_by
from fsdp_compile.tensors.shard_spec import Chunk, ShardSpec, chunks_of_view, exchange_rows
from fsdp_compile.tensors.sharded_tensor import ShardedTensor, ShardedView


def with_own_storage(tensor: Tensor) -> Tensor:
    """The memory of a contiguous CPU tensor over a storage without other bytes, which writers would copy or write."""
    start = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


# --- the value --------------------------------------------------------------------------------------------------------

Geometry = tuple[torch.Size, tuple[int, ...], int]
_SHARDED: Any = ShardedTensor  # a value does some things as sharded tensors do


class ShardedValue(DTensor):
    """A tensor of which each rank of a mesh stores one range of the flattened elements.

    See Note [Values in sharded state dicts].

    Args:
        local: what this rank stores, 1-D `[n]` with n >= 0; it is not copied.
        spec: which elements these are; one object for all values that are sharded alike.
        geometry: of a view of that tensor, as state-dict hooks make them: its shape, strides and offset.

    Raises:
        ValueError: `local` does not have the shape that `spec` says.
    """

    spec: ShardSpec
    geometry: Geometry | None

    def __new__(cls, local: Tensor, spec: ShardSpec, geometry: Geometry | None = None) -> "ShardedValue":
        """To torch this is a DTensor of the full shape and the dtype of `local`."""
        if local.shape != (spec.numel,):
            raise ValueError(f"local: expected shape ({spec.numel},) for {spec.sharding}, found {tuple(local.shape)}")
        shape, strides, _ = geometry or (spec.shape, None, 0)
        described: Any = spec.ranks.once(  # a state dict of a large model has thousands of values
            (mesh := spec.mesh(local.device.type), shape, local.dtype, strides),
            lambda: _dtensor_spec(mesh, shape, local.dtype, strides),
        )  # `placements` says what holds
        value: Any = DTensor.__new__(cls, local, described, requires_grad=False)
        value.spec, value.geometry = spec, geometry
        return value

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def local(self) -> Tensor:
        """What this rank stores, 1-D: memory of the shard, not a copy."""
        return self._local_tensor

    def over(self, local: Tensor) -> "ShardedValue":
        """The same over other memory."""
        return ShardedValue(local, self.spec, self.geometry)

    def as_tensor(self, local: Tensor | None = None) -> Any:
        """The sharded tensor, or view of one, that this is the value of; over other memory if `local` is given."""
        base = ShardedTensor(self.local if local is None else local, self.spec)
        return base.as_strided(*self.geometry) if self.geometry else base

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """What this rank stores, as chunks of the value."""
        if self.geometry is None:
            return self.spec.chunks
        shape, strides, offset = self.geometry
        outline = torch.empty(self.spec.shape, device="meta").as_strided(shape, strides, offset)
        return chunks_of_view(outline, self.spec.first, self.spec.numel) or ()

    def view_of(self, chunk: Chunk) -> Tensor:
        """One of `chunks` in its n-D shape: memory of the shard, on the CPU, unless transposed, with no other bytes."""
        if self.geometry is not None:
            local = self.local.detach()
            return local.as_strided(chunk.sizes, self.geometry[1], local.storage_offset() + chunk.start)
        view: Tensor = _SHARDED.view_of(self, chunk)
        return with_own_storage(view) if view.is_cpu else view

    # What torch.distributed.checkpoint asks for, on `view_of`:
    __create_write_items__ = _SHARDED.__create_write_items__
    __create_chunk_list__ = _SHARDED.__create_chunk_list__
    __get_tensor_shard__ = _SHARDED.__get_tensor_shard__

    # What DTensor has beside tensor functions:

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The tensor in its original shape on every rank of the mesh: one all-gather, which all ranks must call."""
        device = torch.device(self.device_mesh.device_type)
        local = self.local if self.local.device.type == device.type else self.local.to(device)
        full: Tensor = self.as_tensor(local).full_tensor()
        return full

    redistribute = _SHARDED.redistribute
    numpy, tolist, __array__ = _SHARDED.numpy, _SHARDED.tolist, _SHARDED.__array__

    def _whole(self) -> Any:
        return self.as_tensor()._whole()

    placements = _SHARDED.placements

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """What this rank stores, 1-D, as of a parameter: memory of the shard.
        For torch's own function that copies rows of full tensors into values it is the value, which takes its part.
        """
        return self if called_by(COPIES_ROWS) else self.local

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HANDLERS:
            return _HANDLERS[name](*args, **(kwargs or {}))
        if name in _QUERIES or (name == "__get__" and func.__self__.__name__ not in _COMPUTED):
            return call_plainly(func, types, args, kwargs)
        args, kwargs = tree_map_only(ShardedValue, ShardedValue.as_tensor, (args, kwargs or {}))
        return tree_map_only((ShardedTensor, ShardedView), value_in_state, func(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedValue":
        copied = memo[id(self)] = self.over(self.local.clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ShardedValue, (self.local.clone(), self.spec, *([self.geometry] if self.geometry else []))

    def __repr__(self) -> str:  # type: ignore[override]  # as in DTensor: without Tensor's argument
        return f"ShardedValue(shape={self.shape}, local={self.local}, chunks={self.chunks})"


def _dtensor_spec(mesh: DeviceMesh, shape: torch.Size, dtype: torch.dtype, strides: Any = None) -> DTensorSpec:
    strides = torch.empty(shape, device="meta").stride() if strides is None else strides
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=TensorMeta(shape, strides, dtype))


def _to_device(value: ShardedValue, *args: Any, **kwargs: Any) -> ShardedValue:
    moved = value.local.to(*args, **kwargs)
    return value if moved is value.local else value.over(moved)


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, ShardedValue):
        return target.copy_(full_tensor(source), non_blocking)
    if source.shape != target.shape:
        raise ValueError(f"copy_: expected shape {tuple(target.shape)}, found {tuple(source.shape)}")
    check_own_part("copy_", source, target.spec)
    if target.geometry is not None:
        return target.as_tensor().copy_(full_tensor(source))
    alike = is_alike(source, target.spec)
    target.local.copy_(source.local if alike else target.spec.local_of(full_tensor(source)), non_blocking)  # type: ignore[attr-defined]  # alike
    return target


def _refuse_storage(value: ShardedValue) -> Any:
    raise TypeError(
        f"expected full values to be written, found one of shape {tuple(value.spec.shape)} of which this rank stores a "
        f"part; on all ranks: full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
        f"cpu_offload=True)), of torch.distributed.checkpoint.state_dict; then on the first one: "
        f"model.save_pretrained(folder, state_dict=full)"
    )


_HANDLERS: dict[str, Callable[..., Any]] = {
    "storage": _refuse_storage,  # safetensors and peft ask for it when they write
    "data_ptr": lambda value: 0,  # it has no memory of its own; torch would take the offset of `local` for an address
    "to": _to_device,
    "cpu": lambda value, *_, **__: _to_device(value, "cpu"),
    "detach": lambda value: value,
    "clone": lambda value, *_, **__: value.over(value.local.clone()),
    "copy_": _copy_,
    "new_empty": lambda value, size, *, dtype=None, device=None, **_: value.over(  # which a stager of DCP fills
        value.local.new_empty(value.local.shape, dtype=dtype, device=device)
    ),
}
_QUERIES = {"size", "dim", "numel", "nelement", "stride", "element_size", "ndimension", "is_floating_point"}
_QUERIES |= {"is_complex", "is_contiguous", "__hash__", "__len__", "storage_offset", "untyped_storage", "is_pinned"}
_COMPUTED = {"T", "H", "mT", "mH", "real", "imag", "data"}  # attributes whose values are computed

torch.serialization.add_safe_globals([ShardedValue])


# --- values as FSDP1 has them (Note [Values in sharded state dicts]) --------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def torch_values(values: Sequence[ShardedTensor | ShardedValue], as_dtensors: bool) -> list[Tensor]:
    """Values of which each rank has the rows that `torch.chunk` gives to it; one all-to-all for each dtype.

    Args:
        values: of one unit; every rank passes the same ones. They stay as they are.
        as_dtensors: whether values are DTensors where no mesh was given either; otherwise torch's ShardedTensors.

    Returns:
        DTensors on the mesh that was given, or ShardedTensors. Plain tensors of shape () and without elements; a
        `ShardedValue` for a parameter that tensor parallelism has distributed over a mesh which is no part of that one.
    """
    rows: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(value.dtype for value in values):
        of_dtype = [index for index, value in enumerate(values) if value.dtype == dtype]
        stored, specs = zip(*((values[index].local, values[index].spec) for index in of_dtype), strict=True)
        rows.update(zip(of_dtype, exchange_rows(stored, specs), strict=True))
    return [_torch_value(rows[index], value, as_dtensors) for index, value in enumerate(values)]


def _torch_value(rows: Tensor, value: ShardedTensor | ShardedValue, as_dtensor: bool) -> Tensor:
    spec = value.spec
    if not spec.shape or not math.prod(spec.shape):
        return rows if not spec.shape else rows.new_empty(spec.shape)
    parallel, mesh = spec.tensor_parallel, spec.mesh(rows.device.type)
    if parallel is not None and spec.ranks.mesh_with(parallel.mesh) is None:
        return ShardedValue(value.local.clone(), spec)
    if spec.ranks.given is None and not as_dtensor:
        return rows if spec.ranks.size == 1 else chunked_tensor(rows, spec.shape, group_named(spec.ranks.group))
    placements = spec.placements(_placement_of_rows(spec), mesh)
    stride = _dtensor_spec(mesh, spec.shape, rows.dtype).stride
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=spec.shape, stride=stride)


def _placement_of_rows(spec: ShardSpec) -> Placement:
    parallel = spec.tensor_parallel
    before = () if parallel is None else parallel.placements  # which have split the tensor before it is sharded
    parts = math.prod(parallel.mesh.size(dim) for dim, each in enumerate(before) if each.is_shard(0)) if parallel else 1
    return Shard(0) if parts == 1 else StridedShard(0, split_factor=parts)


def value_of(local: Tensor, spec: ShardSpec) -> Tensor:
    """A value of the shape that `spec` has over `local`, the elements `[n]` that this rank stores; not a copy.

    It is a plain tensor if it has no elements: no rank stores any, yet a checkpoint must have its name.
    """
    return ShardedValue(local, spec) if math.prod(spec.shape) else local.view(spec.shape)


def value_in_state(stored: Any) -> Tensor:
    """What sharded state dicts have for a sharded tensor or a view of one; some views are gathered, by all ranks."""
    if isinstance(stored, ShardedView):
        base, geometry = stored.base, None if stored.base.spec.tensor_parallel else stored.geometry
        return ShardedValue(base.local, base.spec, geometry) if geometry else stored.full_tensor()
    return value_of(stored.local, stored.spec) if isinstance(stored, ShardedTensor) else stored


# --- a parameter and the values that belong to it ---------------------------------------------------------------------


@dataclass(frozen=True)
class ManagedParameter:
    """A sharded parameter: turns tensors that are sharded as it is, such as optimizer state, into values and back."""

    param: nn.Parameter
    unit: Unit
    index: int  # in the unit
    spec: ShardSpec

    @property
    def local(self) -> Tensor:
        """What this rank stores of it, 1-D: memory of the shard."""
        return self.param.local.detach()  # type: ignore[attr-defined]  # a ShardedTensor

    def local_of(self, value: Tensor, what: str) -> Tensor | None:
        """The elements that this rank stores, 1-D `[n]`, of a value of the parameter's shape; None for another shape.

        Shares memory with the value if possible. All ranks gather a value that is distributed in another way.
        RuntimeError, which calls it `what`, if it is what another rank has stored of this parameter.
        """
        if is_alike(value, self.spec):
            return value.local
        if value.shape != self.spec.shape:
            return None
        check_own_part(what, value, self.spec)
        return self.spec.local_of(full_tensor(value))


def managed(param: nn.Parameter) -> ManagedParameter | None:
    """`param` as a sharded parameter; None while it is summoned."""
    unit, index = unit_of(param) or (None, 0)
    if unit is None or unit.summoned is not None:
        return None
    return ManagedParameter(param, unit, index, param.spec)  # type: ignore[attr-defined]  # a ShardedTensor


def is_alike(value: Any, spec: ShardSpec) -> TypeGuard[ShardedValue]:
    """Whether `value` is sharded by `spec`, so that no rank needs what other ranks store of it."""
    is_whole = isinstance(value, ShardedTensor) or (isinstance(value, ShardedValue) and value.geometry is None)
    return is_whole and spec.same_ranges(value.spec)


def check_own_part(what: str, value: Any, spec: ShardSpec) -> None:
    """Raise RuntimeError if `value` has the elements of another rank, as one from that rank's file."""
    if isinstance(value, (ShardedValue, ShardedTensor)):
        mine, its = spec.ranks, value.spec.ranks
        if (mine.size, mine.rank) != (its.size, its.rank):
            raise RuntimeError(f"{what}: expected what rank {mine.rank} of {mine.size} stores, found what rank "
                               f"{its.rank} of {its.size} has saved; save and load with torch.distributed.checkpoint, "
                               f"or save full_tensor() of each value")  # fmt: skip


def full_tensor(value: Any) -> Any:
    """A sharded tensor gathered from all ranks; anything else as it is."""
    if isinstance(value, ChunkedTensor):
        return _gather_chunks(value)
    if isinstance(value, (ShardedValue, ShardedTensor, ShardedView)):
        return value.full_tensor()
    if isinstance(value, DTensor):
        here: Any = value.to(value.device_mesh.device_type)  # it may have been offloaded
        if (moved := collectives.movable(here.to_local())).dtype is not value.dtype:  # float8, of which gloo knows none
            shape, stride, mesh = value.shape, value.stride(), value.device_mesh
            here = DTensor.from_local(moved, mesh, value.placements, run_check=False, shape=shape, stride=stride)
            return here.full_tensor().view(value.dtype)
        return here.full_tensor()
    return value


def _gather_chunks(value: ChunkedTensor) -> Tensor:
    chunks = value.local_shards()
    remote = value.metadata().shards_metadata[0].placement
    device = chunks[0].tensor.device if chunks or remote is None else torch.device(remote.device().type)
    full = torch.zeros(value.size(), dtype=value.dtype, device=device)
    for chunk in chunks:
        offsets, sizes = chunk.metadata.shard_offsets, chunk.metadata.shard_sizes
        full[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] = chunk.tensor
    reduced = collectives.all_reduce(collectives.movable(full), value._process_group.group_name, "sum")
    return reduced.view(value.dtype)  # of an element one rank alone has bits
