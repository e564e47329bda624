"""The examples of frameworks train as one process does, through a checkpoint."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
EXAMPLES = {"lightning_fabric": "lightning", "lightning_trainer": "lightning", "accelerate_loop": "accelerate"}
ALSO_ALONE = {
    "transformers_trainer": "accelerate",
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
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install -e '.[frameworks]'")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    path = ROOT / "examples" / "frameworks" / f"{name}.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(path)]
    run = subprocess.run(launcher, env=environment, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr[-4000:]
    found: list[float] = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("[")))
    return found
