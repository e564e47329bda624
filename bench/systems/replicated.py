"""The unsharded model, DDP, and FSDP1: what torch had before `fully_shard`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from bench.systems import Prepared, Setup


def unsharded(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    """The ceiling without communication: every rank trains the whole model by itself, compiled as one graph."""
    return Prepared(model, autocast(torch.compile(model, fullgraph=True), setup))


def ddp(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    """DistributedDataParallel, compiled with its own graph splitting at buckets."""
    replicated = DistributedDataParallel(model, process_group=setup.mesh.get_group(), gradient_as_bucket_view=True)
    return Prepared(model, autocast(torch.compile(replicated), setup))


def fsdp1(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    """FullyShardedDataParallel with original parameters, a unit for each block; on CUDA only."""
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


def autocast(forward: Callable[..., Tensor], setup: Setup) -> Callable[..., Tensor]:
    """`forward` under autocast if the part is measured in bf16."""

    def run(*batch: Tensor) -> Tensor:
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.bf16):
            return forward(*batch)

    return run
