"""Two ranks are killed at random moments of saves, one a little before the other: each time training goes on from a
complete checkpoint.

50 times by default; `FSDP_COMPILE_KILLS=1000` kills as often as it says.
"""

import os
import random
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile import checkpoint, fully_shard
from fsdp_compile.checkpoint.directory import committed, step_of

from ..ranks import Ranks, RanksFailed

KILLS = int(os.environ.get("FSDP_COMPILE_KILLS") or 50)


def _newest_step(root: Path) -> int:
    return max((step_of(path) for path in committed(root)), default=0)


def _save_for_ever(rank: int, root: Path) -> None:
    """Go on from the newest checkpoint, all of whose values are of one step."""
    warnings.filterwarnings("error", message="passed over")  # no checkpoint that can be seen is damaged
    model = fully_shard(nn.Sequential(*[nn.Linear(255, 255) for _ in range(8)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    tensors = [*model.parameters(), *(found["momentum_buffer"] for found in optimizer.state.values())]
    state, step = {"model": model, "optimizer": optimizer, "step": 0}, _newest_step(root)
    if step:
        assert checkpoint.load(state, root) == step == state["step"]
        for tensor in tensors:
            here = tensor.to_local()
            assert (here == step).all(), f"expected {step} in all tensors, found {here.unique()}"
    while True:
        step += 1
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(step)
        checkpoint.save(state | {"step": step}, root, step, keep=2)


def _wait_for(step: int, root: Path, running: "Future[Any]") -> float:
    """When a checkpoint of `step` is first seen; what the ranks raise is raised."""
    while _newest_step(root) < step:
        if running.done():
            running.result()
        time.sleep(0.001)
    return time.monotonic()


@pytest.mark.nightly  # test_resume.py kills a rank every day
@pytest.mark.timeout(300 + 2 * KILLS)
def test_killed_saves(tmp_path: Path) -> None:
    """Both ranks load the newest checkpoint, none older than what was seen before the kill; what kills leave
    half-written does not pile up."""
    root, chance, hidden = tmp_path / "checkpoints", random.Random(0), []
    root.mkdir()
    for _ in range(KILLS + 1):
        before, ranks = _newest_step(root), Ranks(2, tmp_path, start="fork")
        with ThreadPoolExecutor() as thread:
            running = thread.submit(ranks.run, _save_for_ever, root)
            begun = _wait_for(before + 1, root, running)
            time.sleep(chance.uniform(0, 2 * (_wait_for(before + 2, root, running) - begun)))  # in the next two saves
            seen = _newest_step(root)
            for worker in chance.sample(ranks.workers, 2):
                worker.process.kill()
                time.sleep(chance.choice((0, 0.002, 0.02)))
            with pytest.raises(RanksFailed):
                running.result()
        assert _newest_step(root) >= seen
        hidden.append(sum(path.name.startswith(".") for path in root.iterdir()))
    assert max(hidden) <= 2, hidden
    assert sum(hidden) >= 1 or KILLS < 50, hidden  # a rank that sees the other die removes what it has staged
