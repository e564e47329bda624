"""Adapters beside frozen weights that torchao has quantized to 8 and to 4 bits: quantize, then `fully_shard`.

torchrun --nproc-per-node 2 examples/frameworks/torchao_qlora.py
"""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problem import BATCH, optimizer_of, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from fsdp_compile import fully_shard


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 64), *[Adapted() for _ in range(4)], nn.Linear(64, 2))
quantize_(net, Int8WeightOnlyConfig(), filter_fn=lambda layer, name: name in ("1.base", "2.base"))
for block in net[3:5]:
    block.base.weight = nn.Parameter(to_nf4(block.base.weight.detach(), 64, 4), requires_grad=False)
model = fully_shard(net)
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
