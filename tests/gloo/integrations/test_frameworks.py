"""The examples of frameworks train as one process does, through a checkpoint."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F

ROOT = Path(__file__).parents[3]
EXAMPLES_FOLDER = ROOT / "examples" / "frameworks"
EXAMPLES = {
    "plain_loop": "torch",
    "lightning_fabric": "lightning",
    "lightning_trainer": "lightning",
    "accelerate_loop": "accelerate",
}
ALSO_ALONE = {
    "transformers_trainer": "accelerate",
    "trl_sft": "trl",
    "transformers_generate": "transformers",
    "peft_lora": "peft",
    "torchao_float8": "torchao",
    "torchao_qlora": "torchao",
    "bitsandbytes_qlora": "bitsandbytes",
}


def alone() -> list[float]:
    """The losses of one process that sees what both ranks see."""
    sys.path.insert(0, str(ROOT / "examples" / "frameworks"))
    try:
        import problem
    finally:
        sys.path.pop(0)
    model = problem.Net()
    optimizer = problem.optimizer_of(model)
    losses = []
    for _ in range(2):
        for index, (x, y) in enumerate(torch.utils.data.DataLoader(problem.rows(), batch_size=2 * problem.BATCH)):
            loss = F.mse_loss(model(x), y)
            (loss / problem.ACCUMULATE).backward()
            if index % problem.ACCUMULATE == problem.ACCUMULATE - 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), problem.MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXAMPLES)
def test_frameworks(name: str) -> None:
    """Sharded training by a framework, with accumulation, clipping and a resumed run, has the losses of one process."""
    assert run_example(name, EXAMPLES[name], 2) == pytest.approx(alone(), rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ALSO_ALONE)
def test_two_ranks_equal_one(name: str) -> None:
    """Trainer with a resumed run, generation, LoRA, float8 and quantized layers print on two ranks what one prints."""
    found, expected = (run_example(name, ALSO_ALONE[name], ranks) for ranks in (2, 1))
    assert found == pytest.approx(expected, rel=1e-5)


def run_example(name: str, framework: str, ranks: int) -> list[float]:
    """The numbers that an example prints when it runs on `ranks` ranks."""
    return run_code((EXAMPLES_FOLDER / f"{name}.py").read_text(), framework, ranks)


def run_code(code: str, framework: str, ranks: int, *arguments: str) -> Any:
    """The list that a script prints when it runs on `ranks` ranks."""
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install -e '.[frameworks]'")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(EXAMPLES_FOLDER), environment.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(code)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        run = subprocess.run(
            [*launcher, str(path), *arguments], env=environment, capture_output=True, text=True, timeout=250
        )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.JSONDecoder().raw_decode([line for line in run.stdout.splitlines() if line.startswith("[")][-1])[0]


LLAMA = """
import json, os, sys
import torch, torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments, set_seed
from fsdp_compile.checkpoint import CheckpointError
from fsdp_compile.integrations.accelerate import Accelerator
from fsdp_compile.integrations.transformers import Trainer

def llama(kind, seed=0):
    set_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))
    set_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])) if kind == "lora" else model
"""

TRAINER = """
folder, phase, kind = sys.argv[1:]
ranks = int(os.environ["WORLD_SIZE"])

class Tokens(torch.utils.data.Dataset):
    rows = torch.randint(50, (32, 8), generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}

class Stop(TrainerCallback):
    def on_epoch_end(self, args, state, control, **_):
        control.should_training_stop = phase == "save"

settings = TrainingArguments(output_dir=folder, use_cpu=True, num_train_epochs=2, learning_rate=1e-2, adam_epsilon=1e-3,
    per_device_train_batch_size=8 // ranks, lr_scheduler_type="linear", logging_steps=1, report_to=[],
    disable_tqdm=True,
    save_strategy="epoch" if phase == "save" else "no")
trainer = Trainer(model=llama(kind), args=settings, train_dataset=Tokens(), callbacks=[Stop()])
trainer.train(resume_from_checkpoint=phase == "resume" or None)
if int(os.environ["RANK"]) == 0:
    logged = [row for row in trainer.state.log_history if "loss" in row]
    print()
    print(json.dumps([row[key] for row in logged for key in ("loss", "learning_rate")]))
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_trainer_resumes_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    """Saved by one rank or two, resumed by one or two: losses and rates are those of one run, weights saved once."""
    if find_spec("peft") is None:
        pytest.skip("peft is not installed")
    whole = run_code(LLAMA + TRAINER, "accelerate", 1, str(tmp_path / "whole"), "all", kind)
    for saving in (1, 2) if kind == "full" else (2,):
        folder = tmp_path / str(saving)
        run_code(LLAMA + TRAINER, "accelerate", saving, str(folder), "save", kind)
        weights = sum(path.stat().st_size for path in folder.rglob("*model.safetensors"))
        assert weights < (5_000 if kind == "lora" else 75_000)
        [saved] = folder.glob("checkpoint-*")
        for loading in (1, 2):
            resumed = run_code(LLAMA + TRAINER, "accelerate", loading, str(folder), "resume", kind)
            assert resumed == pytest.approx(whole, rel=1e-4), (saving, loading)
        for path in saved.rglob(".metadata"):
            names = dcp.FileSystemReader(path.parent).read_metadata().state_dict_metadata
            assert names and all(name.startswith("optimizer.") for name in names)


ACCELERATE_LORA = """
folder, phase = sys.argv[1:]
accelerator = Accelerator(cpu=True)

def prepared(seed=0):
    model = llama("lora", seed)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

def steps(model, optimizer, numbers):
    rows = torch.randint(50, (6, 4, 8), generator=torch.Generator().manual_seed(1))
    for number in numbers:
        loss = model(input_ids=rows[number], labels=rows[number]).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()

losses = []
if phase == "save":
    model, optimizer = prepared()
    losses = list(steps(model, optimizer, range(3)))
    accelerator.save_state(folder)
    losses += steps(model, optimizer, range(3, 6))
else:
    model, optimizer = prepared(seed=int(phase == "another"))
    try:
        accelerator.load_state(folder)
    except CheckpointError as error:
        assert phase == "another" and "frozen parameters" in str(error) and "embed_tokens" in str(error), error
    else:
        assert phase == "resume"
        losses = list(steps(model, optimizer, range(3, 6)))
if accelerator.is_main_process:
    print()
    print(json.dumps(losses))
"""


@pytest.mark.nightly
def test_accelerate_saves_adapters_without_their_base(tmp_path: Path) -> None:
    """Saved by two ranks, resumed by one or two: the losses of one run; another base is refused by name."""
    if find_spec("peft") is None:
        pytest.skip("peft is not installed")
    folder = str(tmp_path)
    whole = run_code(LLAMA + ACCELERATE_LORA, "accelerate", 2, folder, "save")
    [listed] = tmp_path.rglob(".metadata")
    names = dcp.FileSystemReader(listed.parent).read_metadata().state_dict_metadata
    weights = [name for name in names if name.startswith("model_0.")]
    assert weights and all("lora_" in name for name in weights), names
    for loading in (1, 2):
        resumed = run_code(LLAMA + ACCELERATE_LORA, "accelerate", loading, folder, "resume")
        assert resumed == pytest.approx(whole[3:], rel=1e-4), loading
    assert run_code(LLAMA + ACCELERATE_LORA, "accelerate", 2, folder, "another") == []
