"""The code of the documents runs: each page's Python blocks, in order, are one script for two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_compile

ROOT = Path(__file__).parents[2]


def script_of(page: Path) -> str:
    """All Python blocks of a page; blank lines stand for the rest, so that a traceback names the page's own lines."""
    text, lines, inside = page.read_text(), [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "page", ["quick_start", "sharded_tensors", pytest.param("from_fsdp2", marks=pytest.mark.nightly)]
)
def test_the_code_of_a_page_runs(page: str, folder: Path, tmp_path: Path) -> None:
    """As its reader would run it: with torchrun, on two ranks."""
    script = tmp_path / f"{page}.py"
    script.write_text(script_of(ROOT / "docs" / f"{page}.md"))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path(fsdp_compile.__file__).parents[1]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    run = subprocess.run(launcher, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=550)
    errors = [line for line in run.stderr.splitlines() if re.match(r"\[rank\d\]:", line)]
    assert run.returncode == 0, "\n".join(errors) or run.stderr[-4000:]
