"""Keep, compute again or reshard: the planner's choice on plain numbers."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from workloads import blocks, random_workload

from fsdp_compile.passes.joint.choose_memory import choose_policies
from fsdp_compile.passes.plan.memory import (
    Block,
    Copy,
    Options,
    Policy,
    Repeat,
    choices,
    choose,
    least_of,
    planned,
    workload_of,
)
from fsdp_compile.passes.plan.plan import PlanError, verify
from fsdp_compile.passes.plan.schedule import TOLERANCE, search_plan
from fsdp_compile.passes.plan.workload import Workload, smallest_budget


def options_of(rng: random.Random, step: Workload, most: int = 6) -> Options:
    """`step` with a position for each task, and activations of each unit that forward computes and backward reads."""
    count, split = len(step.tasks), step.backward
    live = [task.memory for task in step.tasks]
    made = []
    for index, (unit, (first, _)) in enumerate(step.reads_in_forward.items()):
        at = step.reads_in_backward.get(unit, (count - 1, 0))[0]
        ways = []
        for name, part in (("recompute", 1.0), ("half", 0.5)):
            size = int(rng.randint(1, most) * part * 2)
            if name == "recompute":
                for position in range(first, rng.randint(at, count - 1) + 1):
                    live[position] += size
            changes = ((first + 1, -size), (at, size))
            if first + 1 < split and (name == "recompute" or size <= ways[0].returns):
                ways.append(Policy(name, at, changes, (Repeat(first, part, size),), size))
        if ways and at - first > 3 and rng.random() < 0.7:  # copied to the host, and back two tasks before it is read
            left, seconds = rng.randint(first, split - 1), rng.randint(0, 8)
            copy = Copy(first, left, max(split, at - 2), at, ways[0].returns, seconds)
            changes = ((left + 1, -copy.size), (copy.back, copy.size))
            ways += [Policy("offload", at, changes, (), 0, (copy,))] if left + 1 < copy.back else []
        made.append(Block(f"b{index}", tuple(ways)))
    tasks = tuple(replace(task, memory=memory) for task, memory in zip(step.tasks, live, strict=True))
    step = replace(step, tasks=tasks)
    return Options(step, step, tuple(live), (0,) * count, tuple(range(count)), tuple(made))


def single_knobs(options: Options) -> list[tuple[str, Workload]]:
    """Each knob alone at each of its settings: units that stay unsharded; so many blocks computed again."""
    closed = [replace(unit, keep_unsharded=bool(unit.keep_unsharded)) for unit in options.plain.units]
    settings = [("unsharded", options.plain)]
    order = choices(options)
    for name in ("recompute", "half", "offload"):
        alone = [policies for policies in order if {way.name for way in policies if way} == {name}]
        settings += [(name, replace(workload_of(options, policies), units=tuple(closed))) for policies in alone]
    return settings


LATE = [(3, range(3, 40)), (5, range(40)), (10, range(8))]


@pytest.mark.parametrize(
    ("units", "seeds"), [(3, range(3)), *(pytest.param(*each, marks=pytest.mark.nightly) for each in LATE)]
)
def test_never_over_and_never_slower_than_a_single_knob(units: int, seeds: range) -> None:
    """Whatever the step and the budget, the plan is within it, and no knob alone makes a shorter one (I9)."""
    for seed in seeds:
        rng = random.Random(100 * units + seed)
        options = options_of(rng, random_workload(rng, units))
        settings = [(name, workload, smallest_budget(workload)) for name, workload in single_knobs(options)]
        budgets = sorted({least + rng.randint(0, 4) for _, _, least in settings})
        before = None
        for budget in budgets:
            try:
                chosen = choose(options, budget)
            except PlanError:
                assert all(least > budget for _, _, least in settings)
                continue
            verify(chosen.workload, chosen.planned.plan, budget)
            for name, workload, least in settings:
                if least <= budget:
                    assert chosen.seconds <= search_plan(workload, budget).seconds * (1 + TOLERANCE), (
                        seed,
                        name,
                        budget,
                    )
            assert before is None or chosen.seconds <= before * (1 + TOLERANCE), "a larger budget is never slower"
            before = chosen.seconds


def test_more_memory_computes_less_again() -> None:
    """Without a limit nothing is computed again; between, as few of equal blocks as fit; below the least, an error."""
    rng = random.Random(0)
    options = options_of(rng, blocks(4, keep=None))
    assert not any(choose(options, None).policies)
    full = tuple(block.policies[0] if block.policies else None for block in options.blocks)
    least = min(smallest_budget(workload_of(options, policies)) for policies in choices(options))
    with pytest.raises(PlanError, match=f"budget: expected at least {least} bytes.* found {least - 1}"):
        choose(options, least - 1)
    again = [sum(way is not None for way in choose(options, least + room).policies) for room in (0, 10, 1000)]
    assert again == sorted(again, reverse=True) and again[0] > again[-1] == 0
    forced = planned(options, full, None)
    assert forced.workload.tasks != options.plain.tasks and forced.seconds >= choose(options, None).seconds


def test_a_budget_near_the_least_is_for_graphs_to_refuse() -> None:
    """Bytes of a step are estimates: a little below the least one, what needs the least is planned; far below, none."""
    options: Any = options_of(random.Random(0), blocks(4, keep=None))
    smallest = min(smallest_budget(workload_of(options, policies)) for policies in choices(options))
    assert smallest_budget(workload_of(options, least_of(options))) == smallest
    size = 1000  # so that a percent is a number of bytes
    stored, plain = (
        replace(
            each,
            tasks=tuple(replace(task, memory=size * task.memory) for task in each.tasks),
            units=tuple(replace(u, gathered=size * u.gathered, packed=size * u.packed) for u in each.units),
        )
        for each in (options.stored, options.plain)
    )
    options = replace(options, plain=plain, stored=stored, blocks=())
    least = smallest_budget(plain)

    def chosen(budget: int) -> Any:
        return choose_policies(options, SimpleNamespace(activations="auto", budget=budget))  # type: ignore[arg-type]

    for part in (0.96, 1.0, 1.01):
        found = chosen(int(part * least))
        assert least <= found.planned.peak <= max(least, int(part * least)) and found.policies == ()
    with pytest.raises(PlanError, match=f"budget: expected at least {least} bytes.* found {int(0.9 * least)}"):
        chosen(int(0.9 * least))


def test_what_is_computed_again_takes_time_and_memory() -> None:
    """A task is repeated before the first one of backward that reads it, beside what is alive there."""
    step = Workload(
        tuple(replace(task, memory=10) for task in blocks(1).tasks), blocks(1).backward, blocks(1).units, 0.0
    )
    way = Policy("recompute", 5, ((2, -4), (5, 4)), (Repeat(1, 0.5, 4),), 4)
    options = Options(step, step, (10,) * 6, (0,) * 6, tuple(range(6)), (Block("b", (way,)),))
    made = workload_of(options, (way,))
    assert [task.memory for task in made.tasks] == [10, 10, 6, 6, 6, 10, 10]
    assert made.tasks[5].name == "blocks.0 forward again" and made.tasks[5].seconds == step.tasks[1].seconds / 2
    assert made.tasks[5].reads == step.tasks[1].reads


def test_what_is_copied_waits_for_the_link() -> None:
    """Two copies share the link; what waits for one is as much later, in forward and in backward."""
    step = blocks(2)  # embedding; blocks 1.2 each; head 0.5 | head 1.0; blocks 2.4 each; embedding
    copies = [Copy(1, 2, 4, 5, 3, 1.5), Copy(2, 3, 4, 6, 3, 1.0)]
    ways = tuple(Policy("offload", copy.read, ((copy.left + 1, -3), (copy.back, 3)), (), 0, (copy,)) for copy in copies)
    options = Options(step, step, (10,) * 8, (0,) * 8, tuple(range(8)), tuple(Block("b", (way,)) for way in ways))
    made = workload_of(options, ways)
    later = [one.seconds - other.seconds for one, other in zip(made.tasks, step.tasks, strict=True)]
    # Forward: copied from 1.25 to 2.75, though block 1 ends at 2.45; then to 3.75, though the head ends at 3.25.
    # Backward begins there: copied until 5.25 and 6.25, read at 4.75 and, that wait included, at 7.65.
    assert later == pytest.approx([0, 0, 0.3, 0.5, 0, 0.5, 0, 0])
    assert [task.memory for task in made.tasks] == [10, 10, 10, 7, 10, 10, 10, 10]
