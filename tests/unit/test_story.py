"""The story: the files of the runtime and the passes, which layers build on and which name none of these."""

import ast
from pathlib import Path
from typing import Any

import pytest
import tool

ROOT = Path(__file__).parents[2]
GROUND = ("fsdp_compile/comm/", "fsdp_compile/tensors/", "fsdp_compile/config.py")
"""What the story may read beside itself."""

ARROWS = {
    ("eager/reduce.py", "eager/accumulate.py"),
}
"""From files of the story to layers that they name: fewer with time, and never more."""


SIZE: Any = tool.load("size")
FILES = SIZE.modules(SIZE.today())


def _arrows(path: str, tree: ast.Module) -> set[tuple[str, str]]:
    layers = {other for other in SIZE.imported(tree, FILES) if other not in SIZE.STORY and not other.startswith(GROUND)}
    return {(path.removeprefix("fsdp_compile/"), other.removeprefix("fsdp_compile/")) for other in layers}


def test_the_story_names_no_more_layers() -> None:
    """Each import of a layer by a file of the story is in `ARROWS`, and what is gone has left it."""
    found = [_arrows(path, ast.parse((ROOT / path).read_text())) for path in SIZE.STORY]
    assert set().union(*found) == ARROWS


@pytest.mark.parametrize(
    "code",
    [
        "from fsdp_compile.edits.writeback import refresh",
        "def later():\n    import fsdp_compile.edits.writeback",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fsdp_compile.edits import writeback",
    ],
)
def test_an_arrow_is_found(code: str) -> None:
    """At the top of a file, in a function, for type checkers alone."""
    path = "fsdp_compile/eager/unsharded.py"
    assert _arrows(path, ast.parse(f"{(ROOT / path).read_text()}\n{code}")) == {
        ("eager/unsharded.py", "edits/writeback.py")
    }
