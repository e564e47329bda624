"""The ceiling without communication: every rank trains the whole model by itself, compiled as one graph."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bench.systems import Prepared, Setup


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    return Prepared(model, autocast(torch.compile(model, fullgraph=True), setup))


def autocast(forward: Callable[..., Tensor], setup: Setup) -> Callable[..., Tensor]:
    """Low precision as users of whole parameters have it."""

    def run(*batch: Tensor) -> Tensor:
        with torch.autocast(setup.device.type, torch.bfloat16, enabled=setup.bf16):
            return forward(*batch)

    return run
