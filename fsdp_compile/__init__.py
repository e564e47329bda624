"""`torch.compile(fully_shard(model))`: fully sharded data parallelism on flat parameters, eager or compiled.

fully_shard                  shard a model's parameters in place
FullyShardedDataParallel     the same as a wrapper, for scripts written for torch.distributed.fsdp
summon_full_params           a context in which parameters have their full shape
state_dict_type              a context in which `state_dict()` gives full, sharded or local values
optim_state_dict             an optimizer's state by original names and shapes; and back: optim_state_dict_to_load
explain                      the plan of a compiled step, with what it hides and what not; needs no GPU, no other rank
CompileConfig                what to choose about compilation, for `backend="fsdp_compile", options={...}`
"""

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

from fsdp_compile.api import fully_shard
from fsdp_compile.config import CompileConfig
from fsdp_compile.eager.summon import summon_full_params
from fsdp_compile.explain.report import explain
from fsdp_compile.fsdp_module import FSDPModule
from fsdp_compile.state_dict.kinds import get_state_dict_type, set_state_dict_type, state_dict_type
from fsdp_compile.state_dict.optimizer import optim_state_dict, optim_state_dict_to_load, rekey_optim_state_dict
from fsdp_compile.wrapper import FullyShardedDataParallel

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CompileConfig",
    "CustomPolicy",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictSettings",
    "StateDictType",
    "explain",
    "fully_shard",
    "get_state_dict_type",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "rekey_optim_state_dict",
    "set_state_dict_type",
    "size_based_auto_wrap_policy",
    "state_dict_type",
    "summon_full_params",
]
