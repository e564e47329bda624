"""torchao's float8 training: layers are converted before `fully_shard`; parameters stay in float32.

torchrun --nproc-per-node 2 examples/frameworks/torchao_float8.py
"""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problem import BATCH, MAX_NORM, optimizer_of, rows
from torch import nn
from torch.utils.data import DataLoader
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fsdp_compile import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]
net = nn.Sequential(nn.Linear(6, 16), *blocks, nn.Linear(16, 2))
net = convert_to_float8_training(
    net,
    module_filter_fn=lambda layer, name: name not in ("0", "3"),  # all but the first and the last layer
    config=Float8LinearConfig(emulate=True),  # computes in float32 what is rounded to float8: for any hardware
)
model = fully_shard(net)
run = torch.compile(model, backend="aot_eager", fullgraph=True)
optimizer = optimizer_of(model)

data, losses = rows(), []
# Every rank has the same rows here: a rank's scales follow its own batch, so that any number of ranks does the same.
for index, (x, y) in enumerate(DataLoader(data, batch_size=2 * BATCH)):
    loss = F.mse_loss((run if index % 2 else model)(x), y)  # eager and compiled steps in turn
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    losses += [loss.item(), norm.item()]
if dist.get_rank() == 0:
    print(json.dumps(losses))
