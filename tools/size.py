"""Lines of the repository and their budget: `make size` prints them, `--check` fails where a budget is exceeded.

Every folder of the package has a budget of lines, the whole package one of lines and of files, and each function one of
lines beside its docstring. To raise a number is a commit of its own, which says what it buys.

    make size                             a line for each folder, then the longest files and functions
    python tools/size.py --check          the exit status is 1 if anything exceeds its budget
    python tools/size.py --against v0.1.0 the lines of each folder at another commit beside those of today
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "fsdp_compile"
FUNCTION_LINES = 90
FILES = 132
BUDGET = {
    PACKAGE: 33_708,
    f"{PACKAGE}/*.py": 3_962,
    f"{PACKAGE}/core": 5_846,
    f"{PACKAGE}/comm": 1_700,
    f"{PACKAGE}/construct": 1_287,
    f"{PACKAGE}/eager": 3_863,
    f"{PACKAGE}/optim": 1_626,
    f"{PACKAGE}/passes": 8_588,
    f"{PACKAGE}/state_dict": 1_264,
    f"{PACKAGE}/checkpoint": 1_655,
    f"{PACKAGE}/explain": 2_590,
    f"{PACKAGE}/compare": 956,
    f"{PACKAGE}/integrations": 371,
    "bench": 5_642,
}
"""Lines of a folder with all that lies below it; `*.py` is what lies in no folder.

The aim is 24,500 lines in 105 files, and 4,200 in bench: a commit that makes a folder smaller lowers its number."""

Texts = dict[str, str]  # path -> text of the Python files


def today() -> Texts:
    """The files that git tracks or would track."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").splitlines()
    return {path: (ROOT / path).read_text() for path in sorted(set(listed)) if (ROOT / path).exists()}


def at(commit: str) -> Texts:
    """The files of a commit."""
    listed = git("ls-tree", "-r", "--name-only", commit).splitlines()
    return {path: git("show", f"{commit}:{path}") for path in listed if path.endswith(".py")}


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def within(path: str, place: str) -> bool:
    """Whether a file lies in a place of `BUDGET`."""
    folder, _, pattern = place.partition("/*")
    return path.startswith(f"{folder}/") and not (pattern and "/" in path[len(folder) + 1 :])


def measure(texts: Texts, place: str) -> tuple[int, int]:
    """Lines, as wc counts them, and files of a place."""
    found = [text for path, text in texts.items() if within(path, place)]
    return sum(text.count("\n") for text in found), len(found)


def functions(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Lines and place of every function of a file, from its `def` to its last line, without its docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            yield lines, f"{path}:{node.lineno} {node.name}"


def excesses(texts: Texts) -> list[str]:
    """What exceeds its budget, a line each."""
    found = [
        f"{place}: {lines:,} lines, the budget is {budget:,}"
        for place, budget in BUDGET.items()
        if (lines := measure(texts, place)[0]) > budget
    ]
    if (files := measure(texts, PACKAGE)[1]) > FILES:
        found.append(f"{PACKAGE}: {files} files, the budget is {FILES}")
    package = {path: text for path, text in texts.items() if within(path, PACKAGE)}
    lengths = (each for path, text in package.items() for each in functions(path, text))
    found += [f"{place}: {lines} lines, a function may have {FUNCTION_LINES}"
              for lines, place in lengths if lines > FUNCTION_LINES]  # fmt: skip
    return found


def show(texts: Texts, before: Texts | None) -> None:
    """Print the table of folders, then the longest files and functions."""
    print(f"{'':26}{'lines':>8}{'budget':>8}{'files':>7}" + (f"{'before':>10}{'files':>7}" if before else ""))
    places = [*BUDGET, *(f"{PACKAGE}/passes/{name}" for name in ("*.py", *passes(texts))), "tests", "examples", "tools"]
    for place in places:
        lines, files = measure(texts, place)
        row = f"{place:26}{lines:8,}{BUDGET.get(place, ''):8}{files:7}"
        print(row + ("{:10,}{:7}".format(*measure(before, place)) if before else ""))
    package = {path: text for path, text in texts.items() if within(path, PACKAGE)}
    longest("files", ((text.count("\n"), path) for path, text in package.items()))
    longest("functions", (each for path, text in package.items() for each in functions(path, text)))


def passes(texts: Texts) -> list[str]:
    """The folders of passes/."""
    prefix = f"{PACKAGE}/passes/"
    return sorted({path[len(prefix) :].split("/")[0] for path in texts if path.startswith(prefix) and
                   "/" in path[len(prefix) :]})  # fmt: skip


def longest(name: str, found: Iterator[tuple[int, str]], number: int = 10) -> None:
    """Print the longest of the package."""
    print(f"\nlongest {name}")
    for lines, place in sorted(found, reverse=True)[:number]:
        print(f"{lines:6}   {place}")


def main() -> int:
    """Print or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="say what exceeds its budget, and nothing else")
    parser.add_argument("--against", metavar="COMMIT", help="also show the lines of this commit")
    asked = parser.parse_args()
    if asked.check:
        found = excesses(today())
        print("\n".join(found), file=sys.stderr)
        return bool(found)
    show(today(), at(asked.against) if asked.against else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
