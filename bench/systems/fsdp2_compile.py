"""`fully_shard` of blocks that were compiled one by one: what torchtitan does, and most people with it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bench.systems import Prepared, Setup, fsdp2


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    compiled: list[Any] = [torch.compile(block, fullgraph=True) for block in blocks]
    for name, block in zip(setup.block_names, compiled, strict=True):
        model.set_submodule(name, block)
    return fsdp2.prepare(model, compiled, setup)
