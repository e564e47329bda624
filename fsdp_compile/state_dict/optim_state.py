"""Optimizer state by original names and shapes: `optim_state_dict`.

    optimizer   {0: {"exp_avg": 1-D part, "step": ()}, ...}, groups of numbers
    here        {"blocks.0.weight": {"exp_avg": original shape, "step": ()}, ...}, groups of names

Sharded, nothing is communicated; in full, see optim_gather.py. Back: optim_load.py.
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateDictConfig, ShardedOptimStateDictConfig, StateDictType
from torch.optim import Optimizer

from fsdp_compile.core.lookup import clean_names, units_used_below
from fsdp_compile.state_dict.kinds import is_first, settings_of
from fsdp_compile.state_dict.optim_gather import gathered, to_cpu
from fsdp_compile.state_dict.optim_names import StateDict, name_of
from fsdp_compile.state_dict.optim_values import State, numbered, sharded_states, watch_state


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
    return by_name(model, optim, optim_state_dict, kind, config, group)


def by_name(
    model: nn.Module,
    optim: Optimizer,
    state_dict: StateDict | None,
    kind: StateDictType,
    config: OptimStateDictConfig,
    group: dist.ProcessGroup | None,
) -> StateDict:
    """`optim_state_dict` of the kind that is given."""
    watch_state(optim)
    given = optim.state_dict() if state_dict is None else state_dict
    names = clean_names(model)
    pairs = [(key, param, name_of(param, names)) for key, param in numbered(optim, given["param_groups"])]
    called = {key: name for key, _, name in pairs}
    groups = [{**each, "params": [called[key] for key in each["params"]]} for each in given["param_groups"]]
    shown = sharded_states(optim, given)
    states: dict[str, State] = {name: shown[key] for key, _, name in pairs if key in shown}
    if kind is StateDictType.FULL_STATE_DICT:
        unit = units_used_below(model)[0]
        keep = not getattr(config, "rank0_only", False) or is_first(unit)
        states = gathered({name: param for _, param, name in pairs}, states, config, keep, group or unit.group)
        return {"state": states, "param_groups": groups} if keep else {}
    if config.offload_to_cpu:
        states = {name: {key: to_cpu(value) for key, value in state.items()} for name, state in states.items()}
    return {"state": states, "param_groups": groups}
