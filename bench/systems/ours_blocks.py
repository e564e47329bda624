"""Ours, each block compiled by itself in the eager runtime."""

from collections.abc import Sequence

from torch import nn

from bench.systems import Prepared, Setup, ours


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    ours.shard(model, blocks, setup)
    for block in blocks:
        block.compile(fullgraph=True)
    return Prepared(model, model)
