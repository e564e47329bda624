"""Ours, the whole model one graph; an option names passes to leave out, for the ablation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bench.systems import Prepared, Setup, ours


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    ours.shard(model, blocks, setup)
    left_out: dict[str, Any] = {}
    if setup.option:
        left_out = {"backend": "fsdp_compile", "options": {"disable": tuple(setup.option.split("+"))}}
    compiled: Any = torch.compile(model, fullgraph=True, **left_out)
    return Prepared(model, compiled)
