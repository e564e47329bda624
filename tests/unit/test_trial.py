"""Trials of plans: which of two is kept, where steps vary by chance."""

import random

import pytest
import torch

from fsdp_compile.learning.recorder import StepClock
from fsdp_compile.learning.trial import Comparison, Timed, Trial, compared, of_ranks

STEP, WAITS = 0.44, 0.028  # seconds of the old plan's steps


def _steps(rng, count, waits, slower=0.0, noise=0.03, waits_noise=0.05):
    """So many steps whose computing varies by `noise`, one in ten takes half as long again."""
    steps = []
    for _ in range(count):
        computing = (STEP - WAITS) * (1 + slower) * rng.gauss(1, noise) * (1.5 if rng.random() < 0.1 else 1)
        waited = max(0.0, waits * rng.gauss(1, waits_noise))
        steps.append(Timed(computing + waited, waited))
    return steps


def _verdict(seed, waits, slower=0.0, saves=False, noise=0.03):
    """What is done after rounds of 9 steps of each plan, eight at most; and the number of rounds."""
    rng, new, old, rounds = random.Random(seed), [], [], 0
    found = None
    while rounds < 8 and not (found and found.is_sure(saves)):
        rounds += 1
        new += _steps(rng, 9, waits, slower, noise)
        old += _steps(rng, 9, WAITS, 0.0, noise)
        found = compared(new, old)
    return found.pays(saves), rounds


@pytest.mark.parametrize(
    ("waits", "slower", "saves", "least", "most"),
    [
        (0.020, 0.0, False, 97, 100),  # waits 2 % of the step less
        (0.020, 0.05, False, 0, 6),  # and computes 5 % longer
        (WAITS, 0.0, False, 0, 6),  # makes no difference
        (WAITS, -0.05, False, 90, 100),  # computes 5 % less long
        (WAITS, 0.0, True, 97, 100),  # makes no difference, and saves memory
        (0.032, 0.0, True, 0, 5),  # waits 1 % longer, and saves memory
        (0.060, 0.0, False, 0, 0),  # waits 7 % longer
    ],
)
def test_which_plan_is_kept(waits, slower, saves, least, most):
    """Of 100 trials in which computing varies by 3 %, and one step in ten takes half as long again, so many keep the
    new plan. Medians of nine whole steps keep a plan that waits 2 % less in about 75.
    """
    assert least <= sum(_verdict(seed, waits, slower, saves)[0] for seed in range(100)) <= most


def test_clear_cases_end_soon():
    """Where steps hardly vary, one round tells; where they do, it goes on."""
    assert all(_verdict(seed, 0.020, noise=0.001) == (True, 1) for seed in range(20))
    rounds = [_verdict(seed, 0.020)[1] for seed in range(100)]
    assert 1 < sum(rounds) / 100 < 4


def test_waits_that_vary_prove_nothing():
    """A plan that seems to wait less than ranks are late by chance is not sure, and is taken back in the end."""
    found = Comparison(waits=-0.02, computing=0.0, waits_noise=0.05, computing_noise=0.0)
    assert not found.is_sure(False) and not found.pays(False)
    assert found._replace(waits_noise=0.01).is_sure(False) and found._replace(waits_noise=0.01).pays(False)


def test_ranks_share_medians():
    """Ranks that saw different things take the median of each figure, and judge alike."""
    mine, others = Comparison(-0.02, 0.0, 0.001, 0.01), Comparison(-0.01, 0.01, 0.002, 0.02)
    assert of_ranks([mine, others, others]) == others


def test_nothing_to_compare():
    """A plan that was not timed, or whose steps took no time, is not compared."""
    assert compared([], [Timed(1.0, 0.0)]) is None and compared([Timed(1.0, 0.0)], [Timed(0.0, 0.0)]) is None


@pytest.mark.parametrize("ended", [True, False])
def test_plans_take_turns(monkeypatch, ended):
    """Blocks of calls, the new plan first; the first call of a block is not timed. No more than a block and one of
    clocks, which have many events on a GPU, are kept; steps that never ended are not compared.
    """
    monkeypatch.setattr(StepClock, "seconds", lambda clock: (2.0, 0.5) if ended else None)
    trial, device = Trial(10, "new", "old", block=3), torch.device("cpu")
    turns = [trial.begin_call(call, device) for call in range(9, 17)]
    assert [plan for plan, _ in turns] == ["old", "new", "new", "new", "old", "old", "old", "new"]
    assert [clock is not None for _, clock in turns] == [False, False, True, True, False, True, True, False]
    for call in range(17, 60):
        trial.begin_call(call, device)
        assert len(trial._clocks) <= 4
    assert trial.compared() == ((0.0, 0.0, 0.0, 0.0) if ended else None)
