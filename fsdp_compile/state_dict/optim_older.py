"""The older functions for optimizer state of torch's FullyShardedDataParallel: the kind is in their name, not set."""

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, ShardedOptimStateDictConfig, StateDictType
from torch.optim import Optimizer

from fsdp_compile.core.lookup import units_used_below
from fsdp_compile.state_dict.optim_load import received, to_load
from fsdp_compile.state_dict.optim_names import Params, StateDict
from fsdp_compile.state_dict.optim_state import by_name


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: Params | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """As `optim_state_dict` in FULL, whatever is set."""
    config = FullOptimStateDictConfig(rank0_only=rank0_only)
    return by_name(model, optim, None, StateDictType.FULL_STATE_DICT, config, group)


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None) -> StateDict:
    """As `optim_state_dict` in SHARDED, whatever is set; values are memory of the optimizer."""
    config = ShardedOptimStateDictConfig(offload_to_cpu=False)
    return by_name(model, optim, None, StateDictType.SHARDED_STATE_DICT, config, group)


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict,
    model: nn.Module,
    optim_input: Params | None = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """What `load_state_dict` takes, from a full state dict that every rank has; nothing is communicated."""
    return to_load(model, _given(optim), full_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: Params | None = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """What `load_state_dict` takes, from a full state dict that the first rank has."""
    unit = units_used_below(model)[0]
    return to_load(model, _given(optim), received(unit, model, full_optim_state_dict))


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
) -> StateDict:
    """What `load_state_dict` takes, from what `sharded_optim_state_dict` gave."""
    return to_load(model, optim, sharded_optim_state_dict)


def _given(optim: Optimizer | None) -> Optimizer:
    if optim is None:
        raise ValueError("optim: expected the optimizer that is going to load the state, found None; pass it")
    return optim
