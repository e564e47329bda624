"""Low-rank adapters on frozen weights, with activation checkpointing in every block.

    torchrun --standalone --nproc-per-node 2 tests/stock/lora_checkpointing.py

Written for torch's FSDP; rank 0 prints the mean loss over ranks of every step, one JSON object per line.
"""

import json

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

INPUTS, WIDTH, OUTPUTS, RANK, BATCH, STEPS = 9, 22, 5, 4, 6, 10


class LoRALinear(nn.Module):
    """A frozen linear layer plus the product of two small trainable matrices."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Block(nn.Module):
    """Two adapted layers added to their input."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.first, self.second = LoRALinear(WIDTH, 2 * WIDTH), LoRALinear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(F.gelu(self.first(self.norm(x))))


class Model(nn.Module):
    """A frozen stem, adapted blocks, a trainable head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train():
    torch.manual_seed(0)
    model = FSDP(
        Model(),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(BATCH, INPUTS)
        loss = F.mse_loss(model(x), x[:, :OUTPUTS].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step, loss.detach())


def report(step, loss):
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(json.dumps({"step": step, "loss": loss.item() / dist.get_world_size()}), flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
