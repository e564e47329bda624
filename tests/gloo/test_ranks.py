"""The pool of ranks itself: results, failures, time limits."""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from .ranks import Ranks, RanksFailed, on_ranks


def _describe(rank: int, text: str) -> tuple[int, int, int, str]:
    return rank, dist.get_rank(), dist.get_world_size(), text


def _fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("only here")
    dist.barrier()


def _sleep(rank: int) -> None:
    if rank == 0:
        time.sleep(3600)


def _process(rank: int) -> int:
    return os.getpid()


def test_results_come_by_rank(two: Ranks) -> None:
    """Every rank is in the group, gets the arguments, and its result is in its place; processes persist."""
    assert two.run(_describe, "x") == [(0, 0, 2, "x"), (1, 1, 2, "x")]
    assert two.run(_process) == two.run(_process)


@on_ranks(2)
def _fails_on_one(rank: int) -> None:
    assert rank == 0, "only here"


def test_a_test_fails_with_a_rank() -> None:
    """What a test that `on_ranks` wraps raises on one rank is raised by what the pool calls there."""
    pool = Mock(run=lambda test, *args: [test.on_rank(rank, *args) for rank in range(2)])
    with pytest.raises(AssertionError, match="only here"):
        _fails_on_one(two=pool)


@pytest.mark.nightly
def test_failures_are_reported_and_survived(tmp_path: Path) -> None:
    """An exception comes with its rank's traceback, a rank that waits with its stack; the next call gets a new pool."""
    ranks = Ranks(2, tmp_path)
    ranks.run(_process)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RanksFailed) as failed:
        patch.setattr("gloo.ranks.GRACE", 0.5)
        ranks.run(_fail_on_one)
    assert "rank 1" in str(failed.value) and "ValueError: only here" in str(failed.value)
    assert "rank 0 in _fail_on_one was still here" in str(failed.value) and "barrier" in str(failed.value)
    assert len(set(ranks.run(_process))) == 2
    ranks.limit = 1.0
    with pytest.raises(RanksFailed, match=r"_sleep failed on ranks \[\], did not finish on \[0\]") as late:
        ranks.run(_sleep)
    assert "in _sleep" in str(late.value) and "rank 1 in _sleep returned: None" in str(late.value)
    ranks.stop()


def _abandon(folder: Path, pipe: Connection) -> None:
    pipe.send(Ranks(1, folder).run(_process))
    os._exit(1)


def _lives(pid: int) -> bool:
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and bool(path.read_bytes())  # nothing for one that nobody waits for


@pytest.mark.nightly
def test_no_rank_is_left_behind(tmp_path: Path) -> None:
    """Ranks end with the process that started them, even if it is killed, and while they are stopped."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_abandon, args=(tmp_path, there))
    process.start()
    (rank,) = here.recv()
    process.join()
    deadline = time.monotonic() + 20
    while _lives(rank):
        assert time.monotonic() < deadline
        time.sleep(0.1)
