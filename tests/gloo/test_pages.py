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
RUN = ("quick_start", "debugging", "sharded_tensors", "whole_step", "optimizers", "checkpoints", "explain",
       "from_fsdp2", "rl")  # fmt: skip
ALONE = ("explain",)  # its script needs one process
# Each of their blocks runs or says why it does not.
COMPLETE = ("reproducibility", "quick_start", "whole_step", "checkpoints", "explain", "debugging", "frameworks", "rl")


def page_of(name: str) -> Path:
    return ROOT / "docs" / f"{name}.md"


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def run_page(name: str, ranks: int, cache: Path, tmp_path: Path) -> None:
    """Run the Python of a page, and then its commands."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path(fsdp_compile.__file__).parents[1]),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
    folder = tmp_path / name
    folder.mkdir()
    arguments = [str(page_of(name)), str(folder), free_port()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run = subprocess.run([*launcher, pages.__file__, *arguments], env=environment, cwd=tmp_path, capture_output=True,
                         text=True, timeout=550)  # fmt: skip
    errors = [line for line in run.stderr.splitlines() if re.match(r"\[rank\d\]:", line)]
    assert run.returncode == 0, "\n".join(errors) or run.stderr[-4000:]
    pages.run_commands(page_of(name), folder, environment)


@pytest.mark.nightly
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page: str, folder: Path, tmp_path: Path) -> None:
    """As its reader would run it, on two ranks, and rank 0 prints what the page shows."""
    run_page(page, 1 if page in ALONE else 2, folder, tmp_path)


@pytest.mark.parametrize("page", COMPLETE)
def test_every_block_runs_or_says_why(page: str) -> None:
    """No block of these pages is left out without a reason, and each that shows output stands behind what prints it."""
    before = None
    blocks = list(pages.blocks_of(page_of(page)))
    assert blocks
    for block in blocks:
        assert block.language in pages.RUNS or block.reason, f"{block}: ```{block.language} does not run"
        assert block.language != "text" or (before and before.language in ("python", "shell")), (
            f"{block}: shows no output"
        )
        assert block.reason or block.language != "text" or not (before and before.reason), f"{block}: output of nothing"
        before = block


@pytest.mark.nightly
def test_the_page_on_reproducibility_prints_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Its script, on one, two and four ranks: the same loss and fingerprint, and what the page shows."""
    script, shown = pages.blocks_of(page_of("reproducibility"))
    (tmp_path / "train.py").write_text(script.code)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(fsdp_compile.__file__).parents[1])}
    printed = []
    for ranks in (1, 2, 4):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        run = subprocess.run([*launcher, "train.py"], env=environment, cwd=tmp_path, capture_output=True, text=True,
                             timeout=200)  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        printed.append(run.stdout)
    shown.check(printed[0])
    assert len(set(printed)) == 1, printed
