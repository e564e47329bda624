"""Lightning's Trainer: one strategy shards the LightningModule, whose inner module is compiled.

torchrun --nproc-per-node 2 examples/frameworks/lightning_trainer.py
"""

import json
import subprocess
import sys
import tempfile

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from problem import ACCUMULATE, BATCH, MAX_NORM, Net, optimizer_of, rows
from torch.utils.data import DataLoader, DistributedSampler

from fsdp_compile.integrations.lightning import TrainerStrategy

losses = []


class Module(lightning.LightningModule):
    def __init__(self, compiled=False):
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()
        if compiled:  # the module that training_step calls: Lightning refuses torch.compile(self)
            self.net.compile(backend="aot_eager")

    def training_step(self, batch, index):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        return loss

    def train_dataloader(self):  # with a sampler of its own: Lightning's shuffles
        data = rows()
        return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=False))

    def configure_optimizers(self):
        return optimizer_of(self)


def trainer(epochs):
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TrainerStrategy(process_group_backend="gloo"),
        max_epochs=epochs,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=MAX_NORM,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
        use_distributed_sampler=False,
    )


first = trainer(1)
first.fit(Module())
folder = [tempfile.mkdtemp() if first.global_rank == 0 else None]
dist.broadcast_object_list(folder)
first.save_checkpoint(folder[0])
second = trainer(2)
module = Module(compiled=True)
second.fit(module, ckpt_path=folder[0])
second.save_checkpoint(f"{folder[0]}/last")
if second.global_rank == 0:  # what other ranks wrote, as one file
    command = [sys.executable, "-m", "lightning.fabric.utilities.consolidate_checkpoint", f"{folder[0]}/last"]
    subprocess.run(command, check=True)
dist.barrier()
plain = Module.load_from_checkpoint(f"{folder[0]}/last.consolidated", compiled=False)  # loads without sharding
for name, param in module.named_parameters():
    torch.testing.assert_close(plain.get_parameter(name).detach(), param.full_tensor().detach())
if second.global_rank == 0:
    print(json.dumps(losses))
dist.barrier()
