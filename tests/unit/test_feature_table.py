"""docs/features.md, the rows that are tested, and the results of the tests fit."""

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
