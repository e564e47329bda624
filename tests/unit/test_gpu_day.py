"""`tools/gpu_day.py`: what runs on a GPU that is there for a while, within its time, and again where it was cut off."""

import json
import sys
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


def test_parts_are_taken_up_where_they_were_left(gpu_day: ModuleType, tmp_path: Path) -> None:
    """What succeeded does not run again; what failed or was stopped at its limit does, with all that it printed."""

    def part(name: str, text: str, minutes: float = 1.0) -> object:
        return gpu_day.Part(name, minutes, (sys.executable, "-c", text))

    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    sleeping = "import time; print('begun', flush=True); time.sleep(60)"
    todo = [part("good", count), part("bad", f"{count}; raise SystemExit(3)"), part("long", sleeping, 0.02)]
    assert gpu_day.run_all(todo, tmp_path) == 2
    codes = [json.loads((tmp_path / f"{name}.json").read_text())["rc"] for name in ("good", "bad", "long")]
    assert codes == [0, 3, 124]
    assert (tmp_path / "long.log").read_text() == "begun\n"
    assert gpu_day.run_all(todo[:2], tmp_path) == 1 and (tmp_path / "count").read_text() == "xxx"
    (tmp_path / "good.json").write_text("{")
    assert not gpu_day.is_done(tmp_path, todo[0])
