"""Which kind of state dict a sharded module gives: full, sharded or local.

FULL       plain tensors of the original shapes: each unit is gathered, copied and freed in turn
SHARDED    a `ShardedValue` of the original shape for each parameter, over memory of the shard: nothing is gathered
LOCAL      a `ShardedTensor` for each parameter, over the same memory, which other code knows less well than DTensors

Every kind can be loaded whatever is set. SHARDED and LOCAL values in a file of `torch.save` are what one rank stores,
and only the same rank of equally many can load them. Until a kind is set, `fully_shard` means SHARDED and
`FullyShardedDataParallel` means FULL, as with torch's functions of these names.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fsdp_compile.comm.collectives import is_first
from fsdp_compile.core.sharding import units_used_below
from fsdp_compile.core.unit import Unit

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    LOCAL: (LocalStateDictConfig, LocalOptimStateDictConfig),
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
    if config is None:
        return expected()
    if type(config) is not expected:
        raise RuntimeError(f"{name}: expected a {expected.__name__}, found a {type(config).__name__}; pass the class "
                           f"that belongs to the state_dict_type")  # fmt: skip
    return config


def _classes(settings: StateDictSettings) -> tuple[object, ...]:
    return settings.state_dict_type, type(settings.state_dict_config), type(settings.optim_state_dict_config)


def _difference(unit: Unit, settings: StateDictSettings, first: StateDictSettings) -> str:
    return f"state_dict_type: expected {first}, as of the first unit, found {settings} of {unit}; set it on the root"
