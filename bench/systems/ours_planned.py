"""Ours, the whole model one graph, planned for the link by the seconds that its tasks take on it."""

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import CustomPolicy

from bench.systems import Prepared, Setup, layers_of, ours
from fsdp_compile.passes.post_grad.plan_pass import TaskProfile

MEASURED = 5  # steps


class Planned(Prepared):
    """Compiled anew for each link: once to record a profile of its tasks, once by the plan for that profile."""

    def configured(self, link: str, batch: Sequence[Tensor]) -> None:
        """Plan for `link`, as `options={"link": ...}` names it; the link itself takes no time meanwhile."""
        profiled = _compiled(self.model, link=link, record_profile=True)
        self._run(profiled, batch)
        with TaskProfile() as profile:
            for _ in range(MEASURED):
                self._run(profiled, batch)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.save(file.name)
            self.forward = _compiled(self.model, link=link, profile=file.name)
            self._run(self.forward, batch)

    def _run(self, forward: Any, batch: Sequence[Tensor]) -> None:
        forward(*batch).backward()
        self.model.zero_grad()


def _compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="fsdp_compile", options=options)


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    if setup.option == "layers":  # the plan says which of them are launched together
        blocks = layers_of(blocks)
    elif setup.option == "first":  # only the edge of the step is fine
        blocks = [*layers_of(blocks[:1]), *blocks[1:]]
    policy = CustomPolicy(lambda module: any(module is each for each in blocks))
    reshard: Any = (
        True if setup.option == "in_backward" else "auto"
    )  # the plan says too which units stay, unless memory
    ours.shard(model, blocks, setup, reshard_after_forward=reshard, auto_wrap_policy=policy)  # is all that counts
    compiled: Any = torch.compile(model, fullgraph=True)
    return Planned(model, compiled)
