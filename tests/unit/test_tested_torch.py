"""Which versions of torch count as tested."""

import re
from pathlib import Path

from fsdp_compile.tested_torch import TESTED_TORCH, is_untested

ROOT = Path(__file__).parents[2]


def test_versions_are_the_same_everywhere() -> None:
    """The versions that count as tested are those of the documentation and of each `_torch.py`."""
    words = f"torch {', '.join(TESTED_TORCH[:-1])} and {TESTED_TORCH[-1]}"
    documents = ("README.md", "docs/upgrading_torch.md", "docs/stability.md")
    pages = [*(ROOT / name for name in documents), *ROOT.glob("fsdp_compile/*/_torch.py")]
    assert [page for page in pages if words not in " ".join(page.read_text().split())] == []
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] in TESTED_TORCH


def test_what_counts_as_untested() -> None:
    """A newer minor version does, a newer build of a tested one, or an old one, does not."""
    assert [is_untested(f"{TESTED_TORCH[-1]}{rest}") for rest in (".0", ".9+cu130", "")] == [False] * 3
    assert not is_untested("2.12.1") and is_untested("2.99.0.dev20271124+cpu") and is_untested("3.0.0")
