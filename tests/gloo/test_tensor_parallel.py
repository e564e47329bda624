"""Parameters that are DTensors on another dimension of the mesh: tensor parallelism and experts on ranks of their own."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fsdp_compile import fully_shard

from .ranks import Ranks
from .training import executor


class Attention(nn.Module):
    """Causal, with heads of 4 channels; how many there are follows from what the projections give."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, 4)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of Llama's kind."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim)
        self.gate, self.up, self.down = nn.Linear(dim, 24), nn.Linear(dim, 24), nn.Linear(24, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Two blocks between an embedding and the projection to logits."""

    def __init__(self, dim: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: nn.Module, tp: DeviceMesh) -> None:
    """Torch's own plan: activations between blocks are split along the sequence, logits along the vocabulary."""
    split = Shard(1)
    parallelize_module(
        model,
        tp,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=split, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            tp,
            {
                "norm1": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=split, desired_input_layouts=Replicate()),
                **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
                "attention.o": RowwiseParallel(output_layouts=split),
                "norm2": SequenceParallel(),
                "gate": ColwiseParallel(input_layouts=split),
                "up": ColwiseParallel(input_layouts=split),
                "down": RowwiseParallel(output_layouts=split),
            },
        )


def batch(index: int) -> Tensor:
    return torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(index))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def _train_llama(rank: int, how: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = Llama()
    model = copy.deepcopy(whole)
    parallelize(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (whole, model)]
    run = executor(model, how)
    for step in range(3):
        mean = sum(loss_of(whole(batch(10 * step + dp)), batch(10 * step + dp)) for dp in range(2)) / 2
        mean.backward()
        tokens = batch(10 * step + mesh["dp"].get_local_rank())
        with loss_parallel():
            loss = loss_of(run(tokens), tokens)
            loss.backward()
        total = loss.full_tensor().detach()
        dist.all_reduce(total, group=mesh["dp"].get_group())
        torch.testing.assert_close(total / 2, mean.detach(), rtol=1e-5, atol=1e-5)
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (whole, model)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=1e-5)
        for mine, reference in zip(model.parameters(), whole.parameters(), strict=True):
            assert mine.shape == reference.shape == mine.grad.shape
            torch.testing.assert_close(mine.grad.full_tensor(), reference.grad, rtol=1e-5, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), reference in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), reference.detach(), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("how", ["eager", "aot_eager", "inductor"])
def test_llama(four: Ranks, how: str) -> None:
    """Losses, norms, gradients and parameters are those of one process after `parallelize_module` and `fully_shard`."""
    four.run(_train_llama, how)
