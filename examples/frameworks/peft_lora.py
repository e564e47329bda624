"""LoRA by peft: adapters before `fully_shard`, which alone train; then they are saved, or merged for a plain model.

torchrun --nproc-per-node 2 examples/frameworks/peft_lora.py
"""

import json
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from problem import BATCH, MAX_NORM, Net, optimizer_of, rows
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, DistributedSampler

from fsdp_compile import fully_shard, summon_full_params

dist.init_process_group("gloo")
model = get_peft_model(Net(), LoraConfig(r=2, target_modules=r"blocks\.\d\.[02]|head"))
fully_shard(model)
run = torch.compile(model, backend="aot_eager")
optimizer = optimizer_of(model)

data, losses = rows(), []
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=2 * BATCH // dist.get_world_size(), sampler=sampler)
for index, (x, y) in enumerate(loader):
    loss = F.mse_loss((run if index % 2 else model)(x), y)  # eager and compiled steps in turn
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

folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
full = get_model_state_dict(model, options=options)  # on rank 0 alone
if dist.get_rank() == 0:
    model.save_pretrained(folder[0], state_dict=full)  # the adapters
    with torch.no_grad():
        torch.testing.assert_close(PeftModel.from_pretrained(Net(), folder[0])(x), expected)

with summon_full_params(model, writeback=False):
    merged = {name: value.clone() for name, value in model.merge_and_unload().state_dict().items()}
net = Net()
net.load_state_dict(merged)
with torch.no_grad():
    torch.testing.assert_close(net(x), expected)
if dist.get_rank() == 0:
    print(json.dumps(losses))
