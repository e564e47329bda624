"""Hugging Face accelerate: another Accelerator; `prepare` shards the model and compiles it.

torchrun --nproc-per-node 2 examples/frameworks/accelerate_loop.py
"""

import json
import tempfile

import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list
from problem import ACCUMULATE, BATCH, MAX_NORM, Net, optimizer_of, rows
from safetensors.torch import load_model
from torch.utils.data import DataLoader

from fsdp_compile.integrations.accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, dynamo_backend="aot_eager")


def prepared():
    model = Net()
    return accelerator.prepare(model, optimizer_of(model), DataLoader(rows(), batch_size=BATCH))


def epoch(model, optimizer, loader):
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().view(1)).mean().item())
    return losses


objects = prepared()
losses = epoch(*objects)
folder = broadcast_object_list([tempfile.mkdtemp() if accelerator.is_main_process else None])[0]
accelerator.save_state(folder)
accelerator.free_memory()
objects = prepared()
accelerator.load_state(folder)
losses += epoch(*objects)
accelerator.save_model(objects[0], f"{folder}/exported")
accelerator.wait_for_everyone()
plain = Net()  # loads without sharding
load_model(plain, f"{folder}/exported/model.safetensors")
for name, param in accelerator.unwrap_model(objects[0], keep_torch_compile=False).named_parameters():
    torch.testing.assert_close(plain.get_parameter(name).detach(), param.full_tensor().detach())
if accelerator.is_main_process:
    print(json.dumps(losses))
