import random
from dataclasses import replace
from itertools import groupby

import pytest
from workloads import blocks

from bench.llama import MODELS, workload
from bench.rules import fsdp2, one_ahead
from fsdp_compile.passes.cost.hardware import device, link
from fsdp_compile.passes.plan.plan import simulate, verify
from fsdp_compile.passes.plan.schedule import alternating, search_plan
from fsdp_compile.passes.plan.workload import Task, UnitCost


@pytest.mark.parametrize("rule", [one_ahead, fsdp2, alternating])
def test_rules_are_plans(rule):
    """What other systems do, and we without costs, keeps the rules of a plan; planned, it is no slower within that."""
    for seed in range(6):
        rng = random.Random(seed)
        step = blocks(rng.randint(1, 12), forward=rng.uniform(0.3, 1.5), keep=rng.choice([None, False]))
        plan = rule(step)
        verify(step, plan)
        timeline = simulate(step, plan)
        assert search_plan(step, timeline.peak).seconds <= timeline.makespan * (1 + 1e-9)


def test_gathers_alive():
    """Beside the unit that computes, forward has two gathers under FSDP2's rule, one under the other; backward one."""
    step = blocks(6)
    for rule, forward in ((fsdp2, 2), (one_ahead, 1)):
        alive = {"gather": 0, "free": 0}
        most = [0, 0]
        for each in rule(step).of("gather", "free"):
            alive[each.kind] += len([name for name in each.units if name != "root"])
            half = int(each.at >= step.backward)
            most[half] = max(most[half], alive["gather"] - alive["free"])
        assert most == [forward + 1, 2]


def test_turns():
    """In backward no task has both a gather and a reduce under way, and as little is exposed as one unit ahead."""
    step = blocks(6)
    parts = [replace(task, seconds=task.seconds / 4) for task in step.tasks for _ in range(4)]
    step = replace(step, tasks=tuple(parts), backward=4 * step.backward)
    turns, under_way, most = alternating(step), {"gather": 0, "reduce": 0}, []
    for at, steps in groupby(turns.of("gather", "wait", "reduce", "wait_reduce"), key=lambda each: each.at):
        for each in steps:
            under_way["reduce" if "reduce" in each.kind else "gather"] += -1 if "wait" in each.kind else 1
        most += [sum(under_way.values())] if step.backward <= at < len(step.tasks) else []
    assert max(most) == 1
    ours, other = simulate(step, turns), simulate(step, one_ahead(step))
    assert ours.exposed <= other.exposed + 1e-9 and ours.peak <= other.peak - 100


def with_adapters(step):
    """`step` with a small trained unit beside each block, which is frozen; in backward a block's is read first."""
    count = len(step.units)
    units = [replace(unit, module=unit.name) for unit in step.units]
    small = [UnitCost(f"{unit.name}:2", 0.01, 0.01, 1, 1, module=unit.name) for unit in step.units[1:]]
    tasks = []
    for task in step.tasks:
        adapters = tuple(count + unit - 1 for unit in task.reads if unit)
        writes = tuple(unit if unit == 0 else count + unit - 1 for unit in task.writes)
        if task.writes and adapters:
            tasks.append(Task("adapter", 0.01, 0, adapters))
        tasks.append(replace(task, reads=(*task.reads, *adapters), writes=writes))
    split = step.backward
    return replace(step, tasks=tuple(tasks), units=(*units, *small), backward=split)


@pytest.mark.parametrize("rule", [one_ahead, alternating])
def test_units_of_one_module_are_gathered_as_one(rule):
    """A frozen block with a trained adapter is gathered a block ahead: no more is exposed than without adapters."""
    plain, adapted = blocks(6), with_adapters(blocks(6))
    plan = rule(adapted)
    verify(adapted, plan)
    assert simulate(adapted, plan).exposed <= simulate(plain, rule(plain)).exposed + 0.2


def test_llama():
    """8B has 8.03 billion parameters; computing takes as long as its operations at the device's rates for products and
    for attention, which is slower.
    """
    shape, h100 = MODELS["8B"], device("h100")
    assert sum(shape.units.values()) == pytest.approx(8.03e9, rel=1e-3)
    step = workload(shape, 1, 8, link("h100-nvlink"), h100)
    flops = 8 * 8192 * 7.5e9  # forward, forward again and backward, without the embedding
    attention = (2 + 2.5) * 2 * 8192**2 * 4096 * 32  # causal
    seconds = (flops / h100.product_efficiency + attention / h100.attention_efficiency) / 989.4e12
    assert seconds < sum(task.seconds for task in step.tasks) < 1.4 * seconds
