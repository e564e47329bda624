"""torchtitan's trainer by this package beside its FSDP2: `python tests/titan.py` prints the same as a table."""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import titan

try:
    WHY_NOT = "" if version("torchtitan") >= "0.3" else "torchtitan is older than 0.3"
except PackageNotFoundError:
    WHY_NOT = "torchtitan is not installed"
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.timeout(900)]
REFUSED = {  # layout and system: part of the message
    ("TP, spmd_types", "eager"): "dp_mesh_dims leaves tp of 2 ranks",
    ("TP, spmd_types", "blocks"): "dp_mesh_dims leaves tp of 2 ranks",
    ("TP, spmd_types", "whole"): "dp_mesh_dims leaves tp of 2 ranks",
}


@pytest.mark.parametrize(("feature", "layout", "systems"), [*titan.rows()])
def test_equal_to_fsdp2(feature: str, layout: str, systems: Sequence[str]) -> None:
    """Four steps have FSDP2's losses and norms, bit for bit but for bf16 and Inductor, or are refused by name."""
    expected = titan.reference(feature, layout)
    for system in systems:
        cell = titan.Cell(system, feature, layout)
        found = titan.run(cell)
        if (layout, system) in REFUSED:
            assert REFUSED[layout, system] in found.failed
        else:
            assert titan.difference(cell, found, expected) == ""


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("saves", "loads"), [("fsdp2", "eager"), ("eager", "fsdp2"), ("whole", "fsdp2")])
def test_resume_by_the_other_system(saves: str, loads: str, asynchronous: bool, tmp_path: Path) -> None:
    """What one system has saved on two ranks the other resumes, on two ranks with the bits of an uninterrupted run, on
    four with its losses."""
    folder = str(tmp_path / "saved")
    whole = titan.run(titan.Cell("fsdp2"))
    first = titan.run(titan.Cell(saves, steps=2, saves=folder, asynchronous=asynchronous))
    assert first.losses == whole.losses[:2], first.failed
    on_four = titan.run(titan.Cell(loads, ranks=4, saves=folder, resumes=True))
    assert on_four.losses == pytest.approx(whole.losses[2:], rel=1e-5), on_four.failed
    resumed = titan.run(titan.Cell(loads, saves=folder, resumes=True))
    assert resumed.losses == whole.losses[2:], resumed.failed


DEBUG = """
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import *

def debug():
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.local_batch_size, config.training.seq_len = 2, 64
    return config
"""


def test_compare_takes_a_config(tmp_path: Path) -> None:
    """`compare --torchtitan` trains the model of a config, with its batch, alike by this package and by FSDP2."""
    (tmp_path / "debug_titan.py").write_text(DEBUG)
    command = [sys.executable, "-m", "fsdp_compile", "compare", "--torchtitan", "debug_titan:debug", "--ranks", "2"]
    command += ["--systems", "eager,fsdp2,fsdp2-compiled", "--steps", "1", "--rounds", "1", "--json", "out.json"]
    environment = titan.environment(str(tmp_path))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["system"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert rows["eager"]["unit"] == "tokens" and 8 < rows["eager"]["losses"][0] < 8.5  # of 2048 tokens
    assert rows["fsdp2"]["apart"] < 1e-5 and rows["fsdp2-compiled"]["apart"] < 1e-5
