"""Lines of the repository and their limits: `make size` prints them, `--check` fails where one is exceeded.

The story is the runtime and the passes: what gathers, reduces, traces and orders. It, what it imports, and all that
ships have limits that go down only. Each function has a limit beside its docstring.

    make size                             the limits, a line for each folder, the longest files and functions
    python tools/size.py --check          the exit status is 1 if anything exceeds its limit
    python tools/size.py --against v0.1.0 the lines of each folder at another commit beside those of today
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "fsdp_compile"
FUNCTION_LINES = 90
LIMITS = {
    "the story": 9_934,
    "the story and what it imports": 13_909,
    PACKAGE: 34_962,
    "tests": 42_687,
    "bench": 4_734,
    "docs, README, change log": 5_139,
}
"""Lines that there may be. A commit that makes room lowers a limit; nothing raises one."""

STORY = tuple(
    f"{PACKAGE}/{folder}/{name}.py"
    for folder, names in {
        "core": "layout ops flat_collectives inner_params autograd backward_pass flat_param unit sharding settings "
        "traced_writes exact_sums _torch __init__",
        "construct": "blocks prepare units __init__",
        "eager": "forward forward_pass runtime unsharded block_reader streams reduce casting __init__",
        "passes": "pipeline hooks _torch",
        "passes/joint": "insert_collectives reshard __init__",
        "passes/graph": "nodes work analyze lifetimes __init__",
        "passes/plan": "workload plan schedule __init__",
        "passes/post_grad": "plan_by_rule order in_place_grads lower_collectives __init__",
    }.items()
    for name in names.split()
)
"""The files of the story, as one would read them. Layers are the other files of these folders, and other folders."""

PLACES = (
    f"{PACKAGE}/*.py",
    *(f"{PACKAGE}/{folder}" for folder in ("core", "comm", "construct", "eager", "optim", "passes", "state_dict")),
    *(f"{PACKAGE}/{folder}" for folder in ("checkpoint", "explain", "compare", "tools", "integrations")),
)
"""What `make size` shows: a folder with all that lies below it; `*.py` is what lies in no folder."""

Texts = dict[str, str]  # path -> text of the Python files and the documents


def today() -> Texts:
    """The files that git tracks or would track."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md").splitlines()
    return {path: (ROOT / path).read_text() for path in sorted(set(listed)) if (ROOT / path).exists()}


def at(commit: str) -> Texts:
    """The files of a commit."""
    listed = git("ls-tree", "-r", "--name-only", commit).splitlines()
    return {path: git("show", f"{commit}:{path}") for path in listed if path.endswith((".py", ".md"))}


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def within(path: str, place: str) -> bool:
    """Whether a file lies in a place of `PLACES`."""
    folder, _, pattern = place.partition("/*")
    return path.startswith(f"{folder}/") and not (pattern and "/" in path[len(folder) + 1 :])


def measure(texts: Texts, place: str) -> tuple[int, int]:
    """Lines, as wc counts them, and files of a place."""
    found = [text for path, text in texts.items() if within(path, place) and path.endswith(".py")]
    return sum(text.count("\n") for text in found), len(found)


def functions(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Lines and place of every function of a file, from its `def` to its last line, without its docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            yield lines, f"{path}:{node.lineno} {node.name}"


def modules(texts: Texts) -> dict[str, str]:
    """The package's files by the names under which they are imported, but for what only joins others."""
    paths = [path for path in texts if within(path, PACKAGE) and path.endswith(".py")]
    return {path[:-3].replace("/", "."): path for path in paths if not path.endswith("/__init__.py")}


def imported(tree: ast.Module, known: dict[str, str]) -> Iterator[str]:
    """The files of `known` that a file imports, also in functions and for type checkers."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (known[name] for name in names if name in known)


def with_imported(texts: Texts) -> set[str]:
    """The files of the story, what they import, what that imports, and so on."""
    known, found = modules(texts), {path for path in STORY if path in texts}
    left = [*found]
    while left:
        new = {*imported(ast.parse(texts[left.pop()]), known)} - found
        found |= new
        left += new
    return found


def totals(texts: Texts) -> dict[str, tuple[int, int]]:
    """Lines and files of what has a limit, by its name in `LIMITS`."""
    found: dict[str, Iterable[str]] = {
        "the story": [path for path in STORY if path in texts],
        "the story and what it imports": with_imported(texts),
        **{place: [path for path in texts if within(path, place) and path.endswith(".py")]
           for place in (PACKAGE, "tests", "bench")},
        "docs, README, change log": [path for path in texts if path == "README.md" or within(path, "docs")],
    }  # fmt: skip
    lines = {name: sum(texts[path].count("\n") for path in paths) for name, paths in found.items()}
    unreleased = re.search(r"^## Unreleased\n.*?(?=^## |\Z)", texts.get("CHANGELOG.md", ""), re.MULTILINE | re.DOTALL)
    lines["docs, README, change log"] += unreleased[0].count("\n") if unreleased else 0
    return {name: (lines[name], len({*paths})) for name, paths in found.items()}


def excesses(texts: Texts) -> list[str]:
    """What exceeds its limit, a line each, and files of the story that are gone."""
    found = [f"{path}: in the list STORY, but there is no such file" for path in STORY if path not in texts]
    found += [f"{name}: {lines:,} lines, the limit is {LIMITS[name]:,}; make room there"
              for name, (lines, _) in totals(texts).items() if lines > LIMITS[name]]  # fmt: skip
    package = {path: text for path, text in texts.items() if within(path, PACKAGE) and path.endswith(".py")}
    lengths = (each for path, text in package.items() for each in functions(path, text))
    found += [f"{place}: {lines} lines, a function may have {FUNCTION_LINES}"
              for lines, place in lengths if lines > FUNCTION_LINES]  # fmt: skip
    return found


def show(texts: Texts, before: Texts | None) -> None:
    """Print the table of folders, then the longest files and functions."""
    print(f"{'':32}{'lines':>8}{'limit':>8}{'files':>7}" + (f"{'before':>10}{'files':>7}" if before else ""))
    earlier = totals(before) if before else {}
    for name, (lines, files) in totals(texts).items():
        row = f"{name:32}{lines:8,}{LIMITS[name]:8,}{files:7}"
        print(row + ("{:10,}{:7}".format(*earlier[name]) if before else ""))
    places = [*PLACES, *(f"{PACKAGE}/passes/{name}" for name in ("*.py", *passes(texts))), "examples", "tools"]
    for place in places:
        lines, files = measure(texts, place)
        row = f"{place:32}{lines:8,}{'':8}{files:7}"
        print(row + ("{:10,}{:7}".format(*measure(before, place)) if before else ""))
    package = {path: text for path, text in texts.items() if within(path, PACKAGE) and path.endswith(".py")}
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
    parser.add_argument("--check", action="store_true", help="say what exceeds its limit, and nothing else")
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
