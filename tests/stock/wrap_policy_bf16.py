"""A small transformer: units by a wrap policy, parameters in bfloat16 during compute.

    torchrun --standalone --nproc-per-node 2 tests/stock/wrap_policy_bf16.py

Written for torch's FSDP; rank 0 prints the mean loss over ranks of every step, one JSON object per line.
"""

import functools
import json

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

VOCAB, CONTEXT, WIDTH, BATCH, STEPS = 64, 16, 32, 4, 10


class Model(nn.Module):
    """Tokens to logits through three encoder layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train():
    torch.manual_seed(0)
    model = FSDP(
        Model(),
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
        ),
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
        ),
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        tokens = torch.randint(VOCAB, (BATCH, CONTEXT))
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), (tokens + 1).flatten() % VOCAB)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step, loss.detach())


def report(step, loss):
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(json.dumps({"step": step, "loss": loss.item() / dist.get_world_size()}), flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
