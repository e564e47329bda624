"""FullyShardedDataParallel with original parameters, a unit for each block; on CUDA only."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from bench.systems import Prepared, Setup


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if setup.bf16 else None
    sharded = FullyShardedDataParallel(
        model,
        process_group=setup.mesh.get_group(),
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks}),
        mixed_precision=precision,
        device_id=setup.device,
        use_orig_params=True,
        limit_all_gathers=True,
    )
    return Prepared(sharded, sharded)
