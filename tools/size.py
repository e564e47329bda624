"""Lines per file and the longest functions of the repository: `make size`."""

import ast
import subprocess
from pathlib import Path

FOLDERS = ("fsdp_compile", "tests", "bench", "examples")
LONGEST = 15


def files(folder: str) -> list[Path]:
    """Python files of a folder that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{folder}/*.py"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in map(Path, sorted(set(listed))) if path.exists()]


def lines(path: Path) -> int:
    """Lines of a file, as wc counts them."""
    return path.read_text().count("\n")


def functions(path: Path) -> list[tuple[int, str]]:
    """Length and place of every function in a file, from its `def` to its last line."""
    nodes = ast.walk(ast.parse(path.read_text()))
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(node.end_lineno - node.lineno + 1, f"{path}:{node.lineno} {node.name}") for node in found]


def main() -> None:
    """Print one block per folder with its total, then the longest functions."""
    by_folder = {folder: files(folder) for folder in FOLDERS}
    for folder, paths in by_folder.items():
        print(f"{sum(map(lines, paths)):6} {folder}")
        for path in paths:
            print(f"{lines(path):6}   {path}")
    every = [path for paths in by_folder.values() for path in paths]
    print(f"{sum(map(lines, every)):6} in all\n\nlongest functions")
    for length, place in sorted((found for path in every for found in functions(path)), reverse=True)[:LONGEST]:
        print(f"{length:6}   {place}")


if __name__ == "__main__":
    main()
