import random
from dataclasses import replace
from itertools import product

import pytest
from workloads import blocks, random_workload, updated

from bench.wrong_prices import FACTORS, at_other_prices, buffers
from fsdp_compile.passes.plan.plan import simulate, verify
from fsdp_compile.passes.plan.safe import launched_early, safe_plan
from fsdp_compile.passes.plan.schedule import alternating, search_plan
from fsdp_compile.passes.plan.workload import smallest_budget


def exposes_more(step, plan):
    """By how much of the step a plan exposes more than the rule, at the worst of 16 combinations of prices."""
    parts = []
    for factors in product(FACTORS, FACTORS):
        real = at_other_prices(step, *factors)
        rule, ours = simulate(real, alternating(step)), simulate(real, plan)
        parts.append((ours.exposed - rule.exposed) / rule.makespan)
    return max(parts)


def in_parts(step, count=6):
    """`step` whose tasks are divided, so that collectives may begin in the middle of a block."""
    parts = [replace(task, seconds=task.seconds / count) for task in step.tasks for _ in range(count)]
    return replace(step, tasks=tuple(parts), backward=count * step.backward)


@pytest.mark.parametrize("counts", [(4,), pytest.param((1, 8), marks=pytest.mark.nightly)])
def test_plans_survive_wrong_prices(counts):
    """Where communication takes 0.3 or 0.9 of the time of computing, and both are off by 0.5 to 2, no plan exposes more
    than the rule by more than 1 % of the step, nor has more buffers alive unless that pays. By the right prices it is
    as short as the shortest, within 4 %.
    """
    found = []
    for count, forward, keep, latency in product(counts, (1.1, 3.4), (False, None), (0.02, 0.2)):
        for rng in (None, random.Random(count)):
            step = in_parts(blocks(count, forward, latency, keep, rng))
            shortest = search_plan(step)
            safe = safe_plan(step, found=shortest)
            verify(step, safe.plan)
            assert exposes_more(step, safe.plan) <= 0.01
            assert safe.seconds <= shortest.seconds * 1.04
            rule = alternating(step)
            assert safe.seconds <= simulate(step, rule).makespan
            assert safe.seconds < simulate(step, rule).makespan * 0.995 or buffers(step, safe.plan) <= buffers(
                step, rule
            )
            found.append(exposes_more(step, shortest.plan))
    assert max(found) > 0.05  # the shortest plan may


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 60), marks=pytest.mark.nightly)])
def test_early_launches_are_never_slower(seeds):
    """At no prices: launches keep their order, and the plan its rules and its memory; also with updates."""
    for seed in seeds:
        rng = random.Random(seed)
        step = random_workload(rng, rng.randint(1, 5)) if seed % 2 else blocks(4, rng.uniform(0.3, 2), rng=rng)
        step = updated(step, rng.choice([0, 1]), rng.random() < 0.5, rng.choice([None, 1])) if seed % 3 == 0 else step
        budget = smallest_budget(step) + rng.choice([0, 2, 100])
        plan = search_plan(step, budget).plan
        early = launched_early(step, plan, budget)
        verify(step, early, budget)
        assert [each[:2] for each in early.of("gather", "reduce")] == [each[:2] for each in plan.of("gather", "reduce")]
        assert all(new.at <= old.at for new, old in zip(early.of("gather"), plan.of("gather"), strict=True))
        for factors in product(FACTORS, FACTORS):
            real = at_other_prices(step, *factors)
            assert simulate(real, early).makespan <= simulate(real, plan).makespan + 1e-9
        safe = safe_plan(step, budget)
        verify(step, safe.plan, budget)
        assert safe.peak == simulate(step, safe.plan).peak and safe.seconds >= safe.bound * (1 - 1e-9)


@pytest.mark.parametrize("keep", [False, None])
def test_ten_equal_blocks(keep):
    """With nothing around them, and communication that takes 0.9 of computing: what is exposed is near the bound."""
    step = blocks(10, 1.2, keep=keep)
    safe = safe_plan(step)
    computing = sum(task.seconds for task in step.tasks)
    assert safe.seconds - computing <= 1.15 * (safe.bound - computing) + 0.01 * safe.seconds
