"""The code of the documents runs, with torchrun, and prints what the pages show; `pages` says how blocks are marked."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pages
import pytest

import fsdp_compile

ROOT = Path(__file__).parents[2]
PAGES = ("quick_start", "debugging", "sharded_tensors", "whole_step", "optimizers", "checkpoints", "from_fsdp2", "rl")


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 2) for name in PAGES), ("explain", 1), *(("reproducibility", ranks) for ranks in (1, 2, 4))],
)
def test_the_code_of_a_page_runs(name: str, ranks: int, folder: Path, tmp_path: Path) -> None:
    """As its reader would run it, first its Python, then its commands, and rank 0 prints what the page shows."""
    page = ROOT / "docs" / f"{name}.md"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path(fsdp_compile.__file__).parents[1]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, pages.__file__, str(page), free_port()]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=550)
    errors = [line for line in run.stderr.splitlines() if re.match(r"\[rank\d\]:", line)]
    assert run.returncode == 0, "\n".join(errors) or run.stderr[-4000:]
    pages.run_commands(page, tmp_path, environment)
