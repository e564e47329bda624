"""The systems that are compared and the models they train; `eager_peers.py` measures them."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp_compile

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig
from train_gpt import load_text

Inputs = tuple[Tensor, Tensor]
Shard = Callable[[nn.Module, Sequence[nn.Module]], nn.Module]


@dataclass(frozen=True)
class Workload:
    """A model, what it is fed and how much of it a step is."""

    build: Callable[[], nn.Module]  # returns its loss when called with a batch
    blocks: Callable[[nn.Module], Sequence[nn.Module]]  # that become units, besides the root
    batch: Callable[[int, int], Inputs]  # (step, rank) -> this rank's part
    unit: str
    per_step: int  # units that a rank trains on in one step


# --- systems ----------------------------------------------------------------------------------------------------------


def ours(model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
    """Ours: the default policy has to find the same units that FSDP2 is told."""
    fsdp_compile.fully_shard(model)
    missed = [block for block in blocks if not isinstance(block, fsdp_compile.FSDPModule)]
    if missed:
        raise RuntimeError(f"expected each block to be a unit, found {len(missed)} that are not; compare equal units")
    return model


def fsdp2(model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
    """torch's per-parameter sharding, applied as its users do: to each block, then to the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        torch_fully_shard(block, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)
    return model


def unsharded(model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
    """The plain model."""
    return model


SYSTEMS: dict[str, Shard] = {"ours": ours, "fsdp2": fsdp2}


# --- workloads --------------------------------------------------------------------------------------------------------


def gpt(batch: int = 4) -> Workload:
    """The example's GPT, 10.8 M parameters, on the example's text with the example's batch."""
    config = GPTConfig()
    text = load_text(None, config.context)

    def draw(step: int, rank: int) -> Inputs:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        at = torch.randint(len(text) - config.context, (batch, 1), generator=generator)
        window = text[at + torch.arange(config.context + 1)].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    return Workload(lambda: GPT(config), lambda model: list(model.blocks), draw, "tokens", batch * config.context)


class Layers(nn.Module):
    """Ten small linear layers: 20 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Regression(nn.Module):
    """Blocks one after the other, squared error inside; only the blocks have parameters."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layers(width) for _ in range(blocks))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.layer_norm(block(x), x.shape[-1:])
        return F.mse_loss(x, y)


def many_small(blocks: int = 50, width: int = 16, batch: int = 4) -> Workload:
    """1,000 parameters of at most 256 elements in 50 units."""

    def draw(step: int, rank: int) -> Inputs:
        x, y = torch.randn(2, batch, width, generator=torch.Generator().manual_seed(1000 * step + rank))
        return x, y

    return Workload(lambda: Regression(blocks, width), lambda model: list(model.blocks), draw, "steps", 1)


def tiny_gpt(layers: int = 12) -> Workload:
    """A GPT of width 16 and one sequence of 4 tokens: nearly all of a step is host work."""
    config = GPTConfig(vocab=16, context=4, layers=layers, heads=1, dim=16, tied=False)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    return Workload(lambda: GPT(config), lambda model: list(model.blocks), lambda *_: (tokens, tokens), "steps", 1)


# --- a step -----------------------------------------------------------------------------------------------------------


class Trainer:
    """A model sharded by one system, and its optimizer."""

    def __init__(self, workload: Workload, shard: Shard) -> None:
        torch.manual_seed(0)
        self.model = shard(model := workload.build(), workload.blocks(model))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), foreach=True)

    def accumulate(self, batch: Inputs) -> Tensor:
        """Forward and backward."""
        loss = self.model(*batch)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()
