"""`fsdp-compile selfcheck` on a GPU; and that a steady step neither waits for the device nor leaves memory behind."""

from pathlib import Path

import pytest
import torch

from fsdp_compile.compare.case import Case
from fsdp_compile.compare.systems import OURS, WARM, Task
from fsdp_compile.compare.training import Training
from fsdp_compile.selfcheck import _case
from fsdp_compile.tools.cli import main

GPU = torch.device("cuda", 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All holds."""
    assert main(["selfcheck"]) == 0, capsys.readouterr().out


def _warmed(system: str, case: Case) -> Training:
    training = Task(2, 16, False, "cuda").training(case, system, GPU)
    for _ in range(WARM):
        training.step(training.next_batches())
    return training


@pytest.mark.parametrize("system", OURS)
def test_a_steady_step(system: str) -> None:
    """The host issues all of it without a wait, as torch's own debug mode says; what it allocates is gone behind it."""
    training = _warmed(system, _case())
    batches, before = training.next_batches(), torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = training.step(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    del loss
    assert torch.cuda.memory_allocated() == before
