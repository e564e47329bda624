"""A training loop without a framework, as recipes have it: shard, compile, accumulate, clip, save, resume, export.

torchrun --nproc-per-node 2 examples/frameworks/plain_loop.py
"""

import json
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problem import ACCUMULATE, BATCH, MAX_NORM, Net, optimizer_of, rows
from torch.utils.data import DataLoader, DistributedSampler

from fsdp_compile import checkpoint, fully_shard

dist.init_process_group("gloo")


def prepared(compiled):
    model = fully_shard(Net())
    if compiled:
        model.compile(backend="aot_eager")
    return model, optimizer_of(model)


def epoch(model, optimizer):
    data, losses = rows(), []
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))
    for index, (x, y) in enumerate(loader):
        last = index % ACCUMULATE == ACCUMULATE - 1
        model.set_requires_gradient_sync(last)
        loss = F.mse_loss(model(x), y)
        (loss / ACCUMULATE).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
model, optimizer = prepared(compiled=False)
losses = epoch(model, optimizer)
checkpoint.save({"model": model, "optimizer": optimizer}, f"{folder[0]}/checkpoints", step=1)

model, optimizer = prepared(compiled=True)
checkpoint.load({"model": model, "optimizer": optimizer}, f"{folder[0]}/checkpoints")
losses += epoch(model, optimizer)

checkpoint.save_safetensors(model, f"{folder[0]}/exported")
plain = Net()  # loads without sharding
checkpoint.load_safetensors(plain, f"{folder[0]}/exported")
for name, param in model.named_parameters():
    torch.testing.assert_close(dict(plain.named_parameters())[name].detach(), param.full_tensor().detach())
if dist.get_rank() == 0:
    print(json.dumps(losses))
dist.destroy_process_group()
