"""Writes a case that fails as a test of its own, of fewer than 40 lines, which `pytest FILE` runs as it is."""

from pathlib import Path

from .cases import Case

TESTS = Path(__file__).parents[1]
WIDTH = 120  # of a line

TEMPLATE = '''"""Found by `make fuzz ARGS="--seed {seed} --cases 1 --world {world_size} --how {how}"`, and shrunk.

{said}
"""

{path}from pathlib import Path

from fuzz.cases import Case, Node, Step  # noqa: F401  (the case may lack one of them)
from fuzz.run import compare
from gloo.ranks import Ranks

{case}


def test_case(tmp_path: Path) -> None:
    """The sharded model trains as one process that plays all ranks."""
    ranks = Ranks({world_size}, tmp_path, limit={limit})
    try:
        assert ranks.run(compare, CASE, "{how}") == [None] * {world_size}
    finally:
        ranks.stop()
'''


def write_test(path: Path, case: Case, failure: str, *, seed: int, world_size: int, how: str, limit: float) -> None:
    """Write a test that fails while `case` does.

    Args:
        path: of the new file; outside of `tests` the file says where these modules are.
        case: shrunk.
        failure: what went wrong; the line of it that says most is in the file's docstring.
        seed, world_size, how: of the run that drew the case.
        limit: seconds that it may take, start included.
    """
    inside = path.resolve().is_relative_to(TESTS)
    where = "" if inside else f"import sys\n\nsys.path.insert(0, {str(TESTS)!r})\n\n"
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    said = next((line for line in lines if "Error" in line.split(":")[0] or ": differs by" in line), lines[-1])
    said = said.replace("\\", "/").replace('"', "'")[:WIDTH]
    named = {"seed": seed, "world_size": world_size, "how": how, "limit": limit, "path": where, "said": said}
    path.write_text(TEMPLATE.format(case=wrapped(f"CASE = {case}  # fmt: skip"), **named))


def wrapped(statement: str) -> str:
    """`statement`, with a printed case, in lines that are broken between arguments."""
    lines = [""]
    for argument in statement.split(", "):
        if len(lines[-1]) + len(argument) >= WIDTH:
            lines.append("    ")
        lines[-1] += f"{argument}, "
    return "\n".join(line.rstrip() for line in lines).removesuffix(",")
