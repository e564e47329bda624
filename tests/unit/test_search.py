import random
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from every_plan import shortest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import LATE
from workloads import blocks, no_prefetch, random_workload

from fsdp_compile.passes.plan.plan import simulate, verify
from fsdp_compile.passes.plan.schedule import limits_of, search_plan
from fsdp_compile.passes.plan.workload import Task, Workload, lower_bound, smallest_budget


def _case(seed):
    """A random step of a few units, and a budget."""
    rng = random.Random(seed)
    workload = random_workload(rng, rng.choice([1, 2, 2, 3, 3, 3, 4]))
    over = rng.choice([0, 1, 3, None if len(workload.units) < 4 else 2])
    return workload, None if over is None else smallest_budget(workload) + over


@pytest.mark.parametrize(("seeds", "mean"), [(range(200), 1.00365), pytest.param(range(200, 1000), 1.0033, marks=LATE)])
def test_random_steps(seeds, mean):
    """Of 1,000 steps each plan keeps its budget, more memory is never slower, the mean is within 0.4 % of the best."""
    ratios = []
    for seed in seeds:
        workload, budget = _case(seed)
        found = search_plan(workload, budget, coalesce=2)
        verify(workload, found.plan, budget)
        assert budget is None or search_plan(workload, budget + 2, coalesce=2).seconds <= found.seconds
        best = shortest(workload, inf if budget is None else budget)
        assert found.bound <= best + 1e-9 and best <= found.seconds + 1e-9, seed
        ratios.append(found.seconds / best if best else 1.0)
    assert sum(ratios) <= mean * len(ratios), ratios


@pytest.mark.parametrize("gathered", [0, 1_000])
def test_few_limits_are_tried_where_little_is_gathered(gathered):
    """Copies of a model, and units that stay unsharded, gather nothing, and reduce millions of bytes: there are about a
    thousand limits between the smallest budget and the largest one, which are not a quarter of a byte apart.
    """
    step = blocks(4, 1.2)
    stay = tuple(replace(unit, gathered=0, packed=1_000_000, keep_unsharded=True) for unit in step.units[1:])
    root = replace(step.units[0], gathered=gathered, packed=1_000_000, keep_unsharded=not gathered)
    step = replace(step, units=(root, *stay))
    assert len(limits_of(step, set())) < 2_000
    verify(step, search_plan(step).plan)


def test_limits_that_are_tried():
    """A quarter of a buffer apart for up to eight units, then twice the room each time; tasks alone need no memory."""
    few, many = (replace(step, units=tuple(replace(unit, gathered=1_000, packed=1_000) for unit in step.units))
                 for step in (blocks(4, 1.2), blocks(20, 1.2)))  # fmt: skip
    assert {after - before for before, after in pairwise(limits_of(few, set()))} == {250}
    rooms = [limit - smallest_budget(many) for limit in limits_of(many, set())]
    assert rooms[:4] == [0, 900, 1_800, 3_600] and len(rooms) < 10
    alone = Workload((Task("a", 1.0),), 1, ())
    assert simulate(alone, search_plan(alone).plan).peak == 0


@pytest.mark.parametrize("count, keep", [(31, None), (63, False), (127, False)])
def test_near_the_bound(count, keep):
    """Where computing takes longer than communication and memory is no limit, a deep model is 0.1 % from the bound."""
    found = search_plan(blocks(count, keep=keep))
    assert found.seconds <= 1.001 * found.bound


@given(
    count=st.integers(8, 20),
    forward=st.floats(0.2, 2),
    latency=st.sampled_from([0, 0.02, 0.3]),
    keep=st.sampled_from([None, False]),
    seed=st.integers(0, 1 << 16),
    parts=st.lists(st.floats(1, 4), min_size=2, max_size=2),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_more_memory_is_never_slower_by_construction(count, forward, latency, keep, seed, parts):
    """Of any two budgets the larger one has a plan that is no slower, within it, and no shorter than the bound."""
    workload = blocks(count, forward, latency, keep, random.Random(seed))
    budgets = [int(smallest_budget(workload) * part) for part in sorted(parts)]
    tight, roomy = (search_plan(workload, budget) for budget in budgets)
    verify(workload, tight.plan, budgets[0])
    assert tight.peak == simulate(workload, tight.plan).peak
    assert tight.bound <= tight.seconds * (1 + 1e-9) and tight.peak <= budgets[0]
    assert roomy.bound <= roomy.seconds * (1 + 1e-9) and roomy.peak <= budgets[1]
    assert roomy.seconds <= tight.seconds


def test_uneven():
    """128 uneven units within four times the smallest budget: 2 % from the bound."""
    workload = blocks(127, rng=random.Random(1), keep=None)
    found = search_plan(workload, 4 * smallest_budget(workload))
    assert found.seconds <= 1.02 * found.bound


def test_memory_without_a_budget():
    """Gathers are not launched before it pays: a deep model that computes longer than it gathers holds few units."""
    found = search_plan(blocks(63, forward=2.0))
    assert found.seconds <= 1.01 * found.bound
    assert found.peak < 63 + 10 * 100  # activations, and not a fifth of the 64 units


def test_bound_formula():
    """The bound is no less than g1 + max(Cf, Af - g1) + max(Cb, Ab + R - r) + r, without latency.

    Nothing computes before the first gather g1. Then forward computes (Cf) beside its other gathers, of Af - g1, and
    backward (Cb) beside its gathers Ab and all reduces R but the last one r, before which all has been computed.
    """
    for seed in range(50):
        rng = random.Random(seed)
        step = blocks(9, forward=rng.uniform(0.2, 2), latency=0, rng=rng)
        gathers = [(step.units[unit].gather, first < step.backward) for unit, first, _ in step.gathers(frozenset())]
        ahead, back = (sum(each for each, is_forward in gathers if is_forward == side) for side in (True, False))
        reduces = [step.units[unit].reduce for unit, _, _ in step.reduces()]
        forward, backward = (sum(task.seconds for task in tasks)
                             for tasks in (step.tasks[: step.backward], step.tasks[step.backward :]))  # fmt: skip
        (first, _), last = gathers[0], reduces[-1]
        least = first + max(forward, ahead - first) + max(backward, back + sum(reduces) - last) + last
        assert lower_bound(step) >= least * (1 - 1e-9)


@pytest.mark.parametrize(("merge", "mean"), [(1, 0.95714), (2, 0.94224), (3, 0.94294)])
def test_no_plan_beats_the_bound(merge, mean):
    """Within any budget the bound is no more than what trying everything finds, and on average 6 % less."""
    ratios = []
    for seed in range(500, 560):
        rng = random.Random(seed)
        workload = random_workload(rng, rng.randint(1, 3))
        best = shortest(workload, smallest_budget(workload) + rng.choice([0, 1, 2, 4]), merge)
        assert lower_bound(workload) - 1e-9 <= lower_bound(workload, merge) <= best + 1e-9
        ratios.append(lower_bound(workload, merge) / best if best else 1.0)
    assert sum(ratios) >= mean * len(ratios)


def test_lean_needs_the_smallest_budget():
    """What is computed as the smallest budget is what the plan without any prefetch needs."""
    for seed in range(100):
        workload = random_workload(random.Random(seed), 4)
        plan = no_prefetch(workload)
        verify(workload, plan, smallest_budget(workload))
        assert simulate(workload, plan).peak == smallest_budget(workload)
