"""`torch.compile(fully_shard(model))`: fully sharded data parallelism on flat parameters, eager or compiled.

fully_shard         shard a model's parameters in place
summon_full_params  a context in which a model's parameters have their full shape
CompileConfig       what to choose about compilation, for `torch.compile(model, backend="fsdp_compile", options={...})`
"""

from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_compile.api import fully_shard
from fsdp_compile.config import CompileConfig
from fsdp_compile.eager.summon import summon_full_params
from fsdp_compile.module import FSDPModule

__all__ = ["CompileConfig", "FSDPModule", "ModuleWrapPolicy", "ShardingStrategy", "fully_shard", "summon_full_params"]
