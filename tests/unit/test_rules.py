import random

import pytest
from workloads import blocks

from bench.llama import MODELS, workload
from bench.rules import fsdp2, one_ahead
from fsdp_compile.passes.cost import device, link
from fsdp_compile.passes.schedule import schedule
from fsdp_compile.passes.simulate import simulate
from fsdp_compile.passes.verify import verify


@pytest.mark.parametrize("rule", [one_ahead, fsdp2])
def test_rules_are_plans(rule):
    """What other systems do keeps the rules of a plan, and ours is no slower within the same memory."""
    for seed in range(6):
        rng = random.Random(seed)
        step = blocks(rng.randint(1, 12), forward=rng.uniform(0.3, 1.5), keep=rng.choice([None, False]))
        plan = rule(step)
        verify(step, plan)
        timeline = simulate(step, plan)
        assert schedule(step, timeline.peak).seconds <= timeline.makespan * (1 + 1e-9)


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


def test_llama():
    """8B has 8.03 billion parameters; computing takes as long as its published operations at the device's rate."""
    shape, h100 = MODELS["8B"], device("h100")
    assert sum(shape.units.values()) == pytest.approx(8.03e9, rel=1e-3)
    step = workload(shape, 1, 8, link("h100-nvlink"), h100)
    flops = 8 * 8192 * 7.5e9  # forward, forward again and backward, without the embedding
    seconds = flops / (989e12 * h100.efficiency)
    assert seconds < sum(task.seconds for task in step.tasks) < 1.4 * seconds
