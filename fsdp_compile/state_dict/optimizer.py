"""Optimizer state by original names and shapes: `optim_state_dict`, and back: `optim_state_dict_to_load`.

    optimizer   {0: {"exp_avg": ShardedTensor, "step": ()}, ...}, groups of integers
    here        {"blocks.0.weight": {"exp_avg": original shape, "step": ()}, ...}, groups of names

Sharded state is converted without communication. For full state the ranks first tell each other what state they have,
which must agree; then one parameter after the other is gathered.
"""

from collections.abc import Callable, Iterable
from typing import Any

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
from torch.optim import Optimizer

from fsdp_compile.comm import collectives
from fsdp_compile.core.sharding import clean_names, units_used_below
from fsdp_compile.core.unit import Unit
from fsdp_compile.state_dict.model import FULL, SHARDED, is_first_rank, settings_of
from fsdp_compile.state_dict.optimizer_values import (
    State,
    StateDict,
    local_state,
    params_by_key,
    sharded_states,
    watch_state,
)
from fsdp_compile.state_dict.sharded_value import full_tensor

Params = list[dict[str, Any]] | Iterable[nn.Parameter]


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: StateDict | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """The optimizer's state under parameter names and in original shapes, of the kind that is set for `model`.

    FULL: plain tensors, gathered; all ranks must call it, and with `rank0_only` all but the first get {}. SHARDED: a
    `ShardedValue` for each tensor, nothing is gathered. LOCAL: what this rank has, by name. Scalars, such as step
    counts, stay 0-d in FULL. By default values are copied to the CPU, except for LOCAL.

    Args:
        model: the module that was sharded, or one around it.
        optim: an optimizer over parameters of `model`.
        optim_state_dict: what to convert; None: `optim.state_dict()`.
        group: the ranks that take part; None: those of the first unit.

    Returns:
        {"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}

    Raises:
        ValueError: a parameter is not in `model`, or a tensor fits neither its parameter nor is a scalar.
        RuntimeError: on all ranks: ranks have different state for a parameter.
    """
    settings = settings_of(next(iter(units_used_below(model)), None))
    return _by_name(model, optim, optim_state_dict, settings.state_dict_type, settings.optim_state_dict_config, group)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """What `optim.load_state_dict` takes, from a state dict by names: full, sharded, local, of any number of ranks.

    If FULL with `rank0_only` is set for `model`, the first rank has the state and sends it parameter by parameter.

    Args:
        model: the module that was sharded, or one around it.
        optim: an optimizer over parameters of `model`.
        optim_state_dict: by names, as `optim_state_dict` or an unsharded model's optimizer gives it after re-keying.
        is_named_optimizer: whether the optimizer itself speaks of names.
        load_directly: call `optim.load_state_dict` with it at once.
        group: ignored; the ranks are those of the units.

    Raises:
        ValueError: parameters are missing, unexpected, or of another shape, or groups do not fit the optimizer's.
    """
    units = units_used_below(model)
    watch_state(optim)
    if units and getattr(settings_of(units[0]).optim_state_dict_config, "rank0_only", False):
        optim_state_dict = _received(units[0], model, optim_state_dict)
    return _to_load(model, optim, optim_state_dict, is_named_optimizer, load_directly)


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Params | None = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """The same state dict by names or by integers: from and to the optimizer of an unsharded model.

    Args:
        optim_state_dict: by integers if names are wanted, or by names if integers are.
        optim_state_key_type: what is wanted.
        model: where names come from; sharded or not.
        optim_input: what the optimizer was made from: parameters, or groups of them.
        optim: the optimizer; None, and no `optim_input` either: one over `model.parameters()`.

    Raises:
        ValueError: a key does not belong to a parameter.
    """
    to_ids = optim_state_key_type is OptimStateKeyType.PARAM_ID
    if all(type(key) is (int if to_ids else str) for key in optim_state_dict["state"]) and optim_state_dict["state"]:
        return optim_state_dict
    listed: list[Any] = list(
        optim.param_groups if optim else model.parameters() if optim_input is None else optim_input
    )
    in_groups = bool(listed) and isinstance(listed[0], dict)
    params = [param for group in listed for param in group["params"]] if in_groups else listed
    names = clean_names(model)
    ordered = [_name_of(param, names) for param in params]
    new: dict[Any, Any] = {name: index for index, name in enumerate(ordered)} if to_ids else dict(enumerate(ordered))
    states, groups = optim_state_dict["state"], optim_state_dict["param_groups"]
    unknown = [key for keys in (states, *(group["params"] for group in groups)) for key in keys if key not in new]
    if unknown:
        raise ValueError(f"optim_state_dict: expected keys among {list(new)}, found {unknown}; pass the optimizer or "
                         f"the optim_input that it belongs to")  # fmt: skip
    new_groups = []
    for group in groups:
        keys = [new[key] for key in group["params"]]
        new_groups.append({**group, "params": sorted(keys) if to_ids else keys})
    return {"state": {new[key]: state for key, state in states.items()}, "param_groups": new_groups}


# --- older functions of torch's FullyShardedDataParallel: the kind is in their name, not set --------------------------


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: Params | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """As `optim_state_dict` in FULL, whatever is set."""
    return _by_name(model, optim, None, FULL, FullOptimStateDictConfig(rank0_only=rank0_only), group)


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None) -> StateDict:
    """As `optim_state_dict` in SHARDED, whatever is set; values share memory with the optimizer."""
    return _by_name(model, optim, None, SHARDED, ShardedOptimStateDictConfig(offload_to_cpu=False), group)


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict,
    model: nn.Module,
    optim_input: Params | None = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """What `load_state_dict` takes, from a full state dict that every rank has; nothing is communicated.

    Without `optim` the optimizer is one over `optim_input`; without both, over `model.parameters()` in the groups of
    the state dict.
    """
    return _to_load(model, optim, full_optim_state_dict, optim_input=optim_input)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: Params | None = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """As `shard_full_optim_state_dict`, from a full state dict that the first rank has and sends."""
    received = _received(units_used_below(model)[0], model, full_optim_state_dict)
    return _to_load(model, optim, received, optim_input=optim_input)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
) -> StateDict:
    """What `load_state_dict` takes, from what `sharded_optim_state_dict` gave."""
    return _to_load(model, optim, sharded_optim_state_dict)


# --- to names ---------------------------------------------------------------------------------------------------------


def _name_of(param: nn.Parameter, names: dict[nn.Parameter, str]) -> str:
    if param not in names:
        shape = tuple(param.shape)
        raise ValueError(f"optim: expected parameters of the model, found one of shape {shape} that is not; pass the "
                         f"module that all of them are in")  # fmt: skip
    return names[param]


def _by_name(
    model: nn.Module,
    optim: Optimizer,
    state_dict: StateDict | None,
    kind: StateDictType,
    config: OptimStateDictConfig,
    group: dist.ProcessGroup | None,
) -> StateDict:
    """`optim_state_dict` of the given kind."""
    watch_state(optim)
    given = optim.state_dict() if state_dict is None else state_dict
    names = clean_names(model)
    params = {key: (_name_of(param, names), param) for key, param in params_by_key(optim, given["param_groups"])}
    groups = [{**each, "params": [params[key][0] for key in each["params"]]} for each in given["param_groups"]]
    sharded = sharded_states(optim, given, kind)
    states = {name: sharded[key] for key, (name, _) in params.items() if key in sharded}
    if kind is FULL:
        unit = units_used_below(model)[0]
        wanted = not getattr(config, "rank0_only", False) or is_first_rank(unit)
        states = _gathered(dict(params.values()), states, config, wanted, group or unit.group)
        if not wanted:
            return {}
    elif config.offload_to_cpu:
        states = {name: {key: _to_cpu(value) for key, value in state.items()} for name, state in states.items()}
    return {"state": states, "param_groups": groups}


def _to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _gathered(
    params: dict[str, nn.Parameter],
    states: dict[str, State],
    config: OptimStateDictConfig,
    wanted: bool,
    group: dist.ProcessGroup,
) -> dict[str, State]:
    """All state in full, gathered parameter by parameter; empty on a rank where it is not wanted."""
    full: dict[str, State] = {}
    for name in _in_common_order(params, states, group):
        for key, value in states.get(name, {}).items():
            value = full_tensor(value)
            if wanted:
                value = value.clone() if isinstance(value, Tensor) and not config.offload_to_cpu else value
                full.setdefault(name, {})[key] = _to_cpu(value) if config.offload_to_cpu else value
    return {name: full[name] for name in params if name in full}


def _outline(state: State) -> State:
    """One parameter's state as ranks tell each other of it: tensors have no values."""
    return {
        key: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def _kinds(state: State) -> dict[str, str]:
    return {key: str(v.dtype) if isinstance(v, Tensor) else type(v).__name__ for key, v in state.items()}


def _in_common_order(
    params: dict[str, nn.Parameter], states: dict[str, State], group: dist.ProcessGroup
) -> dict[str, dict[str, str]]:
    """The parameters in the first rank's order, with the kinds of their state.

    RuntimeError on all ranks if they have different parameters or different state for one.
    """
    mine = {name: _kinds(states.get(name, {})) for name in params}
    first: dict[str, dict[str, str]] = {}
    for rank, theirs in enumerate(collectives.gather_objects(mine, group)):
        first = first or theirs
        if theirs.keys() != first.keys():
            raise RuntimeError(
                f"optim_state_dict: expected the same parameters on all ranks, found {sorted(first.keys() - theirs)} "
                f"on rank 0 of the group alone and {sorted(theirs.keys() - first)} on rank {rank}"
            )
        for name, kinds in theirs.items():
            if kinds != first[name]:
                raise RuntimeError(
                    f"optimizer state of parameter {name}: expected the same on all ranks, found {first[name]} and on "
                    f"rank {rank} of the group {kinds}"
                )
    return first


# --- from names -------------------------------------------------------------------------------------------------------


def _to_load(
    model: nn.Module,
    optim: Optimizer | None,
    state_dict: StateDict,
    named: bool = False,
    load_directly: bool = False,
    optim_input: Params | None = None,
) -> StateDict:
    """What `optim.load_state_dict` takes, from a state dict that every rank has."""
    names = clean_names(model)
    groups = _groups_to_load(optim, optim_input, names, state_dict["param_groups"])
    params = [param for group in groups for param in group["params"]]
    keys: dict[nn.Parameter, Any] = {param: _name_of(param, names) if named else i for i, param in enumerate(params)}
    states = {}
    for param, name in names.items():  # in an order that all ranks have: what is distributed otherwise is gathered
        state = local_state(param, state_dict["state"].get(name, {})) if param in keys else {}
        if state:
            states[keys[param]] = state
    loaded = {"state": states, "param_groups": _matched_groups(groups, names, keys, state_dict["param_groups"])}
    if load_directly and optim is not None:
        optim.load_state_dict(loaded)
    return loaded


def _groups_to_load(
    optim: Optimizer | None, optim_input: Params | None, names: dict[nn.Parameter, str], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The groups of the optimizer that is going to load; without one, of what it is made from."""
    if optim is not None:
        return optim.param_groups
    if optim_input is None:
        return [{"params": [param for param, name in names.items() if name in group["params"]]} for group in saved]
    listed: list[Any] = list(optim_input)
    return listed if listed and isinstance(listed[0], dict) else [{"params": listed}]


def _matched_groups(
    of_optim: list[dict[str, Any]],
    names: dict[nn.Parameter, str],
    keys: dict[nn.Parameter, Any],
    saved: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The saved groups' settings for the optimizer's groups, which must consist of the same parameters."""
    saved_group = {name: group for group in saved for name in group["params"]}
    expected = {_name_of(param, names) for param in keys}
    if expected != saved_group.keys():
        raise ValueError(
            f"optim_state_dict: expected the optimizer's parameters in its param_groups, found missing "
            f"{sorted(expected - saved_group.keys())} and unexpected {sorted(saved_group.keys() - expected)}"
        )
    groups = []
    for group in of_optim:
        own = [names[param] for param in group["params"]]
        settings = saved_group[own[0]] if own else group
        for name in own:
            if saved_group[name] is not settings:
                raise ValueError(
                    f"optim_state_dict: expected {name} in one group with {own[0]}, as in the optimizer, found them in "
                    f"different ones; make the optimizer with the saved groups"
                )
        groups.append({**settings, "params": [keys[param] for param in group["params"]]})
    return groups


def _received(unit: Unit, model: nn.Module, state_dict: StateDict | None) -> StateDict:
    """The first rank's state dict, of which each rank retains the elements that it stores."""
    mine = state_dict or {"state": {}, "param_groups": []}
    outlines = {name: _outline(state) for name, state in mine["state"].items()}
    outlines, groups = _from_first(unit, collectives.broadcast_object, (outlines, mine["param_groups"]))
    params = {name: param for param, name in clean_names(model).items()}
    states: dict[str, State] = {}
    for name, state in outlines.items():
        own = mine["state"].get(name, {}) if is_first_rank(unit) else {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                message = own[key].to(unit.device).contiguous() if own else torch.empty_like(value, device=unit.device)
                state[key] = _from_first(unit, _broadcast, message)
        if name in params:
            states[name] = local_state(params[name], state)
    return {"state": states, "param_groups": groups}


def _from_first(unit: Unit, broadcast: Callable[[Any, dist.ProcessGroup], Any], message: Any) -> Any:
    """What the first of all ranks that share the unit has for `message`."""
    if unit.replicas is not None and dist.get_rank(unit.group) == 0:
        message = broadcast(message, unit.replicas)
    return broadcast(message, unit.group)


def _broadcast(message: Tensor, group: dist.ProcessGroup) -> Tensor:
    collectives.broadcast(message, group)
    return message
