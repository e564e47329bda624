"""`fsdp-compile compare` with processes."""

import json
from pathlib import Path

import pytest

from fsdp_compile.tools.cli import main

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 16), nn.Parameter(torch.tensor(SCALE))

    def forward(self, x):
        return x + self.scale * self.linear(x)


def make():
    print("the user's own words")
    return nn.Sequential(*(Block() for _ in range(2)))


def example_inputs(batch, sequence):
    return (torch.randn(batch, WIDTH),)
"""


def write(tmp_path: Path, scale: str = "[1.0]", width: int = 16) -> str:
    (tmp_path / "model.py").write_text(MODEL.replace("SCALE", scale).replace("WIDTH", str(width)))
    return f"{tmp_path}/model.py:make"


@pytest.mark.nightly
def test_two_systems_on_two_ranks(tmp_path: Path) -> None:
    """Each has a row with its figures, in the JSON; losses are the same."""
    asked = ["--systems", "eager,fsdp2", "--steps", "3", "--rounds", "2", "--batch", "3"]
    written = ["--json", str(tmp_path / "out.json")]
    assert main(["compare", write(tmp_path), "--device", "cpu", "--ranks", "2", *asked, *written]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    eager, fsdp2 = found["rows"]
    assert eager["failed"] is fsdp2["failed"] is None and found["where"]["ranks"] == 2
    assert len(eager["losses"]) == 3 + 2 + 1 + 1 and fsdp2["apart"] < 1e-5
    assert all(row[name] > 0 for row in (eager, fsdp2) for name in ("peak", "predicted", "first", "low", "high"))
    assert eager["unit"] == "samples" and eager["speed"] == pytest.approx(6 / eager["step"])


@pytest.mark.nightly
def test_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A system that cannot do the model says why in its row, as FSDP2 of a parameter without dimensions. A forward that
    fails is one line.
    """
    asked = ["--device", "cpu", "--ranks", "1", "--steps", "1"]
    assert main(["compare", write(tmp_path, scale="1.0"), *asked, "--systems", "fsdp2,eager"]) == 0
    printed = capsys.readouterr().out
    assert "fsdp2 failed: ValueError: " in printed and "scalar" in printed and "\neager  " in printed
    assert main(["compare", write(tmp_path, width=9), *asked, "--systems", "eager"]) == 2
    [line] = [each for each in capsys.readouterr().err.splitlines() if each.startswith("fsdp-compile: error: ")]
    assert "no system can train it: RuntimeError: mat1 and mat2 shapes cannot be multiplied" in line
