"""The budget of lines is held, and `tools/size.py --check` sees what exceeds it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def size() -> ModuleType:
    """tools/size.py."""
    spec = importlib.util.spec_from_file_location("size", ROOT / "tools/size.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_exceeds_its_budget_is_named(size: ModuleType) -> None:
    """A folder with too many lines, too many files and a long function are each named, with both numbers."""
    long = "def f():\n" + '    """\n' + "    Text.\n" * 50 + '    """\n' + "    pass\n" * 91
    texts = {"fsdp_compile/comm/a.py": long, "fsdp_compile/comm/b.py": "\n" * 40_000, "bench/c.py": long}
    texts |= {f"fsdp_compile/eager/{number}.py": "" for number in range(size.FILES)}
    found = size.excesses(texts)
    assert "fsdp_compile/comm/a.py:1 f: 92 lines, a function may have 90" in found
    assert sum("fsdp_compile/comm: 40,1" in each for each in found) == 1
    assert f"fsdp_compile: {size.FILES + 2} files, the budget is {size.FILES}" in found
    assert len(found) == 4  # and the package as a whole


def test_places(size: ModuleType) -> None:
    """A folder counts with what lies below it; `*.py` counts what lies in the folder itself."""
    texts = {"fsdp_compile/api.py": "1\n", "fsdp_compile/passes/plan/plan.py": "1\n2\n", "bench/a.py": ""}
    assert size.measure(texts, "fsdp_compile") == (3, 2)
    assert size.measure(texts, "fsdp_compile/*.py") == (1, 1)
    assert size.measure(texts, "fsdp_compile/passes") == (2, 1)
