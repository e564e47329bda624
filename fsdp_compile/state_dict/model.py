"""`state_dict` and `load_state_dict` of sharded modules: original names, shapes and dtypes, and one of three kinds.

FULL       plain tensors of the original shapes: each unit is gathered, copied and freed in turn
SHARDED    for each parameter a `ShardedValue`, which is a DTensor, over memory of the shard: nothing is gathered
LOCAL      for each parameter a `ShardedTensor`, which is no DTensor, with a copy of what the rank stores

Where the kind was set, as `FullyShardedDataParallel` does, values are copies, also of parameters that are not sharded
(ignored ones, within `summon_full_params`) and of buffers. SHARDED ones are as FSDP1 gives them: rows of
dimension 0 in a DTensor; of a `FullyShardedDataParallel` without a mesh in torch's own ShardedTensor. Each unit's rows
are exchanged in turn.
In FULL tensor subclasses stay whole; the other kinds have their inner tensors (Note [Inner tensors]).

Every kind can be loaded, whichever is set. SHARDED and LOCAL values in a file of `torch.save` are what one rank stores;
only the same rank of equally many can load them. The default is SHARDED after `fully_shard` and FULL after
`FullyShardedDataParallel`, as in torch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType

from fsdp_compile.comm.collectives import is_first
from fsdp_compile.core.inner_params import inner_names, plain_tensors, recipe_of, recipes_of
from fsdp_compile.core.sharding import sharding_of, stored_parameters, units_used_below
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.state_dict.sharded_value import ManagedParameter, full_tensor, managed, torch_values
from fsdp_compile.tensors._torch import called_by_dcp
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

FULL, SHARDED, LOCAL = (StateDictType[f"{kind}_STATE_DICT"] for kind in ("FULL", "SHARDED", "LOCAL"))
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    FULL: (fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig),
    SHARDED: (fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig),
    LOCAL: (fsdp.LocalStateDictConfig, fsdp.LocalOptimStateDictConfig),
}


def default_settings(kind: StateDictType) -> StateDictSettings:
    """The settings of `kind`, with default configs."""
    config, optim_config = _CONFIGS[kind]
    return StateDictSettings(kind, config(), optim_config())


DEFAULT = default_settings(SHARDED)


def settings_of(unit: Unit | None) -> StateDictSettings:
    """What is set for a unit; the default for None."""
    return DEFAULT if unit is None or unit.state_settings is None else unit.state_settings


def is_first_rank(unit: Unit) -> bool:
    """Whether this is the first of all ranks that share the unit: the one that `rank0_only` means."""
    return all(is_first(group) for group in (unit.group, unit.replicas) if group is not None)


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Choose the kind of state dict for all units with a parameter in `module`.

    Args:
        module: any module, sharded itself or not.
        state_dict_type: the kind.
        state_dict_config: of the class that belongs to the kind; None: its defaults.
        optim_state_dict_config: the same for the optimizer's state.

    Returns:
        The settings before; their fields are None if there are no units.

    Raises:
        RuntimeError: a config is of another class.
        AssertionError: units have different kinds before.
    """
    config_class, optim_config_class = _CONFIGS[state_dict_type]
    config = _checked_config("state_dict_config", state_dict_config, config_class)
    optim_config = _checked_config("optim_state_dict_config", optim_state_dict_config, optim_config_class)
    before = _common_settings(module, lambda settings: settings.state_dict_type)  # which has one class of each config
    for unit in units_used_below(module):
        unit.state_settings = StateDictSettings(state_dict_type, config, optim_config)  # type: ignore[arg-type]  # checked
    return before or StateDictSettings(None, None, None)  # type: ignore[arg-type]  # as torch's function


def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
    """The settings of all units with a parameter in `module`, None without units; AssertionError if they differ."""
    return _common_settings(module, lambda settings: settings)


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """As `set_state_dict_type`, within the context."""
    before = {unit: unit.state_settings for unit in units_used_below(module)}
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for unit, settings in before.items():
            unit.state_settings = settings


def _checked_config(name: str, config: object, expected: type) -> object:
    if config is not None and type(config) is not expected:
        raise RuntimeError(f"{name}: expected a {expected.__name__}, found a {type(config).__name__}; pass the class "
                           f"that belongs to the state_dict_type")  # fmt: skip
    return expected() if config is None else config


def _common_settings(module: nn.Module, compared: Callable[[StateDictSettings], Any]) -> StateDictSettings | None:
    first: StateDictSettings | None = None
    for unit in units_used_below(module):
        settings = settings_of(unit)
        first = first or settings
        if compared(settings) != compared(first):
            raise AssertionError(f"state_dict_type: expected {first}, as of the first unit, found {settings} of "
                                 f"{unit}; set it on the root")  # fmt: skip
    return first


# --- values, module by module -----------------------------------------------------------------------------------------

# `nn.Module` saves and loads values module by module. A module that owns sharded parameters (fsdp_module.py) replaces
# these values by the functions here: `collect` around its `state_dict`, `save` and `load` for its own parameters.


class _Saving:
    """One call of `state_dict`, with its calls for submodules."""

    def __init__(self) -> None:
        self.for_dcp = called_by_dcp()  # then values are sharded, whatever is set
        self._made: dict[Unit, Sequence[Tensor | None]] = {}  # of each unit's parameters what is gathered or exchanged

    def settings_of(self, unit: Unit | None) -> StateDictSettings:
        return DEFAULT if self.for_dcp else settings_of(unit)

    def value(self, parameter: ManagedParameter) -> Tensor | None:
        unit = parameter.unit
        settings = self.settings_of(unit)
        if settings is DEFAULT:
            return parameter.value(parameter.local)
        if settings.state_dict_type is LOCAL:
            device = "cpu" if settings.state_dict_config.offload_to_cpu else parameter.local.device
            return ShardedTensor(parameter.local.to(device, copy=True), parameter.spec)
        if unit not in self._made:
            self._made[unit] = _full_copies(unit) if settings.state_dict_type is FULL else _sharded_copies(unit)
        return self._made[unit][parameter.index]


_running: ContextVar[_Saving | None] = ContextVar("saving", default=None)  # the outermost call in this context


def collect(module: nn.Module, state_dict: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Call `state_dict`, the method of the original class of `module`, for values of the kind that is set."""
    is_outermost, saving = _running.get() is None, _running.get() or _Saving()
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
    if unit is not None and settings.state_dict_type is not LOCAL:  # the config is for buffers and ignored ones too
        for name in [name for name in state if name.startswith(prefix)]:
            if settings.state_dict_type is FULL and not _has_values(unit):
                del state[name]
            elif settings.state_dict_config.offload_to_cpu and isinstance(state[name], Tensor):
                state[name] = state[name].cpu()
    if is_outermost and unit is not None and unit.state_settings is not None and not saving.for_dcp:
        _copy_what_is_not_sharded(module, state, prefix)
    return state


def _copy_what_is_not_sharded(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name in {
        prefix + name for name, tensor in tensors if not (isinstance(tensor, nn.Parameter) and managed(tensor))
    }:
        if isinstance(state.get(name), Tensor):
            state[name] = state[name].clone()


def save(module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """Replace the values that `_save_to_state_dict` stored for the sharded parameters of `module` itself."""
    saving = _running.get() or _Saving()
    for name, parameter in _own_parameters(module, destination, prefix):
        destination[prefix + name] = saving.value(parameter)
    for name, recipe in recipes_of(module).items():
        inner = inner_names(name, recipe)
        unit = managed(stored_parameters(module)[inner[0]]).unit  # type: ignore[arg-type,union-attr]  # it is managed
        if saving.settings_of(unit).state_dict_type is FULL:
            plain = [destination.pop(prefix + each) for each in inner]
            destination[prefix + name] = recipe.put_together(iter(plain)) if _has_values(unit) else None


@torch.no_grad()
def load(module: nn.Module, state: dict[str, Any], prefix: str, assign: bool, errors: list[str]) -> None:
    """Copy values into the sharded parameters of `module` itself; add those that do not fit to `errors`.

    Then `state` has the parameters in place of the values, so that `_load_from_state_dict` copies them onto themselves.
    Where they are on the meta device and it is to `assign`, `state` has new sharded parameters with the values.
    """
    for name in recipes_of(module):
        _flatten_subclass(module, name, state, prefix, errors)
    for name, parameter in _own_parameters(module, state, prefix):
        key, value, stored, param = prefix + name, state[prefix + name], parameter.local, parameter.param
        local = parameter.local_of(value, f"parameter {key}") if isinstance(value, Tensor) else None
        if local is None:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            errors.append(f"size mismatch for {key}: expected shape {tuple(parameter.spec.shape)}, found {found}")
        elif assign and stored.is_meta and not local.is_meta:
            param = _new_parameter(parameter, local)
        else:
            if local.data_ptr() != stored.data_ptr():
                stored.copy_(local)
            # On all ranks, whatever they store: what was gathered before is out of date everywhere.
            torch.autograd.graph.increment_version([param, stored])
        state[key] = param
    for name, own in stored_parameters(module).items() if assign else ():
        # Where a value was assigned before, and the unit still waits for others.
        waits = own is not None and managed(own) is None and (isinstance(own, ShardedTensor) or unit_of(own))
        if waits and prefix + name in state:
            state[prefix + name] = full_tensor(state[prefix + name])


def _new_parameter(parameter: ManagedParameter, local: Tensor) -> nn.Parameter:
    """A new parameter of `local`, in the place of one that is on the meta device; in all places that share it, one."""
    for parameters, name in parameter.unit.locations.of[parameter.index]:
        held = parameters.get(name)
        if held is not None and held is not parameter.param:
            return held
    value = ShardedTensor(local.detach().to(parameter.local.dtype), parameter.spec)
    return nn.Parameter(value, requires_grad=parameter.param.requires_grad)


def _flatten_subclass(module: nn.Module, name: str, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Replace a tensor subclass in `state` by its inner tensors."""
    recipe, value = recipes_of(module)[name], state.get(prefix + name)
    if type(value) is not recipe.kind:
        return
    inner = inner_names(name, recipe)
    there = value.to(stored_parameters(module)[inner[0]].device)  # type: ignore[union-attr]  # a parameter
    given = recipe_of(there)
    if (given.suffixes, given.context) == (recipe.suffixes, recipe.context):
        del state[prefix + name]
        state.update(zip([prefix + each for each in inner], plain_tensors(there), strict=True))
    else:
        errors.append(
            f"{prefix}{name}: expected a {recipe.kind.__name__} of {recipe.context}, found one of {given.context}"
        )


def _own_parameters(module: nn.Module, state: dict[str, Any], prefix: str) -> list[tuple[str, ManagedParameter]]:
    """The sharded parameters, by name, that `module` itself owns and `state` has a value for."""
    own = [(name, param) for name, param in stored_parameters(module).items() if prefix + name in state]
    return [(name, parameter) for name, param in own if param is not None and (parameter := managed(param))]


@torch.inference_mode(False)
@torch.no_grad()
def _full_copies(unit: Unit) -> list[Tensor | None]:
    """Copies of the unit's parameters in full shape; None on ranks that get none under `rank0_only`."""
    config, has_values = settings_of(unit).state_dict_config, _has_values(unit)
    device = torch.device("cpu") if config.offload_to_cpu else unit.device
    copies: list[Tensor | None] = []
    for flat in unit.flats:
        views = flat.full_views(unit.gather(flat.shard))
        copies += [view.to(device, copy=True) if has_values else None for view in views]
    return copies


def _sharded_copies(unit: Unit) -> list[Tensor]:
    """Copies of the unit's parameters as FSDP1 has them in sharded state dicts: one all-to-all for each dtype."""
    config: Any = settings_of(unit).state_dict_config
    values = [ShardedTensor(param.local.detach(), param.spec) for param in unit.params]  # type: ignore[attr-defined]  # sharded
    made = torch_values(values, config._use_dtensor or not unit.chunked_values)
    return [value.cpu() for value in made] if config.offload_to_cpu else made


def _has_values(unit: Unit) -> bool:
    return is_first_rank(unit) or not settings_of(unit).state_dict_config.rank0_only  # type: ignore[attr-defined]  # of FULL
