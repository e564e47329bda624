"""Many starts of plans that learn, at ranks that are late in turn; and a rank that ends while others change plans."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fsdp_compile.learning import graphs, trial
from fsdp_compile.passes.plan.safe import by_block
from fsdp_compile.passes.plan.schedule import alternating

from .ranks import Ranks, RanksFailed
from .test_learning import _asking_for, _soon, _train

STARTS = 20


def _followed(rank: int, seed: int) -> list[str]:
    """The plan that each call of a start follows, while this rank is late now and then."""
    late, followed = random.Random(1000 * seed + rank), list[str]()
    begin = graphs.Learning.begin_call
    asked_for = by_block if seed % 2 else alternating
    with pytest.MonkeyPatch.context() as patch, _soon(), _asking_for(asked_for):
        most = [-9.0, 9.0][seed // 2 % 2]  # every second plan is taken, whatever it brings
        patch.setattr(trial, "PAYS", most)

        def noted(learning: Any, graph: Any) -> Any:
            if late.random() < 0.2:
                time.sleep(0.05 * late.random())
            plan, clock = begin(learning, graph)
            followed.append(plan)
            return plan, clock

        patch.setattr(graphs.Learning, "begin_call", noted)
        _train(rank, 24, learn=True)
        return followed


def _starts(ranks: Ranks) -> None:
    changed = kept = 0
    for seed in range(STARTS):
        first, *others = ranks.run(_followed, seed)
        assert all(each == first for each in others)
        changed += len(set(first)) > 1
        kept += first[-1] != ""
    assert changed == STARTS and 0 < kept < STARTS


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_ranks_start_often(two: Ranks) -> None:
    """In each of 20 starts both ranks follow the same plan at every call, also where it is kept or taken back."""
    _starts(two)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_four_ranks_start_often(four: Ranks) -> None:
    """As two ranks."""
    _starts(four)


def _ends_at(rank: int, call: int, folder: Path) -> None:
    """Train until rank 1 is killed; each rank leaves when it ended and why, and ends, as a rank of torchrun does."""
    begin = graphs.Learning.begin_call
    with pytest.MonkeyPatch.context() as patch, _soon(), _asking_for(by_block):
        patch.setattr(graphs, "PATIENCE", 2.0)

        def ends(learning: Any, graph: Any) -> Any:
            if rank == 1 and learning.calls == call - 1:
                (folder / "1").write_text(json.dumps([time.time(), "killed"]))
                os.kill(os.getpid(), signal.SIGKILL)
            return begin(learning, graph)

        patch.setattr(graphs.Learning, "begin_call", ends)
        try:
            _train(rank, 24, learn=True)
        except Exception as error:
            (folder / str(rank)).write_text(json.dumps([time.time(), f"{type(error).__name__}: {error}"]))
            os._exit(1)


CALLS = {
    "recorded step": 2,
    "meeting of records": 3,
    "meeting of plans": 5,
    "first step with the new plan": 7,
    "first step with the old one": 9,
    "comparison": 15,
}


@pytest.mark.nightly
@pytest.mark.parametrize("moment", CALLS)
def test_a_rank_ends_while_others_change_plans(four: Ranks, moment: str, tmp_path: Path) -> None:
    """Whenever a rank is killed, no other one hangs: each raises what the collective says that waits for it."""
    with pytest.raises(RanksFailed):
        four.run(_ends_at, CALLS[moment], tmp_path)
    ended = {rank: json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)}
    killed, _ = ended.pop(1)
    for at, error in ended.values():
        assert re.match("RuntimeError: .*(closed by peer|reset by peer|Broken pipe)", error, re.DOTALL), error
        assert at - killed < 20
