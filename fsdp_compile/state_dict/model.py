"""`state_dict` and `load_state_dict` of sharded modules: original names, shapes and dtypes.

    SHARDED   a value aliases the shard         model.state_dict() -> {"blocks.0.weight": PieceTensor, ...}
    FULL      gather a unit -> copy its parameters -> free -> the next unit
    LOCAL     parts as they are

`nn.Module` collects and hands out values module by module; a module that owns sharded parameters replaces these values.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType

from fsdp_compile.core.lookup import units_used_below
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.summon import full_parameters
from fsdp_compile.eager.writeback import refresh
from fsdp_compile.state_dict.kinds import SHARDED, is_first, settings_of
from fsdp_compile.state_dict.pieces import Managed, managed

FULL_STATE, LOCAL_STATE = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT


class KeepsState:
    """What a module that owns sharded parameters, or is sharded itself, does about state dicts."""

    _fsdp_lookups: Any
    _fsdp_units: tuple[Unit, ...]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As `nn.Module.state_dict`, with values of the kind that `set_state_dict_type` chose.

        All ranks of the process group must call it if parameters are gathered (FULL). What it returns then is a copy;
        SHARDED and LOCAL values are memory of the shards, as an unsharded model's values are its parameters' memory.
        """
        with _saving(self) as saving:
            found = super().state_dict(*args, **kwargs)  # type: ignore[misc]  # a mixin of modules
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            saving.finish(self, found, prefix)
            return found

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        _refresh_own(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]  # likewise
        with _saving(self) as saving:
            for name, param in self._parameters.items():  # type: ignore[attr-defined]  # likewise
                found = managed(param) if param is not None and prefix + name in destination else None
                if found is not None:
                    destination[prefix + name] = saving.value(found)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _refresh_own(self)
        *_, errors = rest
        for name, param in self._parameters.items():  # type: ignore[attr-defined]  # a mixin of modules
            found = managed(param) if param is not None and prefix + name in state_dict else None
            if found is not None:
                error = _load(found, param, state_dict[prefix + name])
                errors += [f"size mismatch for {prefix}{name}: {error}"] if error else []
                state_dict[prefix + name] = param  # done: what follows copies it onto itself
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]  # likewise


def _refresh_own(module: Any) -> None:
    """Take over what users did to the parameters of `module`."""
    for unit in module.__dict__.get("_fsdp_units", ()):
        if unit.summoned is None:
            refresh(unit)


# --- saving -----------------------------------------------------------------------------------------------------------


class Saving:
    """One call of `state_dict`, with all that it calls in turn.

    Args:
        sharded: whether values are sharded, whatever is set.
    """

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded
        self._copies: dict[Unit, list[Tensor | None]] = {}  # of the parameters in full

    def value(self, found: Managed) -> Tensor | None:
        """What the state dict shows of a parameter."""
        unit = found.unit
        settings = SHARDED if self.sharded else settings_of(unit)
        if settings.state_dict_type is FULL_STATE:
            return self._full(unit)[found.index]
        local = unit.params[found.index].detach()
        if settings.state_dict_config.offload_to_cpu:
            local = local.cpu()
        return local if settings.state_dict_type is LOCAL_STATE else found.piece(local)

    def _full(self, unit: Unit) -> list[Tensor | None]:
        """Copies of the unit's parameters in full; None on ranks that are not to have them."""
        if unit not in self._copies:
            offload, shown = settings_of(unit).state_dict_config.offload_to_cpu, _shows(unit)
            self._copies[unit] = []
            for flat in unit.flats:
                views = full_parameters(unit, flat)
                copies = [view.to("cpu" if offload else unit.device, copy=True) if shown else None for view in views]
                self._copies[unit] += copies
        return self._copies[unit]

    def finish(self, module: Any, state: dict[str, Any], prefix: str) -> None:
        """Give buffers their own dtype; what is asked of a full state dict holds for buffers and ignored parameters."""
        for name, dtype in module.__dict__.get("_fsdp_buffer_dtypes", {}).items():
            if isinstance(state.get(prefix + name), Tensor):
                state[prefix + name] = state[prefix + name].to(dtype)
        units = units_used_below(module)
        settings = settings_of(units[0]) if units and not self.sharded else SHARDED
        if settings.state_dict_type is not FULL_STATE:
            return
        for name in [name for name in state if name.startswith(prefix)]:
            if not _shows(units[0]):
                del state[name]
            elif settings.state_dict_config.offload_to_cpu and isinstance(state[name], Tensor):
                state[name] = state[name].cpu()


_current: ContextVar[Saving | None] = ContextVar("saving", default=None)


@contextmanager
def _saving(module: Any) -> Iterator[Saving]:
    """The call of `state_dict` that is running, or a new one."""
    running = _current.get()
    if running is not None:
        yield running
        return
    token = _current.set(Saving(_torch_asks()))
    try:
        yield _current.get()  # type: ignore[misc]  # set above
    finally:
        _current.reset(token)


def _shows(unit: Unit) -> bool:
    """Whether this rank's full state dict has values."""
    return is_first(unit) or not settings_of(unit).state_dict_config.rank0_only  # type: ignore[attr-defined]  # of FULL alone


def _torch_asks() -> bool:
    """Whether torch.distributed.checkpoint.state_dict asks: it wants sharded values, which it gathers if asked to.

    Of torch's own wrapper it sets the kind; ours it does not know.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("fsdp_compile.", "torch.nn.modules.", "torch._dynamo.", "contextlib", "torch.utils.")):
            return name == "torch.distributed.checkpoint.state_dict"
        frame = frame.f_back
    return False


# --- loading ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _load(found: Managed, param: nn.Parameter, value: Any) -> str | None:
    """Copy this rank's part of `value` into the shard; what is wrong with it, if it does not fit."""
    unit = found.unit
    local = found.part_of(value) if isinstance(value, Tensor) else None
    if local is None and settings_of(unit).state_dict_type is LOCAL_STATE and isinstance(value, Tensor):
        local = value if value.shape == param.shape else None
    if local is None:
        expected = f"shape {found.cut.shape}"
        if settings_of(unit).state_dict_type is LOCAL_STATE:
            expected += f", or {tuple(param.shape)} as saved with LOCAL_STATE_DICT by the same rank of as many"
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        return f"expected {expected}, found {what}"
    if found.is_here and local.data_ptr() != param.data_ptr():
        param.copy_(local)
    torch.autograd.graph.increment_version([param])  # on all ranks, for who gathered before
    return None
