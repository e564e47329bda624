"""Which statements of the eager runtime's specification have a test: `make spec` writes tests/spec_coverage.md.

    docs/specification.md       every id with what it requires, as rows of tables
    tests/spec_left_out.toml    ids without a test, by id or range: the reason
    tests/**/test_*.py          a test proves the ids that its docstring or its comments name: E-PG-1, 11..13

With --check nothing is written; the exit status is 1 if the file is out of date or an id is unknown or contradicts.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SPECIFICATION = "docs/specification.md"
ID = re.compile(r"\bE-([A-Z]+)-((?:\d+(?:\.\.\d+)?)(?:, \d+(?:\.\.\d+)?(?=[,.;:)\s]|$))*)")


class Coverage(NamedTuple):
    """What the three sources say."""

    ids: list[str]  # in the specification's order
    tests: dict[str, list[str]]  # id -> tests that cite it
    reasons: dict[str, str]  # id -> why it has no test
    errors: list[str]


def ids_in(text: str) -> list[str]:
    """Ids that a text names, lists and ranges written out."""
    spans = [(topic, span.split("..")) for topic, listed in ID.findall(text) for span in listed.split(", ")]
    return [f"E-{topic}-{number}" for topic, span in spans for number in range(int(span[0]), int(span[-1]) + 1)]


# --- reading ----------------------------------------------------------------------------------------------------------


def read_ids(root: Path) -> list[str]:
    """All ids, in the specification's order."""
    return re.findall(r"^\| (E-[A-Z]+-\d+) \|", (root / SPECIFICATION).read_text(), re.MULTILINE)


def read_reasons(root: Path) -> dict[str, str]:
    """Reason by id."""
    left_out = tomllib.loads((root / "tests" / "spec_left_out.toml").read_text())
    return {spec_id: reason for span, reason in left_out.items() for spec_id in ids_in(span)}


def read_tests(root: Path) -> dict[str, list[str]]:
    """Tests by id."""
    tests_folder, tests = root / "tests", dict[str, list[str]]()
    for path in sorted(tests_folder.rglob("test_*.py")):
        for name, text in cited_texts(path.read_text()):
            for spec_id in dict.fromkeys(ids_in(text)):
                tests.setdefault(spec_id, []).append(f"{path.relative_to(root / 'tests').as_posix()}::{name}")
    return tests


def cited_texts(source: str) -> Iterator[tuple[str, str]]:
    """Name of each test function, and its docstring and comments."""
    comments = list(comments_of(source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            inside = [text for line, text in comments if first <= line <= (node.end_lineno or first)]
            yield node.name, "\n".join([ast.get_docstring(node) or "", *inside])


def comments_of(source: str) -> Iterable[tuple[int, str]]:
    """Line and text of each comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return ((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)


def collect(root: Path) -> Coverage:
    """All three sources, and where they contradict each other."""
    ids, tests, reasons = read_ids(root), read_tests(root), read_reasons(root)
    cited = {i: ", ".join(proofs) for i, proofs in tests.items()} | dict.fromkeys(reasons, "spec_left_out.toml")
    errors = [f"{i}: expected an id of {SPECIFICATION}, found it in {cited[i]}" for i in cited if i not in ids]
    errors += [f"{i}: expected one row in {SPECIFICATION}, found several" for i in set(ids) if ids.count(i) > 1]
    both = [i for i in tests if i in reasons]
    errors += [f"{i}: expected a test or a reason, found both; take it out of spec_left_out.toml" for i in both]
    return Coverage(ids, tests, reasons, errors)


# --- writing ----------------------------------------------------------------------------------------------------------


def summary(coverage: Coverage) -> str:
    """How much is covered."""
    counted = len(coverage.ids)
    tested = sum(i in coverage.tests for i in coverage.ids)
    reasoned = sum(i in coverage.reasons for i in coverage.ids)
    left = counted - tested - reasoned
    return (
        f"{tested} of {counted} statements have a test ({tested / counted:.1%}), {reasoned} are left out with a "
        f"reason, {left} are open"
    )


def render(coverage: Coverage) -> str:
    """The table."""
    lines = ["<!-- Written by tools/spec_coverage.py: run `make spec`. -->", "", "# Coverage of the specification", ""]
    lines += [
        f"{summary(coverage)}. What each id requires is in [the specification](../docs/specification.md).",
        "",
        "| id | tests, or why there is none |",
        "| --- | --- |",
    ]
    for spec_id in coverage.ids:
        proof = "<br>".join(f"`{test}`" for test in coverage.tests.get(spec_id, ()))
        lines.append(f"| {spec_id} | {proof or coverage.reasons.get(spec_id, '**open**')} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Write the table, or check it; the exit status."""
    coverage, target = collect(root), root / "tests" / "spec_coverage.md"
    errors, text = coverage.errors, render(coverage)
    if arguments == ["--check"]:
        if not target.exists() or target.read_text() != text:
            errors.append(
                f"{target.name}: expected what the tests and lists say, found it out of date; run `make spec`"
            )
    elif arguments:
        errors = [f"expected --check or nothing, found {' '.join(arguments)}"]
    elif not errors:
        target.write_text(text)
    for error in errors:
        print(f"spec_coverage: error: {error}", file=sys.stderr)
    print(summary(coverage))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
