"""torchtitan's trainer by this package beside its FSDP2; `pytest -s` shows how far they are apart."""

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


@pytest.mark.parametrize(("feature", "layout", "systems"), [*titan.rows()])
def test_equal_to_fsdp2(feature: str, layout: str, systems: Sequence[str]) -> None:
    """Four steps have FSDP2's losses and norms, bit for bit but for bf16 and Inductor, or are refused by name."""
    expected = titan.reference(feature, layout)
    for system in systems:
        cell = titan.Cell(system, feature, layout)
        found = titan.run(cell)
        if layout == "TP, spmd_types":
            assert "dp_mesh_dims leaves tp of 2 ranks" in found.failed
        else:
            assert titan.difference(cell, found, expected) == "", system


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
