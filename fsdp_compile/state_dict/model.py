"""`state_dict` and `load_state_dict` of sharded modules: original names, shapes and dtypes, and one of three kinds.

FULL       plain tensors of the original shapes: each unit is gathered, copied and freed in turn
SHARDED    for each parameter a `ShardedTensor`, to users a DTensor, over memory of the shard: nothing is gathered
LOCAL      the same with a copy of what the rank stores

Where the kind was set, as `FullyShardedDataParallel` does, values of a unit's parameters are copies, and SHARDED ones
are as FSDP1 gives them: rows of dimension 0 in a DTensor (sharded_value.py). Buffers and ignored parameters are never
copied. In FULL tensor subclasses stay whole; the other kinds have their inner tensors (Note [Inner tensors]).

Every kind can be loaded, whichever is set. The default is SHARDED after `fully_shard` and FULL after
`FullyShardedDataParallel`, as in torch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile.comm.collectives import is_first
from fsdp_compile.core.inner_params import inner_names, plain_tensors, recipe_of, recipes_of, replace_items
from fsdp_compile.core.sharding import WRAPPED, clean_name, sharding_of, stored_parameters, units_used_below
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.state_dict.sharded_value import full_tensor, local_of, managed, torch_value
from fsdp_compile.tensors._torch import called_by_dcp
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.sharded_view import ShardedView, in_state

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
    return all(is_first(group.find()) for group in (unit.group, unit.replicas) if group is not None)


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
    chosen = default_settings(state_dict_type)
    for name, given in (("state_dict_config", state_dict_config), ("optim_state_dict_config", optim_state_dict_config)):
        expected = type(getattr(chosen, name))
        if given is not None and type(given) is not expected:
            raise RuntimeError(f"{name}: expected a {expected.__name__}, found a {type(given).__name__}; pass the "
                               f"class that belongs to the state_dict_type")  # fmt: skip
        setattr(chosen, name, given or getattr(chosen, name))
    before = _common_settings(module, lambda settings: settings.state_dict_type)  # which has one class of each config
    for unit in units_used_below(module):
        unit.state_settings = replace(chosen)
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


def _common_settings(module: nn.Module, compared: Callable[[StateDictSettings], Any]) -> StateDictSettings | None:
    found = [(unit, settings_of(unit)) for unit in units_used_below(module)]
    for unit, settings in found:
        if compared(settings) != compared(first := found[0][1]):
            raise AssertionError(f"state_dict_type: expected {first}, as of the first unit, found {settings} of "
                                 f"{unit}; set it on the root")  # fmt: skip
    return found[0][1] if found else None


# --- values, module by module -----------------------------------------------------------------------------------------

# Names, order and what is saved at all are the modules' own affair: hooks, `_save_to_state_dict`, `get_extra_state` and
# an overridden `state_dict` say it. A module that owns sharded parameters (parameter_owner.py) only turns the sharded
# tensors that it stored there into values of the kind that is set, by the functions here: `collect` around its
# `state_dict`, `save` and `load` for what it has itself. With `keep_vars` they stay: those are the parameters.


class _Saving:
    """One call of `state_dict`, with its calls for submodules."""

    def __init__(self, over_memory: bool = False) -> None:
        self.over_memory = over_memory or called_by_dcp()  # then values are SHARDED and no copies, whatever is set
        self.settings: StateDictSettings | None = None  # of the module that was called
        # By the id of the object that holds local elements, which ranks without elements find alike.
        self.parameters: dict[int, tuple[Unit, int]] = {}
        self._made: dict[Unit, Sequence[Tensor]] = {}  # full copies of each unit's parameters

    def settings_of(self, unit: Unit | None) -> StateDictSettings:
        return DEFAULT if self.over_memory else settings_of(unit)

    def value(self, stored: Any, unit: Any, at_end: bool) -> Tensor:
        """The sharded tensor or view `stored` as the kind of `unit` has it; hooks see SHARDED values over memory."""
        unit, index = self.parameters.get(id(getattr(stored, "local", None)), (unit, None))
        settings = self.settings_of(unit)
        kind, config = settings.state_dict_type, cast(Any, settings.state_dict_config)
        if kind is SHARDED and (settings is DEFAULT or not at_end):
            return in_state(stored)
        if isinstance(stored, ShardedView):
            return stored.full_tensor()
        if kind is LOCAL:
            local = stored.local.to("cpu" if config.offload_to_cpu else stored.device, copy=True)
            return ShardedTensor(local, stored.spec)
        if kind is SHARDED:
            rows = torch_value(stored.detach())
            return rows.cpu() if config.offload_to_cpu else rows
        if index is None:
            return stored.full_tensor()
        if unit not in self._made:
            self._made[unit] = _full_copies(unit)
        return self._made[unit][index]

    def replace(self, values: dict[str, Any], prefix: str, unit: Unit | None, at_end: bool = False) -> None:
        """Replace what is sharded in `values`, under names with `prefix`; `unit`: that of what was computed."""
        is_done = at_end and self.settings_of(unit).state_dict_type is LOCAL
        for name, stored in () if is_done else values.items():
            if isinstance(stored, (ShardedTensor, ShardedView)) and name.startswith(prefix):
                values[name] = self.value(stored, unit, at_end)


_running: ContextVar[_Saving | None] = ContextVar("saving", default=None)  # the outermost call in this context


def collect(module: nn.Module, state_dict: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Call `state_dict`, the method of the original class of `module`, for values of the kind that is set."""
    is_outermost, saving = _running.get() is None, _running.get() or _Saving()
    unit = next(iter(units_used_below(module)), None)
    settings = saving.settings_of(unit)
    saving.settings = saving.settings or settings
    token = _running.set(saving)
    try:
        state: dict[str, Any] = state_dict(*args, **kwargs)
    finally:
        _running.reset(token)
    if kwargs.get("keep_vars", args[2] if len(args) > 2 else False):
        return state
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    sharding = sharding_of(module)
    for name, dtype in (sharding.buffer_dtypes if sharding else {}).items():
        if isinstance(state.get(prefix + name), Tensor):
            state[prefix + name] = state[prefix + name].to(dtype)
    if is_outermost:
        with torch.no_grad():
            saving.replace(state, prefix, unit, at_end=True)
    if settings.state_dict_type is not LOCAL and (is_outermost or settings != saving.settings):
        for name in [name for name in state if name.startswith(prefix)]:  # buffers and ignored parameters too
            if settings.state_dict_type is FULL and unit is not None and not _has_values(unit):
                del state[name]
            elif settings.state_dict_config.offload_to_cpu and isinstance(state[name], Tensor):
                state[name] = state[name].cpu()
    return state


def model_state(model: nn.Module, keep_vars: bool = False) -> dict[str, Any]:
    """`model.state_dict()` for files: values over memory of the shards, whichever kind is set, or with `keep_vars`
    parameters, under names without what wrappers, DDP and `torch.compile` add.
    """
    return {clean_name(name): value for name, value in _state_over_memory(_without_ddp(model), keep_vars).items()}


def load_model_state(model: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
    """`model.load_state_dict(state)`, under names as `model_state` has them."""
    inner = _without_ddp(model)
    own = {clean_name(name): name for name in _state_over_memory(inner)}
    inner.load_state_dict({own.get(name, name): value for name, value in state.items()}, *[] if strict else [False])


def _state_over_memory(model: nn.Module, keep_vars: bool = False) -> dict[str, Any]:
    saving = _Saving(over_memory=True)
    token = _running.set(saving)
    try:
        found: dict[str, Any] = model.state_dict(keep_vars=True) if keep_vars else model.state_dict()
    finally:
        _running.reset(token)
    if not keep_vars:
        saving.replace(found, "", None, at_end=True)
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """Take off our wrapper and the compiler's, so that optimizer state gets the same names as parameters."""
    model = getattr(model, "_orig_mod", model)
    return model._modules.get(WRAPPED) or model


def _without_ddp(model: nn.Module) -> Any:
    inner = unwrapped(model)
    return inner.module if isinstance(inner, DistributedDataParallel) else inner


@torch.no_grad()
def save(module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """Replace the sharded tensors in `destination`, which has what `_save_to_state_dict` of `module` itself stored."""
    units = module.__dict__.get("_fsdp_units") or units_used_below(module)
    saving, unit = _running.get() or _Saving(), next(iter(units), None)
    params: Iterable[Any] = stored_parameters(module).values()
    for param in params:
        if type(param) is ShardedTensor and (member := unit_of(param)):  # type: ignore[arg-type]  # a parameter
            saving.parameters[id(param.local)] = member
    saving.replace(destination, prefix, unit)
    if unit is not None and unit.summoned and saving.settings_of(unit) is not DEFAULT:
        for name, stored in destination.items():
            destination[name] = stored.clone() if isinstance(stored, Tensor) else stored
    for name, recipe in recipes_of(module).items():
        inner = [prefix + each for each in inner_names(name, recipe)]
        if saving.settings_of(unit).state_dict_type is FULL and all(each in destination for each in inner):
            together = recipe.put_together(destination[each] for each in inner)
            replace_items(destination, {each: [] for each in inner} | {inner[0]: [(prefix + name, together)]})


@torch.no_grad()
def load(module: nn.Module, state: dict[str, Any], prefix: str, assign: bool, errors: list[str]) -> None:
    """Copy values into the sharded parameters of `module` itself; add those that do not fit to `errors`.

    Then `state` has the parameters in place of the values, so that `_load_from_state_dict` copies them onto themselves.
    Where they are on the meta device and it is to `assign`, `state` has new sharded parameters with the values.
    """
    for name in recipes_of(module):
        _flatten_subclass(module, name, state, prefix, errors)
    for name, param in stored_parameters(module).items():
        key, sharded = prefix + name, None if param is None else managed(param)
        if sharded is None or key not in state:
            continue
        value, stored = state[key], sharded.local.detach()
        local = local_of(sharded, value, f"parameter {key}") if isinstance(value, Tensor) else None
        if local is None:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            errors.append(f"size mismatch for {key}: expected shape {tuple(sharded.shape)}, found {found}")
        elif assign and stored.is_meta and not local.is_meta:
            state[key] = _new_parameter(sharded, local)
        else:
            if local.data_ptr() != stored.data_ptr():
                stored.copy_(local)
            # On all ranks, whatever they store: what was gathered before is out of date everywhere.
            torch.autograd.graph.increment_version([sharded, stored])
            state[key] = sharded
    for name, own in stored_parameters(module).items() if assign else ():
        # Where a value was assigned before, and the unit still waits for others.
        waits = own is not None and managed(own) is None and (isinstance(own, ShardedTensor) or unit_of(own))
        if waits and prefix + name in state:
            state[prefix + name] = full_tensor(state[prefix + name])


def _new_parameter(param: Any, local: Tensor) -> nn.Parameter:
    """A new parameter of `local`, in the place of one that is on the meta device; in all places that share it, one."""
    unit, index = unit_of(param) or (None, 0)
    for parameters, name in () if unit is None else unit.locations.of[index]:
        held: nn.Parameter | None = parameters.get(name)
        if held is not None and held is not param:
            return held
    return nn.Parameter(ShardedTensor(local.detach().to(param.dtype), param.spec), requires_grad=param.requires_grad)


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


@torch.inference_mode(False)
@torch.no_grad()
def _full_copies(unit: Unit) -> list[Tensor]:
    """Copies of the unit's parameters in full shape; without values on ranks that get none under `rank0_only`."""
    config = settings_of(unit).state_dict_config
    device = "meta" if not _has_values(unit) else "cpu" if config.offload_to_cpu else unit.device
    views = (view for flat in unit.flats for view in flat.full_views(unit.gather(flat.shard)))
    return [view.to(device, copy=True) for view in views]


def _has_values(unit: Unit) -> bool:
    return is_first_rank(unit) or not settings_of(unit).state_dict_config.rank0_only  # type: ignore[attr-defined]  # of FULL
