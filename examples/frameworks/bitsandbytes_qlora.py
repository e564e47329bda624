"""Adapters beside frozen weights that bitsandbytes has quantized to 4 bits: quantize, then `fully_shard`.

torchrun --nproc-per-node 2 examples/frameworks/bitsandbytes_qlora.py
"""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bitsandbytes.nn import Linear4bit
from problem import BATCH, optimizer_of, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from fsdp_compile import fully_shard


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of low rank."""

    def __init__(self) -> None:
        super().__init__()
        plain = nn.Linear(64, 64, bias=False)
        self.base = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").requires_grad_(False)
        self.base.load_state_dict(plain.state_dict())
        self.base.to("cpu")  # which quantizes
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(nn.Sequential(nn.Linear(6, 64), *[Adapted() for _ in range(3)], nn.Linear(64, 2)))
run = torch.compile(model, backend="aot_eager", fullgraph=True)
optimizer = optimizer_of(model)

data, losses = rows(), []
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=2 * BATCH // dist.get_world_size(), sampler=sampler)
for index, (x, y) in enumerate(loader):
    loss = F.mse_loss((run if index % 2 else model)(x), y)  # eager and compiled steps in turn
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item() / dist.get_world_size())
if dist.get_rank() == 0:
    print(json.dumps(losses))
