"""Training scripts written for torch's FSDP run on this package after a change of one import line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import fsdp_compile

STOCK = Path(__file__).parents[2] / "stock"
STEPS = 10
IMPORT_LINE = re.compile(r"^from torch\.distributed\.fsdp import (?=FullyShardedDataParallel as FSDP)", re.MULTILINE)


class Script(NamedTuple):
    """A training script, and how closely the losses of both runs agree."""

    name: str
    ranks: int
    tolerance: float  # relative


SCRIPTS = {
    script.name: script
    for script in (
        Script("wrap_policy_bf16", 2, 2e-2),
        Script("hybrid_clip_schedule", 4, 1e-4),
        Script("lora_checkpointing", 2, 1e-4),
    )
}


def ported(text: str) -> str:
    """The script with this package's name in its import line."""
    changed, count = IMPORT_LINE.subn("from fsdp_compile import ", text)
    assert count == 1, f"expected one line that imports from torch.distributed.fsdp, found {count}"
    return changed


def printed(path: Path, ranks: int) -> list[dict[str, float]]:
    """Run a script under torchrun on the CPU; what its rank 0 printed, step by step."""
    package = str(Path(fsdp_compile.__file__).parents[1])
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": package}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(path)]
    run = subprocess.run(launcher, env=os.environ | environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, f"{path.name} ended with {run.returncode}:\n{run.stderr[-4000:]}"
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def figures(run: list[dict[str, float]], key: str) -> list[float]:
    """One figure over the steps."""
    assert [step["step"] for step in run] == list(range(STEPS)), f"expected steps 0 to {STEPS - 1}, found {run}"
    return [step[key] for step in run]


@pytest.mark.nightly  # test_fsdp2_scripts.py compares scripts with torch's every day
@pytest.mark.parametrize("name", SCRIPTS)
def test_stock_scripts_with_our_import_line(name: str, tmp_path: Path) -> None:
    """With one import line changed the scripts print the same losses, which fall, and gradient norms where they clip.

    So gradients are means over replicas too (E-GEN-2), and frozen and trainable parameters mix in a unit (E-FRZ-1).
    """
    script, path = SCRIPTS[name], tmp_path / f"{name}.py"
    expected = printed(STOCK / path.name, script.ranks)
    losses = figures(expected, "loss")
    assert min(losses[-3:]) < 0.9 * losses[0], losses
    path.write_text(ported((STOCK / path.name).read_text()))
    found = printed(path, script.ranks)
    for key in expected[0].keys() - {"step"}:
        assert figures(found, key) == pytest.approx(figures(expected, key), rel=script.tolerance)
