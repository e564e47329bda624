"""tools/mutate.py changes what computes, and leaves alone what only speaks."""

import ast
import runpy
from pathlib import Path

import fsdp_compile

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "mutate.py"))
SOURCE = '''"""A text 1 + 1."""

def f(x: int = 3) -> bool:
    """Another one."""
    if x < 2 and not x:
        warn("1 + 1")
        raise ValueError(f"x is {x + 1}")
    g(x, strict=True)
    return x + 1 is True
'''
CHANGED = {
    ("3", "4"), ("x < 2 and not x", "(not (x < 2 and not x))"), (" < ", " <= "), ("2", "3"), (" and ", " or "),
    ("not x", "x"), ("g(x, strict=True)", "pass"), (" + ", " - "), ("1", "2"), (" is ", " is not "), ("True", "False"),
}  # fmt: skip


def test_what_is_changed(tmp_path: Path) -> None:
    """Operators, numbers, conditions and calls; not annotations, docstrings, warnings, `strict` or what is raised."""
    path = tmp_path / "code.py"
    path.write_text(SOURCE)
    mutants = TOOL["_Finder"](path, path.read_bytes()).mutants()
    assert {(mutant.old, mutant.new) for mutant in mutants} == CHANGED and len(mutants) == len(CHANGED)
    for mutant in mutants:
        text = SOURCE.encode()
        compile(text[: mutant.begin] + mutant.new.encode() + text[mutant.end :], "code", "exec")


def test_each_file_of_the_runtime_and_the_passes_has_tests() -> None:
    """Those of core, eager and passes are in the table, and what it names exists."""
    package = Path(fsdp_compile.__file__).parent
    files = {str(path.relative_to(package)) for path in package.rglob("*.py") if _has_code(path)}
    nearest: dict[str, str] = TOOL["nearest"]()
    assert {path for path in files if path.startswith(("core/", "eager/", "passes/"))} <= nearest.keys() <= files
    tests = {test.partition("::") for listed in nearest.values() for test in listed.split()}
    assert [name for path, _, name in tests if f"def {name}" not in (package.parent / path).read_text()] == []


def _has_code(path: Path) -> bool:
    return any(isinstance(each, ast.FunctionDef | ast.ClassDef) for each in ast.parse(path.read_text()).body)
