"""This package: eager, blocks compiled, the whole model compiled, and planned for the link."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.models import in_float8
from bench.systems import Prepared, Setup
from bench.systems.replicated import autocast
from fsdp_compile import FSDPModule, MixedPrecision, compile_step
from fsdp_compile.api import shard_module
from fsdp_compile.passes.cost.hardware import device
from fsdp_compile.passes.measure import measured_speed


def shard(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup, **options: Any) -> nn.Module:
    """Shard the model; the default policy has to find the same units that the other systems are told."""
    precision = MixedPrecision(torch.bfloat16, torch.float32) if setup.bf16 else None
    ahead = setup.blocking  # as FSDP2 is told: on CUDA the host's running ahead has the same effect
    shard_module(model, mesh=setup.mesh, mixed_precision=precision, forward_prefetch=ahead, **options)
    missed = [block for block in blocks if not isinstance(block, FSDPModule)]
    if missed:
        raise RuntimeError(f"{len(missed)} blocks are not units, so this would not compare equal units")
    return model


def eager(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    return Prepared(model, shard(model, blocks, setup))


def by_block(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    """Each block is compiled by itself, in the eager runtime."""
    shard(model, blocks, setup)
    for block in blocks:
        block.compile(fullgraph=True)
    return Prepared(model, model)


def compiled(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    """The whole model is one graph, in the order of blocks.

    The option may be `autocast`, from which bf16 then comes, as in DDP, and not from `param_dtype`, or `float8`: linear
    layers of blocks multiply in float8 beside it. Behind `+` stands a pass to leave out.
    """
    kind, _, disabled = setup.option.partition("+")
    if kind == "float8":
        in_float8(blocks)
    shard(model, blocks, replace(setup, bf16=setup.bf16 and not kind))
    chosen: dict[str, Any] = {"backend": "fsdp_compile", "options": {"disable": (disabled,)}} if disabled else {}
    forward: Any = torch.compile(model, fullgraph=True, **chosen)
    return Prepared(model, autocast(forward, setup) if kind else forward)


class Planned(Prepared):
    """Compiled again for each link, with the plan for it and for the speed of a CPU, which has no file of its own."""

    def configured(self, link: str, batch: Sequence[Tensor]) -> None:
        """Plan for `link`; the link itself takes no time meanwhile."""
        here = batch[0].device
        speed = measured_speed(device("cpu"), torch.float32, here) if here.type == "cpu" else None
        self.compile(link=link, **({} if speed is None else {"device": f"cpu:{speed:g}"}))
        for _ in range(2):
            self.run(*batch)

    def compile(self, **options: Any) -> None:
        torch._dynamo.reset()
        self.forward = torch.compile(self.model, fullgraph=True, backend="fsdp_compile", options=options)

    def run(self, *batch: Tensor) -> Any:
        self.forward(*batch).backward()
        self.model.zero_grad()


@dataclass
class Stepped(Planned):
    """The whole step is one call of `compile_step`, planned with its update."""

    in_backward: bool = False

    def whole_step(self, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        self.optimizer = optimizer
        self.compile()
        return self.run

    def compile(self, **options: Any) -> None:
        torch._dynamo.reset()
        in_backward = self.in_backward
        self.step: Any = compile_step(self.model, self.optimizer, update_in_backward=in_backward, options=options)

    def run(self, *batch: Tensor) -> Any:
        return self.step(*batch)


def planned(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    """The plan also says which units stay unsharded."""
    shard(model, blocks, setup, reshard_after_forward="auto")
    return Planned(model, torch.compile(model, fullgraph=True))


def step(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    """As `planned`; the option `in_backward` updates units within backward, and frees all of them after forward."""
    in_backward = setup.option == "in_backward"
    shard(model, blocks, setup, reshard_after_forward=True if in_backward else "auto")
    return Stepped(model, torch.compile(model, fullgraph=True), in_backward=in_backward)
