"""What `fully_shard` is going to do, worked out before anything is changed.

See Note [Nothing is changed on refusal].
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile.comm.collectives import backends
from fsdp_compile.construct.blocks import Ignored
from fsdp_compile.core.inner_params import InnerParams, has_attributes, is_subclass_around_others
from fsdp_compile.core.settings import Settings, warn_caller
from fsdp_compile.core.sharding import sharding_of
from fsdp_compile.core.unit import unit_of
from fsdp_compile.tensors.tensor_parallel import is_dtensor

# Note [Nothing is changed on refusal]
# `fully_shard` has two halves. In the first all units are worked out (`prepare_units`), and every check is made that
# can be made from modules, parameters and arguments (refusals.py); nothing is changed, so a model that is refused is as
# it was. Only then are units made one by one (units.py): initialized, moved, broadcast, sharded. What user code raises
# in that half (`param_init_fn`, `reset_parameters`) cannot be foreseen and leaves a model that is sharded in part; a
# warning names the module.

NamedParams = list[tuple[str, nn.Parameter]]
CPU = torch.device("cpu")


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


def prepare_units(model: nn.Module, of_units: Mapping[nn.Module, Settings], ignored: Ignored) -> list[PreparedUnit]:
    """Prepare a unit for each module of `of_units`, innermost first; each has the settings that stand there."""
    paths = {module: path for path, module in model.named_modules()}
    divided = list(divide_modules(of_units, ignored, paths))
    some_stay_on_meta = [  # a list: each call checks
        must_stay_on_meta(modules, own.param_init_fn, ignored)
        for (_, _, modules), own in zip(divided, of_units.values(), strict=True)
    ]
    carried = frozenset(backends(of_units[model].groups.shard.find()))  # device types
    prepared = []
    for (module, params, modules), own in zip(divided, of_units.values(), strict=True):
        path = paths[module]
        device = compute_device(((join(path, n), p.device) for n, p in params), own.device, carried)
        apart = [param for _, param in params if is_subclass_around_others(param) or has_attributes(param)]
        inner = {param: InnerParams(param, device) for param in apart}
        params = [each for n, p in params for each in (inner[p].named(n) if p in inner else [(n, p)])]
        on_meta = any(some_stay_on_meta) and _are_on_meta(params, path)
        prepared.append(PreparedUnit(module, path, params, inner, modules, own, device, on_meta))
    return prepared


def divide_modules(
    chosen: Collection[nn.Module], ignored: Ignored, paths: Mapping[nn.Module, str]
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
    return f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {join(path, name)}"


def _are_on_meta(params: NamedParams, path: str) -> bool:
    """Whether a unit's parameters are on the meta device. ValueError if some are, and others have values."""
    present = [name for name, param in params if not param.is_meta]
    absent = [name for name, param in params if param.is_meta]
    if present and absent:
        raise ValueError(
            f"parameter {join(path, absent[0])} is on the meta device and has no reset_parameters(), while "
            f"{join(path, present[0])} of the same unit has values; pass param_init_fn, or give it values"
        )
    return bool(absent)


# --- devices ----------------------------------------------------------------------------------------------------------

# Each unit decides where it computes from the devices of its parameters (E-INIT-12 to 17). Those on the meta device
# have no device yet: they follow the others.


def current_device() -> torch.device | None:
    """The accelerator that is current here; None without one."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return torch.device(accelerator.type, torch.accelerator.current_device_index()) if accelerator else None


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


def data_parallel_peers(settings: Settings) -> list[int]:
    """The ranks that this one averages gradients with: over shards, and over replicas."""
    groups = filter(None, (settings.groups.shard, settings.groups.replicate))
    return [rank for group in groups for rank in dist.get_process_group_ranks(group.find())]


def unsent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of `module`, by name, that are still to be sent; those on the meta device have nothing to send."""
    return {n: b for n, b in module.named_buffers() if not (b.is_meta or getattr(b, "_fsdp_sent", False))}


def join(path: str, name: str) -> str:
    """The name in the model of what the module at `path` calls `name`."""
    return f"{path}.{name}" if path else name
