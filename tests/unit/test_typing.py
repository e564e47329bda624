"""What type checkers make of the public interface."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_compile

ROOT = Path(fsdp_compile.__file__).parents[1]

SCRIPT = """
import torch
from torch import nn
from typing_extensions import assert_type

from fsdp_compile import FSDPModule, explain_plan, fully_shard


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


net = Net()
model = fully_shard(net)
assert_type(model, FSDPModule)
with model.no_sync():
    loss: torch.Tensor = model(torch.ones(2)).sum()
model.set_requires_gradient_sync(True)
norm: torch.Tensor = model.clip_grad_norm_(1.0)
weight: torch.Tensor = model.layer.weight
torch.optim.SGD(model.parameters(), lr=0.1)
bound: float = explain_plan(model, (torch.ones(2),), link="h100-nvlink").bound
assert_type(net, Net)
"""
MISTAKES = (
    SCRIPT
    + """
model.clip_grad_norm_("1")
fully_shard(net, sharding_strategy=3)
"""
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "right.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(MISTAKES)
    return tmp_path


@pytest.mark.nightly  # reads all of torch: pyright sees the same within seconds
def test_mypy(folder: Path) -> None:
    """A script that uses what `fully_shard` returns as a sharded module passes `mypy --strict`; mistakes are found."""
    options = ["--strict", "--follow-imports=silent", "--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *options]
    done = subprocess.run([*command, "right.py", "wrong.py"], cwd=folder, capture_output=True, text=True,
                          env=os.environ | {"MYPYPATH": str(ROOT)}, timeout=250)  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 2 and all(line.startswith("wrong.py") for line in errors), done.stdout


def test_pyright(folder: Path) -> None:
    """The same for pyright, in the build that PyPI carries whole."""
    pyright = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("basedpyright is not installed")
    paths = [str(ROOT), str(Path(pytest.__file__).parents[1])]
    settings = {"include": ["right.py", "wrong.py"], "typeCheckingMode": "standard", "extraPaths": paths}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run([pyright, "--outputjson"], cwd=folder, capture_output=True, text=True, timeout=250)
    errors = json.loads(done.stdout)["generalDiagnostics"]
    where = {(Path(error["file"]).name, error["range"]["start"]["line"]) for error in errors}
    assert where == {("wrong.py", MISTAKES.count("\n") - 2 + line) for line in range(2)}, errors
