"""`fully_shard`: check the arguments, choose units, shard their parameters, swap classes."""

import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fsdp_compile.eager import Root
from fsdp_compile.eager.inputs import full_precision_in_eval
from fsdp_compile.lookup import add_lookups, add_mixin
from fsdp_compile.module import FSDPModule
from fsdp_compile.passes.inductor import install
from fsdp_compile.unit import Unit, unit_of
from fsdp_compile.wrap import AutoWrapPolicy, choose_units

ModuleT = TypeVar("ModuleT", bound=nn.Module)
NamedParams = list[tuple[str, nn.Parameter]]

_STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


def fully_shard(
    model: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    auto_wrap_policy: AutoWrapPolicy = "auto",
    mixed_precision: MixedPrecision | None = None,
    cpu_offload: CPUOffload | None = None,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch: bool = False,
    limit_all_gathers: bool = True,
) -> ModuleT:
    """Shard the parameters of `model` over a process group, in place; return the same object, now also an `FSDPModule`.

    Parameters keep their identity and become 1-D views into this rank's shard, shape `[n]` with n >= 0 (full shape
    under NO_SHARD); during forward and backward, module code finds them in full shape. Gradients arrive on the sharded
    parameters as the mean over the group, in the same 1-D shape. An optimizer may be made before or after this call.

    All ranks must call this with the same model and arguments and equal initial values.

    Args:
        model: module with at least one parameter; all of one floating dtype and on one device per unit. Submodules that
            are sharded already keep their units.
        mesh: 1-D device mesh to shard over. At most one of `mesh` and `process_group`; neither: the whole world.
        process_group: group to shard over.
        sharding_strategy: FULL_SHARD frees full parameters between forward and backward, SHARD_GRAD_OP keeps them,
            NO_SHARD copies parameters on every rank and averages gradients. A group of one rank means NO_SHARD.
        auto_wrap_policy: which submodules are gathered on their own. "auto": the outermost repeated blocks; None:
            `model` is one unit; or a `ModuleWrapPolicy` or callable as `torch.distributed.fsdp` takes it.
        cpu_offload: with `offload_params`, shards and their gradients are in host memory, and the optimizer runs there.
        backward_prefetch: eager backward gathers the next unit before this one computes (BACKWARD_PRE), after it
            (BACKWARD_POST), or not ahead (None). The outermost call decides for all units below, as for the next one.
        forward_prefetch: eager forward gathers one unit ahead, in the order of the first iteration: for static graphs.
        limit_all_gathers: the host waits before it gathers while two units that were freed may still be read by the
            device. Must be equal in all calls under one root; ValueError at the first forward otherwise.

    Raises:
        RuntimeError: no process group is initialised.
        TypeError: an argument has the wrong type.
        ValueError: an argument or a parameter cannot be sharded; the message says which and what to do. Nothing has
            been changed then.
    """
    group = _resolve_group(mesh, process_group)
    shards = _resolve_strategy(sharding_strategy, group)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    modules = choose_units(model, auto_wrap_policy, lambda module: isinstance(module, FSDPModule))
    planned = _plan_units(model, modules)
    for module, params in planned:  # all checks are done: from here on nothing fails
        reshard = sharding_strategy is ShardingStrategy.FULL_SHARD
        offload = cpu_offload is not None and cpu_offload.offload_params
        unit = Unit(params, group, shards, reshard, precision=mixed_precision, offload=offload) if params else None
        _make_unit(module, unit, mixed_precision)
        module.__dict__["_fsdp_limit_all_gathers"] = limit_all_gathers
    _connect(model, Root(backward_prefetch, forward_prefetch, limit_all_gathers))
    install()
    return model


def _resolve_group(mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if mesh is not None and process_group is not None:
        raise ValueError(
            f"mesh and process_group: expected at most one, found {mesh} and {process_group}; drop one of them"
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError("fully_shard: expected to be called outside inference_mode, found it on; leave it first")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "process_group: expected an initialised default group, found none; "
            "call torch.distributed.init_process_group(...) before fully_shard"
        )
    if mesh is not None:
        return _group_of_mesh(mesh)
    if process_group is None:
        return dist.group.WORLD  # type: ignore[return-value]  # set, as is_initialized() said
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"process_group: expected a torch.distributed.ProcessGroup, found {process_group!r}")
    return process_group


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a torch.distributed.DeviceMesh, found {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension to shard over, found {mesh.ndim} in {mesh}; pass mesh['name']")
    return mesh.get_group()


def _resolve_strategy(strategy: ShardingStrategy, group: dist.ProcessGroup) -> int:
    """Into how many parts parameters are split."""
    if not isinstance(strategy, ShardingStrategy):
        raise TypeError(
            f"sharding_strategy: expected a torch.distributed.fsdp.ShardingStrategy, found {type(strategy).__name__}"
        )
    if strategy not in _STRATEGIES:
        names = ", ".join(known.name for known in _STRATEGIES)
        raise ValueError(f"sharding_strategy: expected one of {names}, found {strategy.name}, not supported yet")
    if strategy is ShardingStrategy.NO_SHARD:
        return 1
    if group.size() == 1:
        warnings.warn(f"sharding_strategy: {strategy.name} over one rank is NO_SHARD", UserWarning, stacklevel=3)
    return group.size()


def _plan_units(model: nn.Module, modules: list[nn.Module]) -> list[tuple[nn.Module, NamedParams]]:
    """For each unit module the parameters that it takes; every check of the parameters is made here."""
    if not any(True for _ in model.parameters()):
        raise ValueError(f"model: expected a module with parameters, found none in {type(model).__name__}")
    if isinstance(model, FSDPModule):
        raise ValueError(f"model: {type(model).__name__} is sharded already; call fully_shard once per module")
    _check_hooks(model)
    taken: set[nn.Parameter] = set()
    planned = []
    for module in modules:
        params = [(n, p) for n, p in module.named_parameters() if p not in taken and unit_of(p) is None]
        taken.update(param for _, param in params)
        _check_params(params, _path_of(module, model))
        planned.append((module, params))
    return planned


def _check_hooks(model: nn.Module) -> None:
    """Refuse hooks that compute a weight before forward: they run before the gather and would see shards."""
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, (WeightNorm, SpectralNorm, BasePruningMethod)):
                raise ValueError(
                    f"module {path or type(model).__name__}: expected no hook that computes a weight before forward, "
                    f"found {type(hook).__name__}; use torch.nn.utils.parametrizations or parametrize instead"
                )


def _path_of(module: nn.Module, model: nn.Module) -> str:
    return next(name for name, found in model.named_modules() if found is module)


def _check_params(params: NamedParams, path: str) -> None:
    for name, param in params:
        full_name = f"{path}.{name}" if path else name
        if isinstance(param, UninitializedParameter):
            raise ValueError(
                f"parameter {full_name}: expected a parameter with values, found a lazy one; run a forward"
            )
        if not param.is_floating_point():
            raise ValueError(
                f"parameter {full_name}: expected a floating dtype, found {param.dtype}; register it as a buffer"
            )
        if param.dim() == 0:
            raise ValueError(
                f"parameter {full_name}: expected at least one dimension, found a scalar; give it the shape [1]"
            )
        _check_equal("device", full_name, param.device, params[0], "move the module to one device before fully_shard")
        if param.is_meta:
            raise ValueError(
                f"parameter {full_name}: expected a parameter with values, found one on the meta device; "
                f"call module.to_empty(device=...) and initialise it before fully_shard"
            )


def _check_equal(what: str, name: str, found: Any, first: tuple[str, nn.Parameter], remedy: str) -> None:
    expected = getattr(first[1], what)
    if found != expected:
        raise ValueError(f"parameter {name}: expected {what} {expected}, as {first[0]} of this unit has, "
                         f"found {found}; {remedy}")  # fmt: skip


def _make_unit(module: nn.Module, unit: Unit | None, precision: MixedPrecision | None) -> None:
    module.__dict__["_fsdp_scope"] = (unit,) if unit else ()
    module.__dict__["_fsdp_precision"] = precision
    module.__dict__["_fsdp_full_precision_in_eval"] = full_precision_in_eval()
    add_mixin(module, FSDPModule)


def _connect(model: nn.Module, root: Root) -> None:
    """Let all modules find their parameters, and gather units that are used in several places around all of these."""
    users: dict[Unit, list[nn.Module]] = {}
    for module in model.modules():
        found = {name: unit_of(p) for name, p in module._parameters.items() if p is not None}
        managed = {name: at for name, at in found.items() if at}
        known = {lookup.name for lookup in getattr(type(module), "_fsdp_lookups", ())}
        if managed.keys() - known:
            add_lookups(module, {name: at for name, at in managed.items() if name not in known})
        for unit, _ in managed.values():
            users.setdefault(unit, []).append(module)
    for scope in list(_scopes(model)):
        scope.__dict__["_fsdp_root"], scope.__dict__["_fsdp_is_root"] = root, scope is model
        for unit in scope._fsdp_scope:
            unit.is_root = scope is model
            _widen(unit, scope, users.get(unit, []), model)


def _scopes(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _widen(unit: Unit, scope: Any, users: list[nn.Module], model: nn.Module) -> None:
    """Move `unit` to the innermost sharded module that encloses all its users: tied parameters are gathered once."""
    if set(users) <= set(scope.modules()):
        return
    enclosing = [m for m in _scopes(model) if set(users) <= set(m.modules())]
    innermost = min(enclosing, key=lambda m: sum(1 for _ in m.modules()))
    scope.__dict__["_fsdp_scope"] = tuple(u for u in scope._fsdp_scope if u is not unit)
    innermost.__dict__["_fsdp_scope"] = (*innermost._fsdp_scope, unit)
