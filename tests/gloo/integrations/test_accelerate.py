"""Accelerate and what builds on it, beside a configuration for torch's FSDP, and with objects that are registered."""

from importlib.util import find_spec
from pathlib import Path

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


TRL = """
import json, os, sys
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from fsdp_compile.integrations.transformers import Trainer

class Preferring(DPOTrainer, Trainer):
    pass
class Rewarded(GRPOTrainer, Trainer):
    pass

words = Tokenizer(WordLevel({f"w{index}": index for index in range(64)}, "w2"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0", unk_token="w2")
SETTINGS = dict(output_dir=sys.argv[1], use_cpu=True, bf16=False, max_steps=3, report_to=[], save_strategy="no",
    disable_tqdm=True, logging_steps=1, learning_rate=1e-2, per_device_train_batch_size=4)

def model():
    return Qwen3ForCausalLM.from_pretrained(folder)

def losses(trainer):
    trainer.train()
    for each in (trainer.model, trainer.ref_model):
        assert all(type(param).__name__ == "ShardedTensor" for param in each.parameters())
    return [row[key] for row in trainer.state.log_history for key in ("loss", "grad_norm") if key in row]

def train():
    columns = {"prompt": 5, "chosen": 20, "rejected": 40}
    rows = Dataset.from_dict({name: [f"w{start + index}" for index in range(16)] for name, start in columns.items()})
    more = {"processing_class": tokenizer}
    preferred = losses(Preferring(model(), model(), DPOConfig(**SETTINGS), train_dataset=rows, **more))
    settings = GRPOConfig(**SETTINGS, num_generations=4, max_completion_length=4, beta=0.1)
    reward = lambda completions, **_: [float(len(each) % 3) for each in completions]
    prompts = rows.select_columns("prompt")
    return preferred + losses(Rewarded(model(), reward, settings, train_dataset=prompts, **more))

folder = f"{sys.argv[1]}/{os.environ['RANK']}"
set_seed(0)
Qwen3ForCausalLM(Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, eos_token_id=1, pad_token_id=0)).save_pretrained(folder)
tokenizer.save_pretrained(folder)
found = [train()]
for version in "12":
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": version,
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer",
        "FSDP_ACTIVATION_CHECKPOINTING": "true"}
    found.append(train())
if os.environ["RANK"] == "0":
    print()
    print(json.dumps(found))
"""


@pytest.mark.nightly
def test_trl_uses_an_fsdp_configuration(tmp_path: Path) -> None:
    """DPO and GRPO, with a reference model each, train under either version's configuration as without, all sharded."""
    if find_spec("trl") is None:
        pytest.skip("trl is not installed: pip install trl")
    without, *configured = run_code(TRL, "accelerate", 2, str(tmp_path))
    assert configured == [pytest.approx(without, rel=1e-5)] * 2


OBJECTS = """
import sys
import torch
from accelerate.local_sgd import LocalSGD
from problem import Net, optimizer_of, rows
from fsdp_compile.integrations.accelerate import Accelerator

folder, phase = sys.argv[1:]
accelerator = Accelerator(cpu=True)

class Average:  # sharded as the parameters are
    def __init__(self, model):
        self.values = {name: param.detach().clone() for name, param in model.named_parameters()}
    def update(self, model):
        for name, param in model.named_parameters():
            self.values[name].lerp_(param.detach(), 0.5)
    def state_dict(self):
        return {"values": self.values, "decay": (0.5, None)}
    def load_state_dict(self, state):
        assert state["decay"] == (0.5, None)
        self.values = state["values"]

model = Net()
model, optimizer = accelerator.prepare(model, optimizer_of(model))
average = Average(model)
accelerator.register_for_checkpointing(average)

def step():
    accelerator.backward(model(rows().tensors[0]).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    average.update(model)

if phase == "save":
    step()
    accelerator.save_state(folder)
else:
    accelerator.load_state(folder)
step()
full = lambda value: value.full_tensor() if hasattr(value, "full_tensor") else value
values = {name: full(value) for name, value in average.values.items()}
if phase == "save":
    torch.save(values, f"{folder}/expected.pt")
    try:
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2):
            step()
    except RuntimeError as error:
        assert "LocalSGD of accelerate, needs a model that is not sharded" in str(error), error
    else:
        raise AssertionError("LocalSGD")
torch.testing.assert_close(values, torch.load(f"{folder}/expected.pt"))
print("[]")
"""


@pytest.mark.nightly
def test_registered_objects_are_saved_whole(tmp_path: Path) -> None:
    """Sharded averages of an object that is registered go on, on two ranks and on one; LocalSGD is refused by name."""
    run_code(OBJECTS, "accelerate", 2, str(tmp_path), "save")
    for ranks in (2, 1):
        run_code(OBJECTS, "accelerate", ranks, str(tmp_path), "load")
