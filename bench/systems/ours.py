"""Ours, eager: the default policy has to find the same units that the others are told."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bench.systems import Prepared, Setup
from fsdp_compile import FSDPModule, MixedPrecision, fully_shard


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    return Prepared(sharded := shard(model, blocks, setup), sharded)


def shard(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup, **options: Any) -> nn.Module:
    precision = MixedPrecision(torch.bfloat16, torch.float32) if setup.bf16 else None
    ahead = setup.blocking  # as FSDP2 is told: on CUDA the host's running ahead has the same effect
    fully_shard(model, mesh=setup.mesh, mixed_precision=precision, forward_prefetch=ahead, **options)
    missed = [block for block in blocks if not isinstance(block, FSDPModule)]
    if missed:
        raise RuntimeError(f"expected each block to be a unit, found {len(missed)} that are not; compare equal units")
    return model
