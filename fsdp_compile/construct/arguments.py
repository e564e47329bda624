"""One form for the arguments of `fully_shard`, for which FSDP1 and FSDP2 have different names and classes.

mixed_precision, mp_policy               -> dtypes, and that of outputs
cpu_offload, offload_policy              -> whether to offload, whether to pin
mesh, dp_mesh_dims                       -> a mesh of one dimension, or of two: (replicas, shards)
sharding_strategy, reshard_after_forward -> a strategy
reduction_order                          -> whether sums have an order that any number of ranks has
device_id                                -> a device with an index, or None
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.tensor import Shard

from fsdp_compile.comm.groups import RESHARDING
from fsdp_compile.config import check_type
from fsdp_compile.core.settings import PlacementFn, warn_caller

try:
    from torch.distributed.fsdp import DataParallelMeshDims as DataParallelMeshDims  # of the public names
except ImportError:  # torch 2.11 and 2.12

    @dataclass
    class DataParallelMeshDims:  # type: ignore[no-redef]  # in torch 2.11 it is the only one
        """Names of the mesh dimensions to shard and to replicate over; ValueError if there is neither."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise ValueError("DataParallelMeshDims: set at least one of shard and replicate")


def check_one(**given: Any) -> None:
    """Raise ValueError if more than one of the arguments is not None."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} are two names of one option; pass only one of them")


def precision_of(
    mixed_precision: MixedPrecision | None, mp_policy: MixedPrecisionPolicy | None
) -> tuple[MixedPrecision, torch.dtype | None]:
    """The dtypes of the unit, and that of its floating outputs, which only FSDP2 sets."""
    check_type("mixed_precision", mixed_precision, MixedPrecision | None)
    check_type("mp_policy", mp_policy, MixedPrecisionPolicy | None)
    check_one(mixed_precision=mixed_precision, mp_policy=mp_policy)
    given = mixed_precision or mp_policy
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
        check_type(name, dtype := getattr(given, name, None), torch.dtype | None)
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"{name}: expected a dtype of floating-point numbers or None, found {dtype}")
    for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"):
        check_type(name, getattr(given, name, False), bool)
    if mp_policy is None:
        return mixed_precision or MixedPrecision(), None
    if mp_policy.param_dtype is None and mp_policy.reduce_dtype is None:
        return MixedPrecision(), mp_policy.output_dtype
    casts = mp_policy.cast_forward_inputs  # of every unit; no classes are exempt
    dtypes = MixedPrecision(
        param_dtype=mp_policy.param_dtype,
        reduce_dtype=mp_policy.reduce_dtype,
        cast_forward_inputs=casts,
        cast_root_forward_inputs=casts,
        _module_classes_to_ignore=(),
    )
    return dtypes, mp_policy.output_dtype


def offload_of(cpu_offload: CPUOffload | None, offload_policy: OffloadPolicy | None) -> tuple[bool, bool]:
    """Whether shards are stored on the CPU, and whether they are pinned there."""
    check_type("cpu_offload", cpu_offload, CPUOffload | None)
    check_type("offload_policy", offload_policy, OffloadPolicy | None)
    check_one(cpu_offload=cpu_offload, offload_policy=offload_policy)
    if isinstance(offload_policy, CPUOffloadPolicy):
        return True, offload_policy.pin_memory
    return cpu_offload is not None and cpu_offload.offload_params, True


def mesh_to_shard(mesh: DeviceMesh | None, dp_mesh_dims: DataParallelMeshDims | None) -> DeviceMesh | None:
    """The part of `mesh` that `dp_mesh_dims` names; several names for one role are flattened into one dimension."""
    if dp_mesh_dims is None:
        return mesh
    check_type("dp_mesh_dims", dp_mesh_dims, DataParallelMeshDims)
    check_type("mesh", mesh, DeviceMesh)
    assert mesh is not None
    roles = [
        (names,) if isinstance(names, str) else tuple(names or ())
        for names in (dp_mesh_dims.replicate, dp_mesh_dims.shard)
    ]
    if not roles[1]:
        raise ValueError(
            "dp_mesh_dims has no dimension to shard over; to replicate only, pass mesh[name] and "
            "sharding_strategy=ShardingStrategy.NO_SHARD"
        )
    names = []
    for role in filter(None, roles):
        if len(role) > 1:
            mesh[role]._flatten("_".join(role))
        names.append("_".join(role))
    return mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]


def dimensions_beside(mesh: DeviceMesh | None, dp_mesh_dims: DataParallelMeshDims | None) -> dict[str, int]:
    """The sizes of the dimensions of `mesh` that `dp_mesh_dims` leaves to other kinds of parallelism, those of one rank
    left out."""
    if mesh is None or dp_mesh_dims is None:
        return {}
    roles = (dp_mesh_dims.replicate, dp_mesh_dims.shard)
    taken = {name for names in roles for name in ((names,) if isinstance(names, str) else names or ())}
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    return {name: size for name, size in sizes if name not in taken and size > 1}


def resolve_strategy(
    strategy: ShardingStrategy | None, choice: bool | int | str | None, mesh: DeviceMesh | None
) -> ShardingStrategy:
    """The strategy that `sharding_strategy` names or `reshard_after_forward` means; with a 2-D mesh a hybrid one."""
    check_type("sharding_strategy", strategy, ShardingStrategy | None)
    if isinstance(choice, str) and choice != "auto":
        raise ValueError(f"reshard_after_forward: expected a bool, a number of ranks or 'auto', found {choice!r}")
    check_type("reshard_after_forward", choice, bool | int | str | None)
    reshards = choice if choice is None or isinstance(choice, bool) else choice != 1
    if reshards is False and choice is not False:
        warn_caller("reshard_after_forward: 1, a number of ranks, means False; pass True to free all after forward")
    if strategy is None:
        if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
            return ShardingStrategy._HYBRID_SHARD_ZERO2 if reshards is False else ShardingStrategy.HYBRID_SHARD
        return ShardingStrategy.SHARD_GRAD_OP if reshards is False else ShardingStrategy.FULL_SHARD
    agrees = strategy is not ShardingStrategy.NO_SHARD and reshards == (strategy in RESHARDING)
    if reshards is not None and not agrees:
        raise ValueError(f"reshard_after_forward={choice} contradicts {strategy.name}; pass only one of them")
    return strategy


CPU = torch.device("cpu")


def asks_same_bits(
    order: str, strategy: ShardingStrategy, precision: MixedPrecision, modules: Sequence[nn.Module]
) -> bool:
    """Whether `reduction_order` asks for sums that any number of ranks has. ValueError if they cannot be had."""
    if order not in ("any", "tree"):
        raise ValueError(f"reduction_order: expected 'any' or 'tree', found {order!r}")
    if order == "any":
        return False
    if strategy is ShardingStrategy.NO_SHARD:
        raise ValueError("reduction_order='tree' cannot add up norms of plain parameters, as NO_SHARD keeps them; "
                         "choose another sharding_strategy")  # fmt: skip
    dtypes = {"param_dtype": precision.param_dtype, "reduce_dtype": precision.reduce_dtype}
    dtypes |= {f"parameter {name}": param.dtype for each in modules for name, param in each.named_parameters()}
    for what, dtype in dtypes.items():
        if dtype is torch.float16:
            raise ValueError(
                f"reduction_order='tree': {what} is float16, whose small gradients lose digits by how a loss is "
                f"divided; use bfloat16 or float32"
            )
    return True


def given_device(device_id: int | str | torch.device | None) -> torch.device | None:
    """The device that `device_id` names, with an index unless it is the CPU (E-INIT-14)."""
    if device_id is None:
        return None
    if isinstance(device_id, str):
        try:
            device_id = torch.device(device_id)
        except RuntimeError as error:
            raise ValueError(f"device_id: expected the name of a device, found {device_id!r}: {error}") from None
    if isinstance(device_id, bool) or not isinstance(device_id, (int, torch.device)):
        raise TypeError(f"device_id: expected an int, a torch.device or None, found {type(device_id).__name__}")
    if device_id in (CPU, torch.device("cpu", 0)):
        return CPU
    if device_id == torch.device("meta"):
        raise ValueError("device_id: the meta device holds no values; pass the device to compute on")
    current = current_device()
    if current is None:
        raise ValueError(f"device_id={device_id}, but there is no accelerator; pass torch.device('cpu') or nothing")
    if isinstance(device_id, int):
        return torch.device(current.type, device_id)
    if device_id == torch.device(device_id.type):
        warn_caller(f"device_id: {device_id} has no index; taking the current device, {current}")
        return current
    return device_id


def current_device() -> torch.device | None:
    """The accelerator that is current here; None without one."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return torch.device(accelerator.type, torch.accelerator.current_device_index()) if accelerator else None


# Note [Which elements a rank stores]
# FSDP2 cuts each parameter along a dimension, so its collectives copy every parameter in and out. Here the flat
# parameter is cut, at any element, and nothing is copied. The dimension that `shard_placement_fn` chooses would say
# which elements a rank stores; no value that a script computes depends on that, so it is checked and has no effect.


def check_placements(path: str, params: Iterable[tuple[str, nn.Parameter]], placement_fn: PlacementFn | None) -> None:
    """Check what `shard_placement_fn` says of each parameter (Note [Which elements a rank stores])."""
    check_type("shard_placement_fn", placement_fn, Callable | None)
    if placement_fn is None:
        return
    for name, param in params:
        full_name = f"{path}.{name}" if path else name
        placement: Any = placement_fn(param)
        if placement is None:
            continue
        if not isinstance(placement, Shard):
            raise ValueError(
                f"parameter {full_name}: shard_placement_fn must return a Shard or None, not a "
                f"{type(placement).__name__}; to shard a module over another mesh, call fully_shard on it with that one"
            )
        if not -param.dim() <= placement.dim < max(param.dim(), 1):
            raise ValueError(
                f"parameter {full_name}: shard_placement_fn chose dimension {placement.dim} of {param.dim()}"
            )
