"""The limits of lines: `tools/size.py --check` sees what exceeds them."""

from types import ModuleType

import pytest
import tool


@pytest.fixture(scope="module")
def size() -> ModuleType:
    """tools/size.py."""
    return tool.load("size")


def test_what_exceeds_its_limit_is_named(size: ModuleType) -> None:
    """Places with too many lines, a file of the story that is gone and a long function are named."""
    long = "def f():\n" + '    """\n' + "    Text.\n" * 50 + '    """\n' + "    pass\n" * 91
    texts = dict.fromkeys(size.STORY, "") | {"fsdp_compile/comm/a.py": long}
    assert size.excesses(texts) == ["fsdp_compile/comm/a.py:1 f: 92 lines, a function may have 90"]
    del texts["fsdp_compile/eager/forward.py"]
    assert size.excesses(texts)[0] == "fsdp_compile/eager/forward.py: in the list STORY, but there is no such file"


@pytest.mark.parametrize(
    ("path", "exceeded"),
    [
        ("fsdp_compile/core/unit.py", ["the story"]),
        ("fsdp_compile/comm/a.py", ["the story and what it imports"]),
        ("tests/unit/test_a.py", ["tests"]),
        ("docs/a/b.md", ["docs, README, change log"]),
        ("CHANGELOG.md", []),
    ],
)
def test_each_line_of_the_table_has_a_limit(size: ModuleType, path: str, exceeded: list[str]) -> None:
    """One line above a limit is told; what the story imports counts as story, and released changes do not count."""
    texts = dict.fromkeys(size.STORY, "") | {"fsdp_compile/core/unit.py": "import fsdp_compile.comm.a"}
    limit = size.LIMITS[exceeded[0]] if exceeded else 10_000
    for lines, over in ((limit, []), (limit + 1, exceeded)):
        text = "# Change log\n\n## Unreleased\n\n## 0.2.0\n" * (path == "CHANGELOG.md") + "\n" * lines
        found = size.excesses(texts | {path: text})
        assert [each.partition(":")[0] for each in found] == over
