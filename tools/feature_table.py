"""The table of docs/features.md, from what tests/gloo/test_feature_table.py found: `make features` writes it.

    tests/feature_results.json    for each row and executor the tolerance that held, or null

With --check nothing is written; the exit status is 1 if the page is out of date or a row is not green.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = "docs/features.md"
BEGIN, END = "<!-- features: written by `make features` -->\n", "<!-- end of features -->\n"
EXECUTORS = {"eager": "eager", "aot_eager": "`aot_eager`", "called": "a compiled caller", "inductor": "Inductor"}

Results = dict[str, dict[str, float | None]]


def cell(tolerance: float | None) -> str:
    """What a row says of one executor."""
    if tolerance is None:
        return "**fails**"
    return f"✓ {tolerance:.0e}".replace("e-0", "e-") if tolerance else "✓ bit for bit"


def render(results: Results) -> str:
    """The table."""
    rows = [["feature", *EXECUTORS.values()], ["---"] * (1 + len(EXECUTORS))]
    rows += [[name, *(cell(found.get(how)) for how in EXECUTORS)] for name, found in results.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def replaced(text: str, table: str) -> str:
    """The page with `table` between the two lines."""
    before, found, rest = text.partition(BEGIN)
    _, also_found, after = rest.partition(END)
    if not (found and also_found):
        raise ValueError(f"{PAGE}: expected the lines {BEGIN.strip()} and {END.strip()}, found none; add them")
    return before + BEGIN + table + END + after


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Write the table, or check it; the exit status."""
    results: Results = json.loads((root / "tests" / "feature_results.json").read_text())
    page, errors = root / PAGE, []
    text = page.read_text()
    if arguments == ["--check"]:
        fails = [f"{name}, {how}" for name, found in results.items() for how in EXECUTORS if found.get(how) is None]
        errors += [f"{each}: expected a green row, found that it fails" for each in fails]
        if replaced(text, render(results)) != text:
            errors.append(f"{PAGE}: expected what the results say, found it out of date; run `make features`")
    elif arguments:
        errors = [f"expected --check or nothing, found {' '.join(arguments)}"]
    else:
        page.write_text(replaced(text, render(results)))
    for error in errors:
        print(f"feature_table: error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
