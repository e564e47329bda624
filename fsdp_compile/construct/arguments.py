"""One form for the arguments of `fully_shard`, for which FSDP1 and FSDP2 have different names and classes.

mixed_precision, mp_policy               -> dtypes, and that of outputs
cpu_offload, offload_policy              -> whether to offload, whether to pin
mesh, dp_mesh_dims                       -> a mesh of one dimension, or of two: (replicas, shards)
sharding_strategy, reshard_after_forward -> a strategy
reduction_order                          -> whether sums have an order that any number of ranks has
device_id                                -> a device with an index, or None
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
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

from fsdp_compile.comm.groups import HYBRID, RESHARDING, resolve_groups
from fsdp_compile.config import check_type
from fsdp_compile.construct.prepare import CPU, current_device
from fsdp_compile.construct.units import ModuleGroup
from fsdp_compile.construct.wrap_policy import Chosen
from fsdp_compile.core.settings import Settings, warn_caller
from fsdp_compile.core.sharding import sharding_of

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


FSDP1 = {  # what `fully_shard` has in the place of an option under FSDP1's name
    "sharding_strategy": "reshard_after_forward, or a mesh (replicas, shards) for hybrid strategies",
    "process_group": "mesh=DeviceMesh.from_group(group, device)",
    "devices_per_node": "a mesh (replicas, shards)",
    "mixed_precision": "mp_policy",
    "cpu_offload": "offload_policy",
    "ignored_modules": "ignored_params, which takes modules too",
    "ignored_states": "ignored_params",
    "device_id": "module.to(device) before",
    "param_init_fn": "module.to_empty(device=device) and the function, before",
    "sync_module_states": "set_model_state_dict with broadcast_from_rank0 afterwards",
    "backward_prefetch": "set_modules_to_backward_prefetch of the modules",
    "forward_prefetch": "set_modules_to_forward_prefetch of the modules",
    "limit_all_gathers": "nothing, as two units are alive",
}


@cache
def warn_of_fsdp1(name: str) -> None:
    """Announce that an option goes, once. TypeError if there never was one of that name."""
    if name not in FSDP1:
        raise TypeError(f"fully_shard() got an unexpected keyword argument {name!r}")
    kept = "" if name == "devices_per_node" else ", or take FullyShardedDataParallel, which keeps it"
    warn_caller(f"fully_shard: {name}, which FSDP2 does not have, goes with the next minor version; write "
                f"{FSDP1[name]}{kept}")  # fmt: skip


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
            "dp_mesh_dims has no dimension to shard over; to replicate only, use FullyShardedDataParallel with "
            "device_mesh=mesh[name] and sharding_strategy=ShardingStrategy.NO_SHARD"
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


def asks_same_bits(order: str, precision: MixedPrecision, modules: Sequence[nn.Module]) -> bool:
    """Whether `reduction_order` asks for sums that any number of ranks has. ValueError if they cannot be had."""
    if order not in ("any", "tree"):
        raise ValueError(f"reduction_order: expected 'any' or 'tree', found {order!r}")
    if order == "any":
        return False
    dtypes = {"param_dtype": precision.param_dtype, "reduce_dtype": precision.reduce_dtype}
    dtypes |= {f"parameter {name}": param.dtype for each in modules for name, param in each.named_parameters()}
    for what, dtype in dtypes.items():
        if dtype is torch.float16:
            raise ValueError(
                f"reduction_order='tree': {what} is float16, whose small gradients lose digits by how a loss is "
                f"divided; use bfloat16 or float32"
            )
    return True


def asks_rows(shards: str) -> bool:
    """Whether `shards` asks for complete rows; ValueError if it is neither "any" nor "rows"."""
    if shards not in ("any", "rows"):
        raise ValueError(f"shards: expected 'any' or 'rows', found {shards!r}")
    return shards == "rows"


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


def group_of(modules: Sequence[Any]) -> ModuleGroup:
    """The modules of a list. ValueError if one is inside another, or there is none."""
    for module in modules:
        inside = [other for other in modules if other is not module and module in set(other.modules())]
        if inside or sum(other is module for other in modules) > 1:
            raise ValueError(
                f"module: {type(module).__name__} is in the list twice or is inside "
                f"{type(inside[0] if inside else module).__name__}; pass each part of the model once"
            )
    if not modules:
        raise ValueError("module: the list is empty")
    return ModuleGroup(modules)


def check_module(module: Any) -> None:
    """Raise an error if `module` cannot be given to `fully_shard`."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("fully_shard must be called outside inference_mode")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module or a list of them, found {type(module).__name__}")
    if "_orig_mod" in module._modules:
        raise ValueError(
            f"module is what torch.compile made of {type(module._orig_mod).__name__}; call fully_shard(model) first "
            f"and compile what it returns, or call model.compile() before or after"
        )
    if sharding_of(module):
        raise ValueError(f"module: {type(module).__name__} is sharded already; call fully_shard once per module")


# --- of each unit -----------------------------------------------------------------------------------------------------

_MAY_DIFFER: dict[str, Any] = {  # what a policy may set for a unit, and its types
    "sharding_strategy": ShardingStrategy | None,
    "mixed_precision": MixedPrecision | None,
    "cpu_offload": CPUOffload | None,
    "process_group": object,
    "device_mesh": object,
    "device_id": object,
    "param_init_fn": Callable | None,
    "sync_module_states": bool,
    "limit_all_gathers": bool,
}
_OF_THE_ROOT = ("backward_prefetch", "forward_prefetch", "use_orig_params")  # accepted: that of the root is in force


def settings_of_units(model: nn.Module, chosen: Chosen, settings: Settings) -> dict[nn.Module, Settings]:
    """The settings of each chosen module, in which a `CustomPolicy` may differ from the model's."""
    paths = {module: path for path, module in model.named_modules()}
    return {module: _settings_of(paths[module], differs, settings) for module, differs in chosen.items()}


def _settings_of(path: str, differs: dict[str, Any], settings: Settings) -> Settings:
    """The settings of one unit, in which a `CustomPolicy` may differ from the model's."""
    what = f"auto_wrap_policy, module {path}"
    unknown = sorted(differs.keys() - {*_MAY_DIFFER, *_OF_THE_ROOT})
    if unknown:
        raise ValueError(
            f"{what}: a unit may differ in {', '.join([*_MAY_DIFFER, *_OF_THE_ROOT])}, not in {', '.join(unknown)}; "
            f"set them in fully_shard, or shard the module by a call of its own"
        )
    for name, kind in _MAY_DIFFER.items():
        if name in differs:
            check_type(f"{what}: {name}", differs[name], kind)
    if differs.get("limit_all_gathers", settings.limit_all_gathers) != settings.limit_all_gathers:
        raise ValueError(f"{what}: limit_all_gathers must be {settings.limit_all_gathers}, as it is for the model")
    strategy = differs.get("sharding_strategy") or settings.strategy
    groups = settings.groups
    if differs.get("process_group") is not None or differs.get("device_mesh") is not None:
        groups = resolve_groups(differs.get("device_mesh"), differs.get("process_group"), strategy, has_policy=True)
    elif (strategy in HYBRID) != (settings.strategy in HYBRID):
        raise ValueError(
            f"{what}: {strategy.name} in a model of {settings.strategy.name} needs other process groups; use hybrid "
            f"strategies for all units or for none, or set process_group too"
        )
    changed: dict[str, Any] = {n: differs[n] for n in ("param_init_fn", "sync_module_states") if n in differs}
    if "mixed_precision" in differs:
        changed["precision"] = differs["mixed_precision"] or MixedPrecision()
    if "cpu_offload" in differs:
        changed["offload"], changed["pin_memory"] = offload_of(differs["cpu_offload"], None)
    if "device_id" in differs:
        changed["device"] = given_device(differs["device_id"])
    return replace(settings, strategy=strategy, groups=groups, **changed)
