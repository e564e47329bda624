"""Ours, planned for the link, with the whole step as one call of `compile_step`.

The option `layers` makes each linear layer a unit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.systems import Prepared, Setup, ours_planned
from fsdp_compile import compile_step


class Stepped(ours_planned.Planned):
    """A new step for each link, for the model is compiled anew."""

    def whole_step(self, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        step: Any = None
        forward: Any = None

        def run(*batch: Tensor) -> Tensor:
            nonlocal step, forward
            if forward is not self.forward:
                step, forward = compile_step(self.forward, optimizer), self.forward  # type: ignore[arg-type]  # a module
            loss: Tensor = step(*batch)
            return loss

        return run


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    planned = ours_planned.prepare(model, blocks, setup)
    return Stepped(planned.model, planned.forward)
