"""Accelerate and what builds on it, beside a configuration for torch's FSDP, and with objects that are registered."""

import pytest

from .test_frameworks import run_code

FIELDS = """
import os, sys
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin as Plugin, ParallelismConfig
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.integrations.accelerate import Accelerator

rank = int(os.environ["RANK"])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.calls, self.dtype = nn.Linear(6, 16), nn.Linear(16, 6), 0, None
    def forward(self, x):
        self.calls, self.dtype = self.calls + 1, self.inner.weight.dtype
        return x + self.outer(nn.functional.dropout(torch.tanh(self.inner(x)), 0.2))

class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(6, 2)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def train(plugin, seed=0, shard=None, evaluation=False, **more):
    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, shard=shard, **more)
    model = Net(seed)
    if evaluation:
        return accelerator.prepare_model(model, evaluation_mode=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(7 + rank)
    for step in range(3):
        accelerator.backward(model(torch.randn(4, 6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    model.result = [param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()
                    for param in model.parameters()]
    return model

BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
calls = lambda model: [module.calls for module in model.modules() if isinstance(module, Block)]
units = lambda model: len(units_gathered_below(model))
settings = lambda model: model._fsdp_runtime.settings
expected = train(None).result
for version, fields, read, value in [
    *((version, fields, read, value) for version in (1, 2) for fields, read, value in [
        ({}, units, 1),
        (BLOCKS, units, 4),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 100}, units, 7),
        ({"cpu_offload": True}, lambda model: settings(model).offload, True),
        (BLOCKS, calls, [3, 3, 3]),
        (BLOCKS | {"activation_checkpointing": True}, calls, [6, 6, 6]),
        (BLOCKS | {"activation_checkpointing": True}, units, 4),
        ({"cpu_ram_efficient_loading": True}, lambda model: settings(model).sync_module_states, True),
    ]),
    (2, BLOCKS | {"activation_checkpointing": True, "activation_checkpointing_offload": True}, calls, [6, 6, 6]),
    (2, {"reshard_after_forward": False}, lambda model: settings(model).strategy, ShardingStrategy.SHARD_GRAD_OP),
    (2, {}, lambda model: settings(model).strategy, ShardingStrategy.FULL_SHARD),
    (1, {"sharding_strategy": "SHARD_GRAD_OP"}, lambda model: settings(model).strategy, ShardingStrategy.SHARD_GRAD_OP),
    (1, {"backward_prefetch": "BACKWARD_POST"}, lambda model: settings(model).backward_prefetch,
        BackwardPrefetch.BACKWARD_POST),
    (1, {"forward_prefetch": True, "limit_all_gathers": False},
        lambda model: (settings(model).forward_prefetch, settings(model).limit_all_gathers), (True, False)),
]:
    if version == 1 and fields.get("cpu_ram_efficient_loading"):  # accelerate refuses it on the CPU
        continue
    model = train(Plugin(fsdp_version=version, **fields), seed=rank if fields.get("cpu_ram_efficient_loading") else 0)
    assert read(model) == value, (version, fields, read(model), value)
    torch.testing.assert_close(model.result, expected)
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)  # which a plugin sets

for version in (1, 2):
    model = train(Plugin(fsdp_version=version, ignored_modules="head"))
    assert not hasattr(model.head.weight, "full_tensor") and hasattr(model.blocks[0].inner.weight, "full_tensor")
    model = train(Plugin(fsdp_version=version), mixed_precision="bf16")
    assert model.blocks[0].dtype is torch.bfloat16 and model.head.weight.dtype is torch.float32
assert units(train(Plugin(fsdp_version=2, **BLOCKS), shard={"auto_wrap_policy": None})) == 1

wrong = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Layer"]}
train(Plugin(fsdp_version=2, **wrong), evaluation=True)  # a reward model of another architecture
for refused, name in (
    (lambda: train(Plugin(fsdp_version=2, **wrong)), "Net has no module of class Layer"),
    (lambda: train(Plugin(fsdp_version=2, activation_checkpointing=True)), "set fsdp_auto_wrap_policy"),
    (lambda: train(Plugin(fsdp_version=2), parallelism_config=ParallelismConfig(dp_shard_size=2)), "dp_shard_size"),
):
    try:
        refused()
    except ValueError as error:
        assert name in str(error), error
    else:
        raise AssertionError(name)

os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}
assert units(train(None)) == 4 and os.environ["ACCELERATE_USE_FSDP"] == "true"
print("[]")
"""


@pytest.mark.nightly
def test_every_field_of_an_fsdp_configuration() -> None:
    """Each field of accelerate's plugin does what it says, with the values of a run without it, or is refused."""
    run_code(FIELDS, "accelerate", 2)
