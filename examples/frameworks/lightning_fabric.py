"""Lightning Fabric: one strategy shards the model; accumulation, clipping and checkpoints are Fabric's calls.

torchrun --nproc-per-node 2 examples/frameworks/lightning_fabric.py
"""

import json
import tempfile

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from problem import ACCUMULATE, BATCH, MAX_NORM, Net, optimizer_of, rows
from torch.utils.data import DataLoader

from fsdp_compile import checkpoint
from fsdp_compile.integrations.lightning import FabricStrategy

fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(process_group_backend="gloo"))
fabric.launch()


def prepared(compiled=False):
    model = fabric.setup(torch.compile(Net(), backend="aot_eager") if compiled else Net())
    return model, fabric.setup_optimizers(optimizer_of(model))


def epoch(model, optimizer):
    loader = fabric.setup_dataloaders(DataLoader(rows(), batch_size=BATCH))
    losses = []
    for index, (x, y) in enumerate(loader):
        last = index % ACCUMULATE == ACCUMULATE - 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = F.mse_loss(model(x), y)
            fabric.backward(loss / ACCUMULATE)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return losses


model, optimizer = prepared()
losses = epoch(model, optimizer)
folder = fabric.broadcast(tempfile.mkdtemp() if fabric.global_rank == 0 else None)
fabric.save(folder, {"model": model, "optimizer": optimizer})
model, optimizer = prepared(compiled=True)
fabric.load(folder, {"model": model, "optimizer": optimizer})
losses += epoch(model, optimizer)
sharded = model.module  # what is below Fabric's wrapper
checkpoint.save_safetensors(sharded, f"{folder}/exported")
plain = Net()  # loads without sharding
checkpoint.load_safetensors(plain, f"{folder}/exported")
for name, param in sharded.named_parameters():
    torch.testing.assert_close(plain.get_parameter(name).detach(), param.full_tensor().detach())
if fabric.global_rank == 0:
    print(json.dumps(losses))
