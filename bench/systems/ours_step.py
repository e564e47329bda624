"""Ours, with the whole step as one call of `compile_step`, planned for the link with its update.

The option `layers` makes each linear layer of a block a unit, `first` those of the first block alone; `in_backward`
updates units within backward, and frees them all after forward.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.systems import Prepared, Setup, ours_planned
from fsdp_compile import compile_step
from fsdp_compile.passes.post_grad.plan_pass import TaskProfile


@dataclass
class Stepped(Prepared):
    """A new step for each link: once to record a profile of its tasks and updates, once by the plan for that."""

    in_backward: bool = False

    def whole_step(self, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        self.optimizer = optimizer
        self.step: Any = self._compiled()

        def run(*batch: Tensor) -> Tensor:
            loss: Tensor = self.step(*batch)
            return loss

        return run

    def configured(self, link: str, batch: Sequence[Tensor]) -> None:
        """Plan for `link`; the link itself takes no time meanwhile."""
        profiled = self._compiled(link=link, record_profile=True)
        for _ in range(2):  # the second one compiles the update
            profiled(*batch)
        with TaskProfile() as profile:
            for _ in range(ours_planned.MEASURED):
                profiled(*batch)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.save(file.name)
            self.step = self._compiled(link=link, profile=file.name)
            self.step(*batch)

    def _compiled(self, **options: Any) -> Callable[..., Tensor]:
        torch._dynamo.reset()
        return compile_step(self.model, self.optimizer, update_in_backward=self.in_backward, options=options)


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    planned = ours_planned.prepare(model, blocks, setup)
    return Stepped(planned.model, planned.forward, in_backward=setup.option == "in_backward")
