"""The limit of the story's lines: `tools/size.py --check` sees what exceeds it."""

from pathlib import Path
from types import ModuleType

import pytest
import tool

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def size() -> ModuleType:
    """tools/size.py."""
    return tool.load("size")


def test_what_exceeds_its_limit_is_named(size: ModuleType) -> None:
    """A story with too many lines, a file of it that is gone and a long function are named; layers have no limit."""
    long = "def f():\n" + '    """\n' + "    Text.\n" * 50 + '    """\n' + "    pass\n" * 91
    texts = dict.fromkeys(size.STORY, "") | {"fsdp_compile/comm/a.py": long, "fsdp_compile/comm/b.py": "\n" * 40_000}
    assert size.excesses(texts) == ["fsdp_compile/comm/a.py:1 f: 92 lines, a function may have 90"]
    texts = dict.fromkeys(size.STORY, "")
    texts["fsdp_compile/core/unit.py"] = "\n" * (size.STORY_LINES + 1)
    del texts["fsdp_compile/eager/forward.py"]
    gone, story = size.excesses(texts)
    assert gone == "fsdp_compile/eager/forward.py: in the list STORY, but there is no such file"
    assert story.startswith(f"the story: {size.STORY_LINES + 1:,} lines, the limit is {size.STORY_LINES:,}")


def test_places(size: ModuleType) -> None:
    """A folder counts with what lies below it; `*.py` counts what lies in the folder itself."""
    texts = {"fsdp_compile/api.py": "1\n", "fsdp_compile/passes/plan/plan.py": "1\n2\n", "bench/a.py": ""}
    assert size.measure(texts, "fsdp_compile") == (3, 2)
    assert size.measure(texts, "fsdp_compile/*.py") == (1, 1)
    assert size.measure(texts, "fsdp_compile/passes") == (2, 1)
