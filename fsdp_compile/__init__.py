"""`torch.compile(fully_shard(model))`: fully sharded data parallelism on flat parameters, eager or compiled.

fully_shard                  shard a model's parameters in place
FullyShardedDataParallel     the same as a wrapper, for scripts written for torch.distributed.fsdp
CompileConfig                what to choose about compilation, for `backend="fsdp_compile", options={...}`
"""

from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

from fsdp_compile.api import fully_shard
from fsdp_compile.config import CompileConfig
from fsdp_compile.module import FSDPModule
from fsdp_compile.wrapper import FullyShardedDataParallel

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CompileConfig",
    "CustomPolicy",
    "FSDPModule",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "ShardingStrategy",
    "fully_shard",
    "size_based_auto_wrap_policy",
]
