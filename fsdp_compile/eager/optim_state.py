"""Optimizer state by original names and shapes: `optim_state_dict`, and back.

    optimizer   {0: {"exp_avg": 1-D part, "step": ()}, ...}, groups of numbers
    here        {"blocks.0.weight": {"exp_avg": original shape, "step": ()}, ...}, groups of names

In full, ranks first tell each other what state they have, as none stores some of every parameter; then parameter after
parameter is gathered. Sharded, nothing is communicated.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_compile import collectives
from fsdp_compile.eager.optim_values import State, empty, local_state, numbered, sharded_states, watch_state
from fsdp_compile.eager.pieces import managed
from fsdp_compile.eager.state_types import is_first, settings_of
from fsdp_compile.lookup import units_used_below
from fsdp_compile.names import clean_names
from fsdp_compile.unit import Unit

StateDict = dict[str, Any]
Params = list[dict[str, Any]] | Iterable[nn.Parameter]


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: StateDict | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """The optimizer's state with names for numbers and original shapes, of the kind that is set for `model`.

    FULL: plain tensors, gathered; all ranks must call it, and with rank-0-only others than the first get {}. SHARDED:
    `PieceTensor`s, nothing is gathered. LOCAL: what this rank has, by name. Numbers, such as counts of steps, stay 0-d
    in FULL. By default values are copied to the CPU, unless LOCAL.

    Args:
        model: the module that was sharded, or one around it.
        optim: an optimizer over parameters of `model`.
        optim_state_dict: what to convert; None: `optim.state_dict()`.
        group: the ranks that take part; None: those of the first unit.

    Returns:
        {"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}

    Raises:
        ValueError: a parameter is not in `model`, or a tensor fits neither a parameter nor is a number.
        RuntimeError: on all ranks: ranks have different state for a parameter.
    """
    units = units_used_below(model)
    kind = settings_of(units[0]).state_dict_type if units else StateDictType.SHARDED_STATE_DICT
    config = settings_of(units[0]).optim_state_dict_config if units else ShardedOptimStateDictConfig()
    return _by_name(model, optim, optim_state_dict, kind, config, group)


def _by_name(
    model: nn.Module,
    optim: Optimizer,
    state_dict: StateDict | None,
    kind: StateDictType,
    config: OptimStateDictConfig,
    group: dist.ProcessGroup | None,
) -> StateDict:
    watch_state(optim)
    given = optim.state_dict() if state_dict is None else state_dict
    names = clean_names(model)
    pairs = [(key, param, _name_of(param, names)) for key, param in numbered(optim, given["param_groups"])]
    name_of = {key: name for key, _, name in pairs}
    groups = [{**each, "params": [name_of[key] for key in each["params"]]} for each in given["param_groups"]]
    shown = sharded_states(optim, given)
    states: dict[str, State] = {name: shown[key] for key, _, name in pairs if key in shown}
    if kind is StateDictType.FULL_STATE_DICT:
        unit = units_used_below(model)[0]
        keep = not getattr(config, "rank0_only", False) or is_first(unit)
        states = _gathered({name: param for _, param, name in pairs}, states, config, keep, group or unit.group)
        return {"state": states, "param_groups": groups} if keep else {}
    if config.offload_to_cpu:
        states = {name: {key: _to_cpu(value) for key, value in state.items()} for name, state in states.items()}
    return {"state": states, "param_groups": groups}


def _name_of(param: nn.Parameter, names: dict[nn.Parameter, str]) -> str:
    if param not in names:
        shape = tuple(param.shape)
        raise ValueError(f"optim: expected parameters of the model, found one of shape {shape} that is not; pass the "
                         f"module that all of them are in")  # fmt: skip
    return names[param]


def _to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


# --- in full ----------------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """One value of a parameter's state, as ranks tell each other of it."""

    is_tensor: bool
    dtype: torch.dtype | None
    is_number: bool
    value: Any  # unless a tensor


def _gathered(
    params: dict[str, nn.Parameter],
    states: dict[str, State],
    config: OptimStateDictConfig,
    keep: bool,
    group: dist.ProcessGroup,
) -> dict[str, State]:
    """All state in full, parameter after parameter; nothing is kept unless `keep`."""
    entries = _agree(params, states, group)
    full: dict[str, State] = {}
    for name in params:
        for key, entry in entries.get(name, {}).items():
            value = _full_value(params[name], states.get(name, {}).get(key), entry)
            if keep:
                full.setdefault(name, {})[key] = _to_cpu(value) if config.offload_to_cpu else value
    return full


def _full_value(param: nn.Parameter, mine: Any, entry: _Entry) -> Any:
    found = managed(param)
    if not entry.is_tensor:
        return entry.value
    if found is None:
        return mine.clone()
    if mine is None:
        like = torch.empty(() if entry.is_number else 1, dtype=entry.dtype, device=param.device)
        mine = empty(found, like)
    return mine.full_tensor() if isinstance(mine, DTensor) else mine


def _agree(
    params: dict[str, nn.Parameter], states: dict[str, State], group: dist.ProcessGroup
) -> dict[str, dict[str, _Entry]]:
    """What state each parameter has on the ranks that store some of it. RuntimeError on all ranks if they differ."""
    mine = {
        name: {key: _entry(value) for key, value in states.get(name, {}).items()}
        for name, param in params.items()
        if (found := managed(param)) is None or found.is_here
    }
    told = collectives.gather_objects((list(params), mine), group)
    for rank, (found_names, _) in enumerate(told):
        if found_names != list(params):
            raise RuntimeError(
                f"optim_state_dict: expected the same parameters in the same order on all ranks, found "
                f"{_first_difference(told[0][0], found_names)} on ranks 0 and {rank} of the group"
            )
    agreed: dict[str, dict[str, _Entry]] = {}
    for rank, (_, entries) in enumerate(told):
        for name, found_entries in entries.items():
            expected = agreed.setdefault(name, found_entries)
            if _kinds(found_entries) != _kinds(expected):
                raise RuntimeError(
                    f"optimizer state of parameter {name}: expected the same on all ranks that store some of it, found "
                    f"{_kinds(expected)} and on rank {rank} of the group {_kinds(found_entries)}"
                )
    return agreed


def _entry(value: Any) -> _Entry:
    if not isinstance(value, Tensor):
        return _Entry(False, None, True, value)
    return _Entry(True, value.dtype, value.dim() == 0, None)


def _kinds(entries: dict[str, _Entry]) -> dict[str, Any]:
    return {key: str(entry.dtype) if entry.is_tensor else type(entry.value).__name__ for key, entry in entries.items()}


def _first_difference(one: list[str], other: list[str]) -> str:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return f"{a} and {b}"
    return f"{len(one)} and {len(other)} parameters"


# --- back -------------------------------------------------------------------------------------------------------------


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
        optim_state_dict = _received(units[0], model, optim_state_dict)
    return _to_load(model, optim, optim_state_dict, is_named_optimizer, load_directly)


def _to_load(
    model: nn.Module, optim: Optimizer, optim_state_dict: StateDict, named: bool = False, load_directly: bool = False
) -> StateDict:
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
    return {param: _name_of(param, names) if named else number for number, param in enumerate(params)}


def _matched_groups(
    optim: Optimizer, names: dict[nn.Parameter, str], keys: dict[nn.Parameter, Any], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved groups' settings for the optimizer's groups, which must consist of the same parameters."""
    known = {name: group for group in saved for name in group["params"]}
    expected = {_name_of(param, names) for param in keys}
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


def _received(unit: Unit, model: nn.Module, state_dict: StateDict | None) -> StateDict:
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


# --- the older functions ----------------------------------------------------------------------------------------------


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: Params | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """As `optim_state_dict` in FULL, whatever is set."""
    config = FullOptimStateDictConfig(rank0_only=rank0_only)
    return _by_name(model, optim, None, StateDictType.FULL_STATE_DICT, config, group)


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None) -> StateDict:
    """As `optim_state_dict` in SHARDED, whatever is set; values are memory of the optimizer."""
    config = ShardedOptimStateDictConfig(offload_to_cpu=False)
    return _by_name(model, optim, None, StateDictType.SHARDED_STATE_DICT, config, group)


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict,
    model: nn.Module,
    optim_input: Params | None = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """What `load_state_dict` takes, from a full state dict that every rank has; nothing is communicated."""
    return _to_load(model, _given(optim), full_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: Params | None = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """What `load_state_dict` takes, from a full state dict that the first rank has."""
    unit = units_used_below(model)[0]
    return _to_load(model, _given(optim), _received(unit, model, full_optim_state_dict))


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
) -> StateDict:
    """What `load_state_dict` takes, from what `sharded_optim_state_dict` gave."""
    return _to_load(model, optim, sharded_optim_state_dict)


def _given(optim: Optimizer | None) -> Optimizer:
    if optim is None:
        raise ValueError("optim: expected the optimizer that is going to load the state, found None; pass it")
    return optim


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Params | None = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """The same state dict by names or by numbers: from and to the optimizer of an unsharded model.

    Args:
        optim_state_dict: by numbers (names are wanted) or by names (numbers are).
        optim_state_key_type: what is wanted.
        model: where names come from; sharded or not.
        optim_input: what the optimizer was made from: parameters, or groups of them.
        optim: the optimizer; None, and no `optim_input` either: one over `model.parameters()`.

    Raises:
        ValueError: a key is not one of a parameter.
    """
    groups = _groups(model, optim, optim_input)
    names = clean_names(model)
    ordered = [_name_of(param, names) for group in groups for param in group]
    new: dict[Any, Any] = dict(enumerate(ordered))
    if optim_state_key_type is OptimStateKeyType.PARAM_ID:
        new = {name: number for number, name in new.items()}
    unknown = [key for key in optim_state_dict["state"] if key not in new]
    unknown += [key for group in optim_state_dict["param_groups"] for key in group["params"] if key not in new]
    if unknown:
        raise ValueError(f"optim_state_dict: expected keys among {list(new)}, found {unknown}; pass the optimizer or "
                         f"the optim_input that it belongs to")  # fmt: skip
    return {
        "state": {new[key]: state for key, state in optim_state_dict["state"].items()},
        "param_groups": [
            {**group, "params": sorted(new[key] for key in group["params"])}
            if optim_state_key_type is OptimStateKeyType.PARAM_ID
            else {**group, "params": [new[key] for key in group["params"]]}
            for group in optim_state_dict["param_groups"]
        ],
    }


def _groups(model: nn.Module, optim: Optimizer | None, given: Params | None) -> list[list[nn.Parameter]]:
    if optim is not None:
        return [list(group["params"]) for group in optim.param_groups]
    listed: list[Any] = list(model.parameters() if given is None else given)
    return [list(each["params"]) for each in listed] if listed and isinstance(listed[0], dict) else [listed]
