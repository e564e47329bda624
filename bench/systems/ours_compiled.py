"""Ours, the whole model one graph; an option names passes to leave out, for the ablation.

The option may begin with `autocast`: bf16 then comes from autocast, as in DDP, and not from `param_dtype`; or with
`float8`: linear layers of blocks multiply in float8 beside it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bench.models import in_float8
from bench.systems import Prepared, Setup, ours
from bench.systems.unsharded import autocast


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    names = setup.option.split("+") if setup.option else []
    by_autocast = names[:1] in (["autocast"], ["float8"])
    if names[:1] == ["float8"]:
        in_float8(blocks)
    ours.shard(model, blocks, replace(setup, bf16=setup.bf16 and not by_autocast))
    left_out: dict[str, Any] = {}
    if disabled := tuple(names[by_autocast:]):
        left_out = {"backend": "fsdp_compile", "options": {"disable": disabled}}
    compiled: Any = torch.compile(model, fullgraph=True, **left_out)
    return Prepared(model, autocast(compiled, setup) if by_autocast else compiled)
