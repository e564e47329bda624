"""`state_dict` and `load_state_dict` of sharded modules: original names, shapes and dtypes.

    SHARDED   a value shares memory with the shard         model.state_dict() -> {"blocks.0.weight": ShardedValue, ...}
    FULL      gather a unit -> copy its parameters -> free it -> the next unit
    LOCAL     the parameter itself, detached

`nn.Module` collects and distributes values module by module. A module that owns sharded parameters (`fsdp_module.py`)
lets the functions here replace these values: `collect` around its `state_dict`, `save` and `load` for its own
parameters.
"""

import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.comm.flat import all_gather_flat
from fsdp_compile.core.sharded_tensor import ShardedTensor
from fsdp_compile.core.sharding import sharding_of, units_used_below
from fsdp_compile.core.unit import Unit
from fsdp_compile.state_dict.kinds import DEFAULT, FULL, LOCAL, is_first_rank, settings_of
from fsdp_compile.state_dict.sharded_value import ManagedParameter, managed


class _Saving:
    """One call of `state_dict` with all the calls that it makes in turn."""

    def __init__(self) -> None:
        self.sharded = called_by_dcp()  # then values are sharded, whatever is set
        self._copies: dict[Unit, list[Tensor | None]] = {}  # of each unit's parameters in full shape

    def value(self, parameter: ManagedParameter) -> Tensor | None:
        """What the state dict holds of a parameter."""
        unit = parameter.unit
        settings = DEFAULT if self.sharded else settings_of(unit)
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
    settings = DEFAULT if saving.sharded else settings_of(unit)
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


def load(module: nn.Module, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Copy values into the sharded parameters of `module` itself, and add what does not fit to `errors`.

    In `state` the parameters then take the place of their values: `_load_from_state_dict` copies them onto themselves.
    """
    for name, parameter in _own_parameters(module, state, prefix):
        if error := _load(parameter, prefix + name, state[prefix + name]):
            errors.append(f"size mismatch for {prefix}{name}: {error}")
        state[prefix + name] = parameter.param


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
    """Whether `torch.distributed.checkpoint.state_dict` asks, which wants sharded values and gathers them if it must.

    It sets the kind that torch's own wrapper gives. Ours it does not know, so the wrapper would return FULL values.
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
