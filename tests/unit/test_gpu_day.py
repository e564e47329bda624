"""`tools/gpu_day.py`: what runs on a GPU that is there for a while, within its time, and again where it was cut off."""

from pathlib import Path
from types import ModuleType

import pytest
import tool

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu_day() -> ModuleType:
    """tools/gpu_day.py."""
    return tool.load("gpu_day")


def test_limits_are_kept_in_all(gpu_day: ModuleType) -> None:
    """All parts together have 40 minutes, each has its name once, and every file that they name is there."""
    parts = gpu_day.parts(seed=3)
    assert sum(part.minutes for part in parts) <= gpu_day.MINUTES == 40
    assert len({part.name for part in parts}) == len(parts)
    named = [word for part in parts for word in part.command if word.startswith("tests/")]
    assert len(named) > 4 and all((ROOT / word).exists() for word in named)
    assert gpu_day.parts(seed=3) == parts != gpu_day.parts(seed=4)
