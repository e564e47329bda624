"""Two replicas of a model that is sharded over two ranks each; gradients clipped, learning rate warmed up and decayed.

    torchrun --standalone --nproc-per-node 4 tests/stock/hybrid_clip_schedule.py

Written for torch's FSDP; rank 0 prints every step's mean loss over ranks and gradient norm, one JSON object per line.
"""

import json

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

INPUTS, WIDTH, CLASSES, BATCH, STEPS, WARM_UP = 13, 24, 7, 6, 10, 3


class Block(nn.Module):
    """A normalised two-layer perceptron added to its input."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50), nn.Linear(50, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build():
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, CLASSES))


def train():
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = FSDP(
        build(),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / WARM_UP, (STEPS - n) / STEPS))
    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(BATCH, INPUTS)
        y = x[:, :CLASSES].argmax(1)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = model.clip_grad_norm_(0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        report(step, loss.detach(), norm)


def report(step, loss, norm):
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(json.dumps({"step": step, "loss": loss.item() / dist.get_world_size(), "norm": norm.item()}), flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
