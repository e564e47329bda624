"""docs/features.md, the rows that are tested, and the results of the tests fit; the tool notices what does not."""

import json
import runpy
from pathlib import Path

import pytest
from features import ROWS

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "feature_table.py"))


def test_the_table_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """The page shows every row that is tested, as its test left it, and every one is green: else `make features`."""
    results = json.loads((ROOT / "tests" / "feature_results.json").read_text())
    assert list(results) == [row.name for row in ROWS], "run tests/gloo/test_feature_table.py, then `make features`"
    assert TOOL["main"](["--check"]) == 0, capsys.readouterr().err


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A page that has the two lines, and one row."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "features.md").write_text(f"before\n{TOOL['BEGIN']}old\n{TOOL['END']}after\n")
    return note(tmp_path, 0.0)


def note(root: Path, bitwise: float | None) -> Path:
    found = {"a row": {"eager": 1e-5, "aot_eager": bitwise, "called": 0.0, "inductor": 2e-2}}
    (root / "tests" / "feature_results.json").write_text(json.dumps(found))
    return root


def test_written_then_checked(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was written passes the check, and nothing around it has changed; a row that fails does not pass."""
    assert TOOL["main"](["--check"], small) == 1 and "out of date" in capsys.readouterr().err
    assert TOOL["main"]([], small) == 0
    text = (small / "docs" / "features.md").read_text()
    assert "| a row | ✓ 1e-5 | ✓ bit for bit | ✓ bit for bit | ✓ 2e-2 |" in text and "old" not in text
    assert text.startswith("before\n<!--") and text.endswith("-->\nafter\n")
    assert TOOL["main"](["--check"], small) == 0
    assert TOOL["main"]([], note(small, None)) == 0 and "| **fails** |" in (small / "docs" / "features.md").read_text()
    assert TOOL["main"](["--check"], small) == 1 and "a row, aot_eager: expected a green row" in capsys.readouterr().err


def test_lines_that_are_missing(small: Path) -> None:
    """Without its two lines the page is left alone."""
    (small / "docs" / "features.md").write_text("before\n")
    with pytest.raises(ValueError, match="expected the lines"):
        TOOL["main"]([], small)
