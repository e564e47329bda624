"""Values of sharded state dicts: sharded tensors that share memory with parameters, and rows as FSDP1 has them."""

# Note [Values in sharded state dicts]
# A value is the detached parameter, or a view of it that a hook of the module has made. Loading into it changes the
# parameter, and saving it copies nothing and communicates nothing. To torch it is a DTensor, so that code which stages,
# offloads or gathers DTensors does so here too.
#
# Where the kind was set, as FSDP1 does, scripts expect what FSDP1 gives: a DTensor with rows of dimension 0 on each
# rank. Other ranks store a part of these rows, so `state_dict()` gathers one value after the other, as FSDP1 does. One
# that did so when `to_local()` is first called would wait for ever in a script that looks at one rank alone, which
# FSDP1's values allow. DCP's functions and `fsdp_compile.checkpoint` get the parameters whatever is set.

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_compile.comm import collectives
from fsdp_compile.core._torch import StridedShard
from fsdp_compile.core.unit import unit_of
from fsdp_compile.state_dict._torch import ChunkedTensor
from fsdp_compile.tensors.shard_spec import ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.sharded_view import ShardedView, in_state


def ShardedValue(local: Tensor, spec: ShardSpec, geometry: Any = None) -> Any:
    """What files of version 0.2 have in the place of sharded tensors, and of views of some geometry."""
    tensor = ShardedTensor(local, spec)
    return tensor if geometry is None else in_state(tensor.as_strided(*geometry))


torch.serialization.add_safe_globals([ShardedValue])


# --- values as FSDP1 has them (Note [Values in sharded state dicts]) --------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def torch_value(value: ShardedTensor) -> Tensor:
    """A copy of a value, a DTensor of which each rank has the rows that `torch.chunk` gives to it; all ranks gather it.

    A plain tensor of shape () or without elements; a `ShardedTensor` where tensor parallelism has distributed it over a
    mesh that is no part of the one that was given.
    """
    spec, parallel = value.spec, value.spec.tensor_parallel
    if not math.prod(spec.shape):
        return value.local.new_empty(spec.shape)
    if parallel is not None and spec.joined_mesh is None:
        return ShardedTensor(value.local.clone(), spec)
    full = spec.gather_split(value.local)
    if not spec.shape:
        return full
    rows, mesh, parts = full[spec.torch_rows].clone(), spec.mesh(value.device.type), 1
    for dim, before in enumerate(parallel.placements if parallel else ()):  # by which it was split before
        parts *= parallel.mesh.size(dim) if parallel and before.is_shard(0) else 1
    placements = spec.placements(Shard(0) if parts == 1 else StridedShard(0, split_factor=parts), mesh)
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=spec.shape, stride=value.stride())


# --- a parameter and the values that belong to it ---------------------------------------------------------------------


def managed(param: nn.Parameter) -> Any:
    """`param` if it is sharded and not summoned; None otherwise."""
    unit, _ = unit_of(param) or (None, 0)
    return None if unit is None or unit.summoned is not None else param


def local_of(param: Any, value: Any, what: str) -> Tensor | None:
    """The elements that this rank stores, 1-D `[n]`, of a value of a sharded parameter's shape; None for another shape.

    Shares memory with the value if possible. All ranks gather a value that is distributed in another way.
    RuntimeError, which calls it `what`, if it is what another rank has stored of this parameter.
    """
    spec: ShardSpec = param.spec
    if is_alike(value, spec):
        return value.local
    if value.shape != spec.shape:
        return None
    if isinstance(value, (ShardedTensor, ShardedView)):
        mine, its = spec.ranks, value.spec.ranks
        if (mine.size, mine.rank) != (its.size, its.rank):
            raise RuntimeError(f"{what}: expected what rank {mine.rank} of {mine.size} stores, found what rank "
                               f"{its.rank} of {its.size} has saved; save and load with torch.distributed.checkpoint, "
                               f"or save full_tensor() of each value")  # fmt: skip
    return spec.local_of(full_tensor(value))


def is_alike(value: Any, spec: ShardSpec) -> TypeGuard[ShardedTensor]:
    """Whether `value` is sharded by `spec`, so that no rank needs what other ranks store of it."""
    return isinstance(value, ShardedTensor) and spec.same_ranges(value.spec)


def full_tensor(value: Any) -> Any:
    """A sharded tensor gathered from all ranks; anything else as it is."""
    if isinstance(value, ChunkedTensor):
        return _gather_chunks(value)
    if isinstance(value, (ShardedTensor, ShardedView)):
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
