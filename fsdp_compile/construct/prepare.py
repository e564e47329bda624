"""What `fully_shard` is going to do, worked out and checked before anything is changed.

See Note [Nothing is changed on refusal].
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FlatParameter, MixedPrecision, ShardingStrategy
from torch.nn.parameter import UninitializedParameter

from fsdp_compile.comm.collectives import backends
from fsdp_compile.comm.groups import HYBRID, resolve_groups
from fsdp_compile.config import check_type
from fsdp_compile.construct.arguments import (
    CPU,
    check_placements,
    current_device,
    given_device,
    offload_of,
)
from fsdp_compile.construct.wrap_policy import Chosen, Ignored
from fsdp_compile.core._torch import FakeTensor
from fsdp_compile.core.inner_params import (
    InnerParams,
    has_attributes,
    is_subclass_around_others,
    plain_tensors,
    recipe_of,
)
from fsdp_compile.core.settings import Settings, warn_caller
from fsdp_compile.core.sharding import sharding_of
from fsdp_compile.core.unit import unit_of
from fsdp_compile.tensors.tensor_parallel import check_distribution, is_dtensor

# Note [Nothing is changed on refusal]
# `fully_shard` has two halves. `prepare_units` works out all units and makes every check that can be made from modules,
# parameters and arguments; it changes nothing, so a model that is refused is as it was. Only then are units made one by
# one (units.py): initialized, moved, broadcast, sharded. What user code raises in that half (`param_init_fn`,
# `reset_parameters`) cannot be foreseen and leaves a model that is sharded in part; a warning names the module.

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
    """Prepare a unit for each chosen module; make every check of modules and parameters."""
    paths = {module: path for path, module in model.named_modules()}
    for module, path in paths.items():
        sharding, now = sharding_of(module), settings.full_precision_in_eval
        if sharding is not None and sharding.settings.full_precision_in_eval != now:  # (E-STRAT-11)
            raise ValueError(
                f"module {path}: FSDP_COMPILE_FULL_PREC_IN_EVAL was {1 - now} when it was sharded and is {int(now)} "
                f"now; set the variable once, before the first fully_shard"
            )
    of_units = [_settings_of(paths[module], differs, settings) for module, differs in chosen.items()]
    carried = frozenset(backends(settings.groups.shard))  # device types
    divided = list(_divide(chosen, ignored, paths))
    some_stay_on_meta = [  # a list: each call checks
        must_stay_on_meta(modules, own.param_init_fn, ignored)
        for (_, _, modules), own in zip(divided, of_units, strict=True)
    ]
    _check_memory((_join(paths[module], name), param) for module, params, _ in divided for name, param in params)
    prepared = []
    for (module, params, modules), own in zip(divided, of_units, strict=True):
        path = paths[module]
        if isinstance(module, _WITHOUT_FORWARD):
            warn_caller(
                f"module {path or 'model'}: a {type(module).__name__} has no forward, so its own parameters are never "
                f"gathered; shard its elements, or the module around it"
            )
        for name, param in params:
            _check_param(_join(path, name), param)
        check_placements(path, params, own.shard_placement_fn)
        device = compute_device(((_join(path, n), p.device) for n, p in params), own.device, carried)
        apart = [param for _, param in params if is_subclass_around_others(param) or has_attributes(param)]
        inner = {param: InnerParams(param, device) for param in apart}
        params = [each for n, p in params for each in (inner[p].named(n) if p in inner else [(n, p)])]
        on_meta = any(some_stay_on_meta) and _are_on_meta(params, path)
        own = replace(own, has_dtensors=any(is_dtensor(param) for _, param in params))
        _check_distributions(params, path, own)
        prepared.append(PreparedUnit(module, path, params, inner, modules, own, device, on_meta))
    copied = (each.settings.strategy for each in prepared if each.settings.placement.shards == 1
              and not each.settings.shards_alone)  # fmt: skip
    for strategy in dict.fromkeys(copied):
        if strategy is not ShardingStrategy.NO_SHARD:  # (E-STRAT-6)
            warn_caller(f"sharding_strategy: {strategy.name} over one rank is NO_SHARD")
    if any(own.sync_module_states for own in of_units):
        _check_sendable(model, prepared, carried)
    return prepared


def _divide(
    chosen: Chosen, ignored: Ignored, paths: Mapping[nn.Module, str]
) -> Iterator[tuple[nn.Module, NamedParams, list[tuple[str, nn.Module]]]]:
    """Each chosen module with the parameters and the modules, breadth-first, that no unit before it has taken."""
    params: set[nn.Parameter] = set(ignored.params)
    modules: set[nn.Module] = set(ignored.modules)
    for module in chosen:
        own_params = [(n, p) for n, p in module.named_parameters() if p not in params and unit_of(p) is None]
        reachable = {module: None}
        waiting = [module]
        for each in waiting:
            new = [child for child in each.children() if child not in reachable and child not in chosen
                   and child not in ignored.modules and not sharding_of(child)]  # fmt: skip
            reachable |= dict.fromkeys(new)
            waiting += new
        own_modules = [each for each in reachable if each not in modules]
        params.update(param for _, param in own_params)
        modules.update(own_modules)
        yield module, own_params, [(paths[each], each) for each in own_modules]


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


# --- the meta device --------------------------------------------------------------------------------------------------


def must_stay_on_meta(modules: Iterable[tuple[str, nn.Module]], init: Any, ignored: Ignored) -> bool:
    """Whether what is on the meta device must stay there, because a module has nothing that initializes it.

    Without `init` each module that directly owns parameters on the meta device needs a `reset_parameters()`, and these
    must not be DTensors, for which it would draw other values on each rank. Where a module has buffers alone there, and
    no such method, these wait for the script by themselves.
    """
    if init is not None and not callable(init):
        raise ValueError(f"param_init_fn must be a callable (module) -> None, not a {type(init).__name__}")
    absent = [(path, module, meta_tensors(module, ignored)) for path, module in modules]
    for _, module, tensors in absent if init is None else ():
        params = [tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)]
        if params and (any(is_dtensor(param) for param in params) or not resets_parameters(module)):
            return True
    for path, _, tensors in absent:
        for name, tensor in tensors.items():
            if weakref.getweakrefcount(tensor):
                raise ValueError(f"{tensor_name(path, name, tensor)} is on the meta device and has a weak reference, "
                                 f"which would not follow it to its device; drop the reference")  # fmt: skip
    return False


def resets_parameters(module: nn.Module) -> bool:
    """Whether `module` has a `reset_parameters()`, as torch's own layers have."""
    return callable(getattr(module, "reset_parameters", None))


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that `module` itself registered, by name."""
    tensors = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in tensors if tensor is not None}


def meta_tensors(module: nn.Module, ignored: Ignored) -> dict[str, torch.Tensor]:
    """Those of `own_tensors` that are on the meta device."""
    return {name: t for name, t in own_tensors(module).items() if t.is_meta and t not in ignored.params}


def tensor_name(path: str, name: str, tensor: torch.Tensor) -> str:
    """How messages call a tensor that the module at `path` owns."""
    return f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {_join(path, name)}"


def _are_on_meta(params: NamedParams, path: str) -> bool:
    """Whether a unit's parameters are on the meta device. ValueError if some are, and others have values."""
    present = [name for name, param in params if not param.is_meta]
    absent = [name for name, param in params if param.is_meta]
    if present and absent:
        raise ValueError(
            f"parameter {_join(path, absent[0])} is on the meta device and has no reset_parameters(), while "
            f"{_join(path, present[0])} of the same unit has values; pass param_init_fn, or give it values"
        )
    return bool(absent)


# --- devices ----------------------------------------------------------------------------------------------------------

# Each unit decides where it computes from the devices of its parameters (E-INIT-12 to 17). Those on the meta device
# have no device yet: they follow the others.


def compute_device(
    devices: Iterable[tuple[str, torch.device]], given: torch.device | None, carried: frozenset[str]
) -> torch.device:
    """The device that a unit computes on.

    Args:
        devices: name and device of each parameter.
        given: `device_id`.
        carried: the device types that the unit's group communicates from.
    """
    first: dict[torch.device, str] = {}
    for name, device in devices:
        first.setdefault(device, name)
    first.pop(torch.device("meta"), None)
    others = [device for device in first if device.type != "cpu"]
    if len(others) > 1:
        one, other = others[:2]
        remedy = "use one kind of accelerator" if one.type != other.type else "move the unit's parameters to one device"
        raise RuntimeError(
            f"parameter {first[other]} is on {other}, and {first[one]} of the same unit on {one}; {remedy} before "
            f"fully_shard"
        )
    if others and CPU in first and given is None:
        raise RuntimeError(
            f"parameter {first[CPU]} is on the CPU, and {first[others[0]]} of the same unit on {others[0]}; pass "
            f"device_id to move what is on the CPU"
        )
    if given is not None and others and others[0] != given:
        raise ValueError(
            f"parameter {first[others[0]]} is on {others[0]}, but device_id is {given} (rank {dist.get_rank()}); move "
            f"it there or to the CPU, or pass its device"
        )
    if given is not None or others:
        return given or others[0]
    current = current_device()
    if CPU not in first:
        return current if current and current.type in carried else CPU
    if "cpu" in carried:
        return CPU
    if current is None:
        raise RuntimeError(
            f"parameter {first[CPU]} is on the CPU, which its process group cannot communicate from, and there is no "
            f"accelerator; use a group with a backend for the CPU, such as gloo"
        )
    warn_caller(
        f"parameter {first[CPU]} is on the CPU, which its process group cannot communicate from; moving the unit to "
        f"the current device, {current}. Pass device_id, or initialise the model there, which is faster"
    )
    return current


# --- parameters -------------------------------------------------------------------------------------------------------


def _check_param(name: str, param: nn.Parameter) -> None:
    if isinstance(param, UninitializedParameter):
        raise ValueError(f"parameter {name} is lazy and has no shape yet; run a forward first")
    if isinstance(param, FlatParameter):
        raise ValueError(f"parameter {name} is a FlatParameter of torch's wrapper; shard the model once")
    if is_subclass_around_others(param):
        _check_subclass(name, param)
    if has_attributes(param):
        kind, tensors = type(param).__name__, {n: t for n, t in vars(param).items() if isinstance(t, torch.Tensor)}
        for attribute, value in {"data": param, **tensors}.items():
            if value.is_meta:
                raise ValueError(
                    f"parameter {name}: {attribute} of its {kind} is on the meta device, where nothing gives it "
                    f"values; give them before fully_shard, or list the parameter in ignored_params"
                )
            if value is not param and value.numel() >= max(param.numel(), 1):
                raise ValueError(
                    f"parameter {name}: {attribute} of its {kind} has shape {tuple(value.shape)}, as large as the "
                    f"data, and every rank would store it; list the parameter in ignored_params"
                )
    if param.is_complex():
        raise ValueError(f"parameter {name} is complex ({param.dtype}); store torch.view_as_real of it")
    if param.grad is not None:
        raise ValueError(f"parameter {name} has a gradient; call zero_grad() before fully_shard")


def _check_memory(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that share elements: each would get a copy, and they would go apart in training."""
    by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        if type(param) is nn.Parameter and param.numel() and not (param.is_meta or isinstance(param.data, FakeTensor)):
            before = by_storage.setdefault(param.untyped_storage().data_ptr(), [])
            for other, earlier in before:
                if (param.requires_grad or earlier.requires_grad) and _share_elements(param, earlier):
                    raise ValueError(
                        f"parameters {other} and {name} share memory, and would no longer do so when they are sharded; "
                        f"make them one nn.Parameter, or give one a clone of its data"
                    )
            before.append((name, param))


def _share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    spans = [sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) + 1 for t in (one, other)]
    begins = one.data_ptr(), other.data_ptr()
    ends = begins[0] + spans[0] * one.element_size(), begins[1] + spans[1] * other.element_size()
    if begins[0] >= ends[1] or begins[1] >= ends[0] or one.dtype != other.dtype:
        return begins[0] < ends[1] and begins[1] < ends[0]
    marks = torch.zeros((max(ends) - min(begins)) // one.element_size(), dtype=torch.bool, device="cpu")
    first, second = (
        marks.as_strided(t.shape, t.stride(), (t.data_ptr() - min(begins)) // t.element_size()) for t in (one, other)
    )
    first.fill_(True)
    return bool(second.any())


def _check_subclass(name: str, param: nn.Parameter) -> None:
    """Refuse a subclass around other tensors that cannot be put together of sharded ones (Note [Inner tensors])."""
    kind = type(param).__name__
    if param.requires_grad:
        raise ValueError(
            f"parameter {name} trains and is a {kind}, a subclass around other tensors; freeze it, or list it in "
            f"ignored_params"
        )
    if not hasattr(param, "__tensor_unflatten__"):
        raise ValueError(
            f"parameter {name}: {kind} has __tensor_flatten__ but no __tensor_unflatten__; define it, or list the "
            f"parameter in ignored_params"
        )
    for inner in plain_tensors(param):
        if type(inner) not in (torch.Tensor, nn.Parameter) or inner.is_meta or not inner.is_contiguous():
            what = "on meta" if inner.is_meta else f"with strides {inner.stride()}"
            raise ValueError(
                f"parameter {name}: a {kind} must be around contiguous plain tensors with values, found a "
                f"{type(inner).__name__} of shape {tuple(inner.shape)} {what}; list it in ignored_params"
            )
    # As they will lie in a flat parameter: one behind the other.
    views = (each.new_empty(at + each.numel())[at:].view(each.shape) for at, each in enumerate(plain_tensors(param)))
    try:
        recipe_of(param).put_together(views)
    except Exception as error:
        raise ValueError(
            f"parameter {name}: a {kind} is to be put together of views of a flat parameter, which it refuses: "
            f"{error}; list it in ignored_params"
        ) from error


def data_parallel_peers(settings: Settings) -> list[int]:
    """The ranks that this one averages gradients with: over shards, and over replicas."""
    groups = filter(None, (settings.groups.shard, settings.groups.replicate))
    return [rank for group in groups for rank in dist.get_process_group_ranks(group)]


def _check_distributions(params: NamedParams, path: str, settings: Settings) -> None:
    for name, param in params:
        if is_dtensor(param):
            if settings.strategy is ShardingStrategy.NO_SHARD:
                raise ValueError(
                    f"parameter {_join(path, name)} is a DTensor, which NO_SHARD cannot keep; choose another "
                    f"sharding_strategy, or list it in ignored_params"
                )
            peers = data_parallel_peers(settings)
            check_distribution(_join(path, name), param, peers, settings.groups.data_parallel_size)


def check_other_dimensions(prepared_units: Iterable[PreparedUnit], beside: Mapping[str, int]) -> None:
    """Raise ValueError if a parameter is plain, and the mesh has dimensions `beside` the data-parallel ones.

    It may be a part of a tensor or all of it: nothing says which, and norms and checkpoints would have this rank's own.
    """
    for prepared in prepared_units if beside else ():
        for name, param in prepared.params:
            if not is_dtensor(param):
                sizes = ", ".join(f"{dim} of {size} ranks" for dim, size in beside.items())
                raise ValueError(
                    f"parameter {_join(prepared.path, name)} is no DTensor, and dp_mesh_dims leaves {sizes} of the "
                    f"mesh: whether ranks have parts or copies of it is unknown; make it a DTensor on these dimensions "
                    f"(parallelize_module, distribute_tensor), or pass the data-parallel part of the mesh if they have "
                    f"copies, or list it in ignored_params"
                )


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
                f"{name} is on {device}, which the process group cannot send from ({', '.join(sorted(carried))}), as "
                f"sync_module_states needs; pass device_id, or move it there"
            )


def unsent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of `module`, by name, that are still to be sent; those on the meta device have nothing to send."""
    return {n: b for n, b in module.named_buffers() if not (b.is_meta or getattr(b, "_fsdp_sent", False))}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
