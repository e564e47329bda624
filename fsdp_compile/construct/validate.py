"""What `fully_shard` is going to do, worked out and checked before anything is changed.

See Note [Nothing is changed on refusal].
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FlatParameter, MixedPrecision, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from fsdp_compile.comm.collectives import backends
from fsdp_compile.comm.groups import HYBRID, Placement, resolve_groups
from fsdp_compile.construct.arguments import (
    CPU,
    check_placements,
    current_device,
    given_device,
    offload_of,
)
from fsdp_compile.construct.initial_values import must_stay_on_meta, unsent_buffers
from fsdp_compile.construct.wrap_policy import Chosen, Ignored
from fsdp_compile.core.environment import warn_caller
from fsdp_compile.core.inner_params import InnerParams, has_attributes, is_subclass_around_others, plain_tensors
from fsdp_compile.core.settings import Settings
from fsdp_compile.core.sharding import sharding_of
from fsdp_compile.core.tensor_parallel import check_distribution
from fsdp_compile.core.unit import unit_of

# Note [Nothing is changed on refusal]
# `fully_shard` has two halves. `prepare_units` works out all units and makes every check that can be made from modules,
# parameters and arguments; it changes nothing, so that a model which is refused is as it was. Only then are units
# made one by one (units.py): initialized, moved, broadcast, sharded. What user code raises in that half
# (`param_init_fn`, `reset_parameters`) cannot be foreseen and leaves a model that is sharded in part; a warning names
# the module.

NamedParams = list[tuple[str, nn.Parameter]]

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class PreparedUnit:
    """One unit before it is made."""

    module: nn.Module
    path: str  # of `module` in the model
    params: NamedParams  # names are relative to `module`
    inner: Mapping[nn.Parameter, InnerParams]  # those of `params` that take the place of a subclass around them
    modules: list[tuple[str, nn.Module]]  # `module` and those below, up to nested units and ignored modules
    settings: Settings  # those of the call, but for those in which a policy lets this unit differ
    device: torch.device  # where it computes
    stays_on_meta: bool  # the script gives memory and values to what is on the meta device


def prepare_units(model: nn.Module, chosen: Chosen, settings: Settings, ignored: Ignored) -> list[PreparedUnit]:
    """For each chosen module what becomes of it; every check of modules and parameters is made here.

    Raises:
        RuntimeError: a unit's parameters are spread over devices.
        ValueError: a module or parameter cannot be sharded; the message says which and what to do.
    """
    _check_same_switch(model, settings)
    paths = {module: path for path, module in model.named_modules()}
    of_units = [_settings_of(paths[module], differs, settings) for module, differs in chosen.items()]
    carried = frozenset(backends(settings.groups.shard))  # device types
    divided = list(_divide(chosen, ignored))
    named_modules = [[(paths[each], each) for each in modules] for _, _, modules in divided]
    uninitialized = [
        must_stay_on_meta(named, own.param_init_fn, ignored.params)
        for named, own in zip(named_modules, of_units, strict=True)
    ]
    prepared = []
    for (module, params, _), named, own in zip(divided, named_modules, of_units, strict=True):
        path = paths[module]
        _check_container(module, path)
        _check_params(params, path)
        check_placements(path, params, own.shard_placement_fn)
        device = compute_device(((_join(path, n), p.device) for n, p in params), own.device, carried)
        apart = [param for _, param in params if is_subclass_around_others(param) or has_attributes(param)]
        inner = {param: InnerParams(param, device) for param in apart}
        params = [each for n, p in params for each in (inner[p].named(n) if p in inner else [(n, p)])]
        on_meta = any(uninitialized) and _are_on_meta(params, path)
        _check_distributions(params, path, own.placement)
        prepared.append(PreparedUnit(module, path, params, inner, named, own, device, on_meta))
    for strategy in dict.fromkeys(own.strategy for own in of_units if own.groups.shard.size() == 1):
        if strategy is not ShardingStrategy.NO_SHARD:  # (E-STRAT-6)
            warn_caller(f"sharding_strategy: {strategy.name} over one rank is NO_SHARD")
    if any(own.sync_module_states for own in of_units):
        _check_sendable(model, prepared, carried)
    return prepared


def _are_on_meta(params: NamedParams, path: str) -> bool:
    """Whether a unit's parameters are on the meta device. ValueError if some are, and others have values."""
    present = [name for name, param in params if not param.is_meta]
    absent = [name for name, param in params if param.is_meta]
    if present and absent:
        raise ValueError(
            f"parameter {_join(path, absent[0])}: expected a device with values, as {_join(path, present[0])} of its "
            f"unit has, found meta and no reset_parameters() to initialize it; pass param_init_fn, or give it values"
        )
    return bool(absent)


def _divide(chosen: Chosen, ignored: Ignored) -> Iterator[tuple[nn.Module, NamedParams, list[nn.Module]]]:
    """Each chosen module with the parameters and the modules that no unit before it has taken."""
    params: set[nn.Parameter] = set(ignored.params)
    modules: set[nn.Module] = set(ignored.modules)
    for module in chosen:
        own_params = [(n, p) for n, p in module.named_parameters() if p not in params and unit_of(p) is None]
        reachable = _breadth_first(module, lambda m: m in chosen or sharding_of(m) is not None or m in ignored.modules)
        own_modules = [each for each in reachable if each not in modules]
        params.update(param for _, param in own_params)
        modules.update(own_modules)
        yield module, own_params, own_modules


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


def _settings_of(path: str, differs: dict[str, Any], settings: Settings) -> Settings:
    """The settings of one unit, where a `CustomPolicy` may ask for others than the model's."""
    unknown = sorted(differs.keys() - {*_MAY_DIFFER, *_OF_THE_ROOT})
    if unknown:
        raise ValueError(
            f"auto_wrap_policy: expected settings among {', '.join([*_MAY_DIFFER, *_OF_THE_ROOT])} for module {path}, "
            f"found {', '.join(unknown)}; set them in fully_shard, or shard the module by a call of its own"
        )
    for name, kind in _MAY_DIFFER.items():
        if name in differs and not isinstance(differs[name], kind):
            words = " or ".join(getattr(each, "__name__", "None") for each in getattr(kind, "__args__", (kind,)))
            raise TypeError(
                f"auto_wrap_policy: expected {name} of type {words} for module {path}, found "
                f"{type(differs[name]).__name__}"
            )
    if differs.get("limit_all_gathers", settings.limit_all_gathers) != settings.limit_all_gathers:
        raise ValueError(
            f"auto_wrap_policy: expected limit_all_gathers to be {settings.limit_all_gathers} for module {path}, as it "
            f"is for the model, found {differs['limit_all_gathers']}; use one value for all units"
        )
    strategy = differs.get("sharding_strategy") or settings.strategy
    groups = settings.groups
    if differs.get("process_group") is not None or differs.get("device_mesh") is not None:
        groups = resolve_groups(differs.get("device_mesh"), differs.get("process_group"), strategy, has_policy=True)
    elif (strategy in HYBRID) != (settings.strategy in HYBRID):
        raise ValueError(
            f"auto_wrap_policy: expected hybrid strategies for all units or for none, found {strategy.name} for module "
            f"{path} in a model of {settings.strategy.name}; set its process_group too, as it needs other groups"
        )
    as_given = {"param_init_fn", "sync_module_states"}
    changed: dict[str, Any] = {name: value for name, value in differs.items() if name in as_given}
    if "mixed_precision" in differs:
        changed["precision"] = differs["mixed_precision"] or MixedPrecision()
    if "cpu_offload" in differs:
        changed["offload"], changed["pin_memory"] = offload_of(differs["cpu_offload"], None)
    if "device_id" in differs:
        changed["device"] = given_device(differs["device_id"])
    return replace(settings, strategy=strategy, groups=groups, **changed)


def _breadth_first(root: nn.Module, stops: Callable[[nn.Module], bool]) -> list[nn.Module]:
    modules = [root]
    seen = {root}
    for module in modules:
        new = [child for child in module.children() if child not in seen and not stops(child)]
        modules += new
        seen.update(new)
    return modules


# --- devices ----------------------------------------------------------------------------------------------------------

# The CPU is treated as any other device. Each unit decides for itself where it computes, from the devices of the
# parameters it manages (E-INIT-12 to 17). Parameters on the meta device have no device yet: they follow the others.


def compute_device(
    devices: Iterable[tuple[str, torch.device]], given: torch.device | None, carried: frozenset[str]
) -> torch.device:
    """The device that a unit computes on.

    Args:
        devices: name and device of each parameter that the unit manages; names are for messages.
        given: what `device_id` says, or None.
        carried: the device types that the unit's group communicates from.

    Raises:
        RuntimeError: the parameters are spread over devices in a way that `given` does not settle (E-INIT-12, 13).
        ValueError: they are on another device than `given` (E-INIT-16).
    """
    first: dict[torch.device, str] = {}
    for name, device in devices:
        first.setdefault(device, name)
    first.pop(torch.device("meta"), None)
    others = [device for device in first if device.type != "cpu"]
    _check_spread(first, others, given)
    if given is not None:
        if others and others[0] != given:
            raise ValueError(
                f"parameter {first[others[0]]}: expected device {given}, as device_id says, found {others[0]} on rank "
                f"{dist.get_rank()}; move it there or to the CPU, or pass its device"
            )
        return given
    if others:
        return others[0]
    if CPU in first:
        return CPU if "cpu" in carried else _instead_of_cpu(first[CPU])
    current = current_device()
    return current if current and current.type in carried else CPU


def _check_spread(first: dict[torch.device, str], others: Sequence[torch.device], given: torch.device | None) -> None:
    """One device, or the CPU and one other that `device_id` names."""
    if len(others) > 1:
        one, other = others[:2]
        remedy = "use one kind of accelerator" if one.type != other.type else "move the unit's parameters to one device"
        raise RuntimeError(
            f"parameter {first[other]}: expected device {one}, as {first[one]} of this unit has, found {other}; "
            f"{remedy} before fully_shard"
        )
    if others and CPU in first and given is None:
        raise RuntimeError(
            f"parameter {first[CPU]}: expected device {others[0]}, as {first[others[0]]} of this unit has, found cpu; "
            f"pass device_id to move what is on the CPU"
        )


def _instead_of_cpu(name: str) -> torch.device:
    """Where to compute if parameters are on the CPU and the group cannot communicate from there."""
    device = current_device()
    if device is None:
        raise RuntimeError(
            f"parameter {name}: expected a device that its process group communicates from, found cpu and no "
            f"accelerator; use a group with a backend for the CPU, such as gloo"
        )
    warn_caller(
        f"parameter {name}: expected a device that its process group communicates from, found cpu; moving the unit to "
        f"the current device, {device}. Pass device_id, or initialise the model there, which is faster"
    )
    return device


# --- modules and parameters -------------------------------------------------------------------------------------------


def _check_container(module: nn.Module, path: str) -> None:
    if isinstance(module, _WITHOUT_FORWARD):
        warn_caller(
            f"module {path or 'model'}: expected a module with a forward, found a {type(module).__name__}, whose own "
            f"parameters are never gathered; shard its elements, or the module around it"
        )


def _check_same_switch(model: nn.Module, settings: Settings) -> None:
    """Refuse units that would leave mixed precision in eval mode beside others that would not (E-STRAT-11)."""
    now = settings.full_precision_in_eval
    for path, module in model.named_modules():
        sharding = sharding_of(module)
        if sharding is not None and sharding.settings.full_precision_in_eval != now:
            raise ValueError(
                f"module {path}: expected FSDP_COMPILE_FULL_PREC_IN_EVAL to be {int(now)}, as it is now, found it "
                f"sharded with {1 - now}; set the variable once, before the first fully_shard"
            )


def _check_params(params: NamedParams, path: str) -> None:
    for name, param in params:
        full_name = _join(path, name)
        _check_kind(full_name, param)
        if param.is_complex():
            raise ValueError(
                f"parameter {full_name}: expected a real dtype, found {param.dtype}, which is complex; store "
                f"torch.view_as_real of it"
            )
        if param.grad is not None:
            raise ValueError(
                f"parameter {full_name}: expected no gradient before it is sharded, found one; call zero_grad() first"
            )


def _check_kind(name: str, param: nn.Parameter) -> None:
    """Refuse parameters that are not plain tensors with a known shape."""
    if isinstance(param, UninitializedParameter):
        raise ValueError(f"parameter {name}: expected a parameter with values, found a lazy one; run a forward")
    if isinstance(param, FlatParameter):
        raise ValueError(
            f"parameter {name}: expected an original parameter, found a FlatParameter of torch's wrapper; "
            f"shard the model once"
        )
    if is_subclass_around_others(param):
        _check_subclass(name, param)
    if has_attributes(param):
        for attribute, value in vars(param).items():
            if isinstance(value, torch.Tensor) and value.numel() >= max(param.numel(), 1):
                raise ValueError(
                    f"parameter {name}: expected a {type(param).__name__} whose attributes are smaller than its data, "
                    f"found {attribute} of shape {tuple(value.shape)}, which every rank would store; list the "
                    f"parameter in ignored_params"
                )


def _check_subclass(name: str, param: nn.Parameter) -> None:
    """Refuse a subclass around other tensors that cannot be put together of sharded ones (Note [Inner tensors])."""
    kind = type(param).__name__
    if param.requires_grad:
        raise ValueError(
            f"parameter {name}: expected a plain tensor, a DTensor or requires_grad=False, found {kind}, a subclass "
            f"around other tensors that trains; freeze it, or list it in ignored_params"
        )
    if not hasattr(param, "__tensor_unflatten__"):
        raise ValueError(
            f"parameter {name}: expected __tensor_unflatten__ beside __tensor_flatten__, found none in {kind}; define "
            f"it, or list the parameter in ignored_params"
        )
    for inner in plain_tensors(param):
        if type(inner) not in (torch.Tensor, nn.Parameter) or inner.is_meta or not inner.is_contiguous():
            what = "on meta" if inner.is_meta else f"with strides {inner.stride()}"
            raise ValueError(
                f"parameter {name}: expected {kind} around contiguous plain tensors with values, found a "
                f"{type(inner).__name__} of shape {tuple(inner.shape)} {what}; list it in ignored_params"
            )


def _check_distributions(params: NamedParams, path: str, placement: Placement) -> None:
    """Refuse DTensors that cannot be sharded as well."""
    for name, param in params:
        if isinstance(param, DTensor):
            if placement.shards == 1:
                raise ValueError(
                    f"parameter {_join(path, name)}: expected ranks to split it between, as it is a DTensor, found "
                    f"{placement.shards}; shard over two ranks or more, or list it in ignored_params"
                )
            peers = [placement.group, *filter(None, [placement.replicate])]
            ranks = [rank for group in peers for rank in dist.get_process_group_ranks(group)]
            check_distribution(_join(path, name), param, ranks)


def _check_sendable(model: nn.Module, prepared: list[PreparedUnit], carried: frozenset[str]) -> None:
    """Refuse to broadcast what the group's backend cannot take (E-SYNC-4)."""
    moved = {module for unit in prepared for _, module in unit.modules}
    devices = [("parameter " + _join(unit.path, name), unit.device) for unit in prepared for name, _ in unit.params]
    devices += [
        ("buffer " + name, buffer.device)
        for name, buffer in unsent_buffers(model).items()
        if model.get_submodule(name.rpartition(".")[0]) not in moved
    ]
    for name, device in devices:
        if device.type not in carried:
            raise ValueError(
                f"{name}: expected a device that the process group communicates from ({', '.join(sorted(carried))}) "
                f"for sync_module_states, found {device}; pass device_id, or move it there"
            )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
