"""The table of what is tested against the specification is up to date."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "spec_coverage.py"))


def test_the_table_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """spec_coverage.md says what the tests cite, and no test cites an id that does not exist: else `make spec`."""
    assert TOOL["main"](["--check"]) == 0, capsys.readouterr().err


def test_an_accelerator_is_needed_for_no_statement() -> None:
    """What is proven is proven in one process or on gloo ranks; tests on a GPU come on top (E-TEST-1)."""
    rows = re.findall(r"^\| (E-\S+) \| (`.*`) \|$", (ROOT / "tests" / "spec_coverage.md").read_text(), re.MULTILINE)
    only = [spec_id for spec_id, proofs in rows if all(proof.startswith("`gpu/") for proof in proofs.split("<br>"))]
    assert len(rows) > 100 and not only
