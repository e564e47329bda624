"""Optimizer state back from names and original shapes: what an optimizer's `load_state_dict` takes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.comm import collectives
from fsdp_compile.core.lookup import clean_names, units_used_below
from fsdp_compile.core.unit import Unit
from fsdp_compile.state_dict.kinds import is_first, settings_of
from fsdp_compile.state_dict.optim_names import StateDict, name_of
from fsdp_compile.state_dict.optim_values import State, local_state, watch_state


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """What `optim.load_state_dict` takes, from a state dict by names: full, sharded, local, of any number of ranks.

    If rank-0-only FULL is set for `model`, the first rank has the state, and sends it parameter by parameter.

    Args:
        model: the module that was sharded, or one around it.
        optim: an optimizer over parameters of `model`.
        optim_state_dict: by names, as `optim_state_dict` or an unsharded model's optimizer gives it after re-keying.
        is_named_optimizer: whether the optimizer itself speaks of names.
        load_directly: call `optim.load_state_dict` with it at once.
        group: nothing; the ranks are those of the units.

    Raises:
        ValueError: parameters are missing, unexpected, or of another shape, or groups do not fit the optimizer's.
    """
    units = units_used_below(model)
    watch_state(optim)
    if units and getattr(settings_of(units[0]).optim_state_dict_config, "rank0_only", False):
        optim_state_dict = received(units[0], model, optim_state_dict)
    return to_load(model, optim, optim_state_dict, is_named_optimizer, load_directly)


def to_load(
    model: nn.Module, optim: Optimizer, optim_state_dict: StateDict, named: bool = False, load_directly: bool = False
) -> StateDict:
    """What `optim.load_state_dict` takes, from a state dict that every rank has; nothing is communicated."""
    names = clean_names(model)
    keys = _keys(optim, names, named)
    states = {
        keys[param]: local_state(param, optim_state_dict["state"][names[param]])
        for param in keys
        if names[param] in optim_state_dict["state"]
    }
    groups = _matched_groups(optim, names, keys, optim_state_dict["param_groups"])
    loaded = {"state": {key: state for key, state in states.items() if state}, "param_groups": groups}
    if load_directly:
        optim.load_state_dict(loaded)
    return loaded


def _keys(optim: Optimizer, names: dict[nn.Parameter, str], named: bool) -> dict[nn.Parameter, Any]:
    params = [param for group in optim.param_groups for param in group["params"]]
    return {param: name_of(param, names) if named else number for number, param in enumerate(params)}


def _matched_groups(
    optim: Optimizer, names: dict[nn.Parameter, str], keys: dict[nn.Parameter, Any], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved groups' settings for the optimizer's groups, which must consist of the same parameters."""
    known = {name: group for group in saved for name in group["params"]}
    expected = {name_of(param, names) for param in keys}
    if expected != known.keys():
        raise ValueError(
            f"optim_state_dict: expected the optimizer's parameters in its param_groups, found missing "
            f"{sorted(expected - known.keys())} and unexpected {sorted(known.keys() - expected)}"
        )
    groups = []
    for own in optim.param_groups:
        found = [known[names[param]] for param in own["params"]]
        settings = found[0] if found else own
        for param, each in zip(own["params"], found, strict=True):
            if each is not settings:
                raise ValueError(
                    f"optim_state_dict: expected {names[param]} in one group with {names[own['params'][0]]}, as in the "
                    f"optimizer, found them in different ones; make the optimizer with the saved groups"
                )
        groups.append({**settings, "params": [keys[param] for param in own["params"]]})
    return groups


def received(unit: Unit, model: nn.Module, state_dict: StateDict | None) -> StateDict:
    """The first rank's state dict, of which each rank keeps its parts alone."""
    mine = state_dict or {"state": {}, "param_groups": []}
    outline = {name: {k: _outline(v) for k, v in state.items()} for name, state in mine["state"].items()}
    told, groups = _send(unit, collectives.broadcast_object, (outline, mine["param_groups"]))
    params = {name: param for param, name in clean_names(model).items()}
    states: dict[str, State] = {}
    for name, state in told.items():
        own = mine["state"].get(name, {}) if is_first(unit) else {}
        received = {key: _receive(unit, value, own.get(key)) for key, value in state.items()}
        if name in params:
            states[name] = local_state(params[name], received)
    return {"state": states, "param_groups": groups}


def _outline(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _receive(unit: Unit, outline: Any, own: Any) -> Any:
    if not isinstance(outline, Tensor):
        return outline
    message = torch.empty_like(outline, device=unit.device) if own is None else own.to(unit.device).contiguous()
    _send(unit, collectives.broadcast, message)
    return message


def _send(unit: Unit, broadcast: Callable[..., Any], message: Any) -> Any:
    """Let all ranks that share the unit have the first one's message."""
    if unit.replicas is not None and dist.get_rank(unit.group) == 0:
        message = broadcast(message, unit.replicas) or message
    return broadcast(message, unit.group) or message
