"""LoRA by peft: adapters before `fully_shard`, which alone train; then merged weights for a model without peft.

torchrun --nproc-per-node 2 examples/frameworks/peft_lora.py
"""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from problem import BATCH, MAX_NORM, Net, optimizer_of, rows
from torch.utils.data import DataLoader, DistributedSampler

from fsdp_compile import fully_shard, summon_full_params

dist.init_process_group("gloo")
model = get_peft_model(Net(), LoraConfig(r=2, target_modules=r"blocks\.\d\.[02]|head"))
fully_shard(model)
optimizer = optimizer_of(model)

data, losses = rows(), []
sampler = DistributedSampler(data, shuffle=False)
for x, y in DataLoader(data, batch_size=2 * BATCH // dist.get_world_size(), sampler=sampler):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item() / dist.get_world_size())
assert {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad} == {"default"}

x, _ = data.tensors
with torch.no_grad():
    expected = model(x)
with summon_full_params(model, writeback=False):
    merged = {name: value.clone() for name, value in model.merge_and_unload().state_dict().items()}
net = Net()
net.load_state_dict(merged)
with torch.no_grad():
    torch.testing.assert_close(net(x), expected)
if dist.get_rank() == 0:
    print(json.dumps(losses))
