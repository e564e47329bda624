"""tools/mutate.py changes what computes, and leaves alone what only speaks."""

import runpy
from pathlib import Path

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
    mutants = TOOL["_Finder"](path).mutants()
    assert {(mutant.old, mutant.new) for mutant in mutants} == CHANGED and len(mutants) == len(CHANGED)
    for mutant in mutants:
        text = SOURCE.encode()
        compile(text[: mutant.begin] + mutant.new.encode() + text[mutant.end :], "code", "exec")
