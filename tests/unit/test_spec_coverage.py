"""The table of what is tested against the specification is up to date, and its tool notices what is wrong."""

import re
import runpy
from pathlib import Path
from typing import Any

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


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Three statements: one cited by a range in a docstring and in a comment, one left out."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "specification.md").write_text("| E-A-1 | one |\n| E-A-2 | two |\n| E-B-1 | three |\n")
    (tmp_path / "tests" / "spec_left_out.toml").write_text('"E-B-1" = "later"\n')
    write_test(tmp_path, '    """Holds (E-A-1..2)."""\n    pass  # E-A-2 again\n')
    return tmp_path


def write_test(folder: Path, body: str) -> None:
    (folder / "tests" / "test_x.py").write_text(f"def test_it():\n{body}")


def run(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    return TOOL["main"](arguments, folder), capsys.readouterr()


def test_written_then_checked(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was written passes the check; after a test has lost its citation it does not."""
    assert run(["--check"], small, capsys)[0] == 1
    status, printed = run([], small, capsys)
    assert status == 0 and printed.out.startswith("2 of 3 statements have a test (66.7%), 1 are left out")
    table = (small / "tests" / "spec_coverage.md").read_text()
    assert "| E-A-2 | `test_x.py::test_it` |" in table and "| E-B-1 | later |" in table
    assert run(["--check"], small, capsys)[0] == 0
    write_test(small, '    """Holds (E-A-1)."""\n')
    status, printed = run(["--check"], small, capsys)
    assert status == 1 and "out of date" in printed.err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('    """E-A-9"""\n', "E-A-9: expected an id of docs/specification.md"),
        ('    """E-B-1"""\n', "E-B-1: expected a test or a reason, found both"),
    ],
)
def test_contradictions(small: Path, capsys: pytest.CaptureFixture[str], body: str, message: str) -> None:
    """An unknown id, and an id that is tested and left out, are errors whether or not the table is up to date."""
    write_test(small, body)
    status, printed = run([], small, capsys)
    assert status == 1 and message in printed.err


def test_strings_are_no_citations(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only docstrings and comments of tests count: not other strings, and not helpers."""
    write_test(small, '    assert "E-A-1"\n\ndef helper():\n    """E-A-2"""\n')
    assert run([], small, capsys)[1].out.startswith("0 of 3")
