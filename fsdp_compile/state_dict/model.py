"""`state_dict` and `load_state_dict` of sharded modules: original names, shapes and dtypes, and one of three kinds.

FULL       plain tensors of the original shapes: each unit is gathered, copied and freed in turn
SHARDED    a `ShardedValue`, which is a DTensor, for each parameter, over memory of the shard: nothing is gathered
LOCAL      a `ShardedTensor`, which is none, for each parameter, over the same memory

FULL has tensor subclasses as they were; the other kinds have their inner tensors (Note [Inner tensors]).

Every kind can be loaded whatever is set. SHARDED and LOCAL values in a file of `torch.save` are what one rank stores,
and only the same rank of equally many can load them. Until a kind is set, `fully_shard` means SHARDED and
`FullyShardedDataParallel` means FULL, as with torch's functions of these names.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType

from fsdp_compile.comm.collectives import is_first
from fsdp_compile.core.flat_collectives import all_gather_flat
from fsdp_compile.core.inner_params import inner_names, plain_tensors, recipe_of, recipes_of
from fsdp_compile.core.sharded_tensor import ShardedTensor
from fsdp_compile.core.sharding import sharding_of, units_used_below
from fsdp_compile.core.unit import Unit
from fsdp_compile.state_dict.sharded_value import ManagedParameter, managed

FULL, SHARDED, LOCAL = (StateDictType[f"{kind}_STATE_DICT"] for kind in ("FULL", "SHARDED", "LOCAL"))
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    FULL: (fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig),
    SHARDED: (fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig),
    LOCAL: (fsdp.LocalStateDictConfig, fsdp.LocalOptimStateDictConfig),
}


def default_settings(kind: StateDictType) -> StateDictSettings:
    """The settings of `kind` with default configs."""
    config, optim_config = _CONFIGS[kind]
    return StateDictSettings(kind, config(), optim_config())


DEFAULT = default_settings(SHARDED)


def settings_of(unit: Unit | None) -> StateDictSettings:
    """What is set for a unit; the default without one."""
    return DEFAULT if unit is None or unit.state_settings is None else unit.state_settings


def is_first_rank(unit: Unit) -> bool:
    """Whether this is the first of all ranks that share the unit: the rank that `rank0_only` is about."""
    return all(is_first(group) for group in (unit.group, unit.replicas) if group is not None)


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Choose the kind of state dict that all units with a parameter in `module`, sharded itself or not, give.

    Args:
        module: any module.
        state_dict_type: the kind.
        state_dict_config: of the class that belongs to the kind; None: its defaults.
        optim_state_dict_config: the same for the optimizer's state.

    Returns:
        What was set before; its fields are None if there are no units.

    Raises:
        RuntimeError: a config is of another class.
        AssertionError: units differ in the kind, or in the class of a config, that was set before.
    """
    config_class, optim_config_class = _CONFIGS[state_dict_type]
    config = _checked("state_dict_config", state_dict_config, config_class)
    optim_config = _checked("optim_state_dict_config", optim_state_dict_config, optim_config_class)
    units = units_used_below(module)
    before = [settings_of(unit) for unit in units]
    for unit, settings in zip(units, before, strict=True):
        if _classes(settings) != _classes(before[0]):
            raise AssertionError(_difference(unit, settings, before[0]))
    for unit in units:
        unit.state_settings = StateDictSettings(state_dict_type, config, optim_config)  # type: ignore[arg-type]  # checked
    return before[0] if before else StateDictSettings(None, None, None)  # type: ignore[arg-type]  # as torch's function


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """What is set for all units with a parameter in `module`; None if there are none.

    Raises:
        AssertionError: the units differ.
    """
    first = None
    for unit in units_used_below(module):
        first = first or settings_of(unit)
        if settings_of(unit) != first:
            raise AssertionError(_difference(unit, settings_of(unit), first))
    return first


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """As `set_state_dict_type`, until the context is left, also by an exception."""
    before = {unit: unit.state_settings for unit in units_used_below(module)}
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for unit, settings in before.items():
            unit.state_settings = settings


def _checked(name: str, config: object, expected: type) -> object:
    if config is not None and type(config) is not expected:
        raise RuntimeError(f"{name}: expected a {expected.__name__}, found a {type(config).__name__}; pass the class "
                           f"that belongs to the state_dict_type")  # fmt: skip
    return expected() if config is None else config


def _classes(settings: StateDictSettings) -> tuple[object, ...]:
    return settings.state_dict_type, type(settings.state_dict_config), type(settings.optim_state_dict_config)


def _difference(unit: Unit, settings: StateDictSettings, first: StateDictSettings) -> str:
    return f"state_dict_type: expected {first}, as of the first unit, found {settings} of {unit}; set it on the root"


# --- values, module by module -----------------------------------------------------------------------------------------

# `nn.Module` saves and loads values module by module. A module that owns sharded parameters (fsdp_module.py) replaces
# these values by the functions here: `collect` around its `state_dict`, `save` and `load` for its own parameters.


class _Saving:
    """One call of `state_dict` with all the calls that it makes in turn."""

    def __init__(self) -> None:
        self.sharded = called_by_dcp()  # then values are sharded, whatever is set
        self._copies: dict[Unit, list[Tensor | None]] = {}  # of each unit's parameters in full shape

    def settings_of(self, unit: Unit | None) -> StateDictSettings:
        return DEFAULT if self.sharded else settings_of(unit)

    def value(self, parameter: ManagedParameter) -> Tensor | None:
        """What the state dict has for a parameter."""
        unit = parameter.unit
        settings = self.settings_of(unit)
        if settings.state_dict_type is FULL:
            if unit not in self._copies:
                self._copies[unit] = _full_copies(unit)
            return self._copies[unit][parameter.index]
        local = parameter.local
        if settings.state_dict_config.offload_to_cpu:
            local = local.cpu()
        return ShardedTensor(local, parameter.spec) if settings.state_dict_type is LOCAL else parameter.value(local)


_running: ContextVar[_Saving | None] = ContextVar("saving", default=None)  # the outermost call in this context


def collect(module: nn.Module, state_dict: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What `state_dict`, that of the original class of `module`, returns, with values of the kind that is set."""
    saving = _running.get() or _Saving()
    token = _running.set(saving)
    try:
        state: dict[str, Any] = state_dict(*args, **kwargs)
    finally:
        _running.reset(token)
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    sharding = sharding_of(module)
    for name, dtype in (sharding.buffer_dtypes if sharding else {}).items():
        if isinstance(state.get(prefix + name), Tensor):
            state[prefix + name] = state[prefix + name].to(dtype)
    unit = next(iter(units_used_below(module)), None)
    settings = saving.settings_of(unit)
    if unit is not None and settings.state_dict_type is FULL:  # holds for buffers and ignored parameters as well
        for name in [name for name in state if name.startswith(prefix)]:
            if not _has_values(unit):
                del state[name]
            elif settings.state_dict_config.offload_to_cpu and isinstance(state[name], Tensor):
                state[name] = state[name].cpu()
    return state


def save(module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """Replace, in what `_save_to_state_dict` stored, the values of the sharded parameters of `module` itself."""
    saving = _running.get() or _Saving()
    for name, parameter in _own_parameters(module, destination, prefix):
        destination[prefix + name] = saving.value(parameter)
    for name, recipe in recipes_of(module).items():
        inner = inner_names(name, recipe)
        unit = managed(module._parameters[inner[0]]).unit  # type: ignore[arg-type,union-attr]  # it is managed
        if saving.settings_of(unit).state_dict_type is FULL:
            plain = [destination.pop(prefix + each) for each in inner]
            destination[prefix + name] = recipe.put_together(iter(plain)) if _has_values(unit) else None


def load(module: nn.Module, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Copy values into the sharded parameters of `module` itself, and add what does not fit to `errors`.

    In `state` the parameters then take the place of their values: `_load_from_state_dict` copies them onto themselves.
    """
    for name in recipes_of(module):
        _flatten(module, name, state, prefix, errors)
    for name, parameter in _own_parameters(module, state, prefix):
        if error := _load(parameter, prefix + name, state[prefix + name]):
            errors.append(f"size mismatch for {prefix}{name}: {error}")
        state[prefix + name] = parameter.param


def _flatten(module: nn.Module, name: str, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Replace the tensor subclass that `state` has for the parameter `name`, if any, by its inner tensors."""
    recipe, value = recipes_of(module)[name], state.get(prefix + name)
    if type(value) is not recipe.kind:
        return
    inner = inner_names(name, recipe)
    there = value.to(module._parameters[inner[0]].device)  # type: ignore[union-attr]  # a parameter
    given = recipe_of(there)
    if (given.suffixes, given.context) == (recipe.suffixes, recipe.context):
        del state[prefix + name]
        state.update(zip([prefix + each for each in inner], plain_tensors(there), strict=True))
    else:
        errors.append(
            f"{prefix}{name}: expected a {recipe.kind.__name__} of {recipe.context}, found one of {given.context}"
        )


def _own_parameters(module: nn.Module, state: dict[str, Any], prefix: str) -> list[tuple[str, ManagedParameter]]:
    """The sharded parameters that `module` itself owns, by name, as far as `state` has a value for them."""
    own = [(name, param) for name, param in module._parameters.items() if param is not None and prefix + name in state]
    return [(name, parameter) for name, param in own if (parameter := managed(param))]


@torch.inference_mode(False)
@torch.no_grad()
def _full_copies(unit: Unit) -> list[Tensor | None]:
    """Copies of the unit's parameters in full shape; None on ranks that are not to have them."""
    config, has_values = settings_of(unit).state_dict_config, _has_values(unit)
    device = torch.device("cpu") if config.offload_to_cpu else unit.device
    copies: list[Tensor | None] = []
    for flat in unit.flats:
        views = flat.full_views(all_gather_flat(flat.shard.to(unit.device), unit.stages))
        copies += [view.to(device, copy=True) if has_values else None for view in views]
    return copies


def _has_values(unit: Unit) -> bool:
    """Whether the full state dict of this rank has values."""
    return is_first_rank(unit) or not settings_of(unit).state_dict_config.rank0_only  # type: ignore[attr-defined]  # of FULL


def called_by_dcp() -> bool:
    """Whether `torch.distributed.checkpoint.state_dict` calls, which wants sharded values under original names.

    That module asks torch's own wrapper for them; of other modules it takes what `state_dict` and `named_parameters`
    return, and calls nothing before or after that would tell. So this is the one place that looks at the caller.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("fsdp_compile.", "torch.nn.modules.", "torch._dynamo.", "contextlib", "torch.utils.")):
            return name == "torch.distributed.checkpoint.state_dict"
        frame = frame.f_back
    return False


@torch.no_grad()
def _load(parameter: ManagedParameter, name: str, value: Any) -> str | None:
    """Copy this rank's elements of `value` into the shard; what is wrong with the value, if it does not fit."""
    local = parameter.local_of(value, f"parameter {name}") if isinstance(value, Tensor) else None
    if local is None:
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        return f"expected shape {parameter.shape}, found {what}"
    stored = parameter.local
    if local.data_ptr() != stored.data_ptr():
        stored.copy_(local)
    # On all ranks: what was gathered before is out of date everywhere.
    torch.autograd.graph.increment_version([parameter.param, stored])
    return None
