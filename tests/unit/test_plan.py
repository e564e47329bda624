import random
from dataclasses import replace

import pytest
from workloads import blocks, no_prefetch, random_workload

from fsdp_compile.passes.plan.plan import Plan, PlanError, Step, simulate, verify
from fsdp_compile.passes.plan.schedule import keep_by_rule, order_of_blocks, search_plan
from fsdp_compile.passes.plan.workload import Task, UnitCost, Workload


def test_text():
    """A plan that is printed and read again is the same plan."""
    for seed in range(20):
        plan = search_plan(random_workload(random.Random(seed), 4)).plan
        assert Plan.parse(str(plan)) == plan


def test_by_right_prices_the_search_finds_the_order_of_blocks():
    """That order stands in docs/passes.md."""
    assert search_plan(blocks(2)).plan == order_of_blocks(blocks(2))


def test_verify_sees_what_is_missing():
    """A plan that lacks any one of its steps is refused."""
    for seed in range(20):
        workload = random_workload(random.Random(seed), 3)
        plan = search_plan(workload).plan
        for number in range(len(plan.steps)):
            with pytest.raises(PlanError):
                verify(workload, Plan((*plan.steps[:number], *plan.steps[number + 1 :])))


def test_verify_sees_what_is_late_or_early():
    """A wait after its reader, a free before its last reader, a reduce before its gradient: each is refused."""
    workload = blocks(3)
    plan = no_prefetch(workload)
    for kind, shift in (("wait", 1), ("free", -1), ("reduce", -1)):
        for number, step in enumerate(plan.steps):
            if step.kind == kind and step.at + shift >= 0:
                moved = [*plan.steps[:number], *plan.steps[number + 1 :], Step(kind, step.units, step.at + shift)]
                with pytest.raises(PlanError):
                    verify(workload, Plan(tuple(sorted(moved, key=lambda each: each.at))))


@pytest.mark.parametrize(
    "steps, message",
    [
        ((Step("gather", ("blocks.9",), 0),), r"gather .*: expected one of the 4 units, found blocks\.9"),
        ((Step("gather", ("root",), 99),), "expected steps in order, at 0 to 10, found 99"),
        ((Step("gather", ("root",), 3), Step("wait", ("root",), 2)), "expected steps in order, at 3 to 10, found 2"),
        ((Step("gather", ("root", "blocks.0"), 0), Step("wait", ("root",), 0)), "to wait for all of one launch, found"),
    ],
)
def test_verify_sees_steps_that_cannot_be(steps, message):
    """Steps of units or tasks that the workload does not have, in another order, or parts of a launch, are refused."""
    with pytest.raises(PlanError, match=message):
        verify(blocks(3), Plan(steps))


def test_verify_keep():
    """Only units that may stay between forward and backward do; by rule those of the root and of the last module."""
    assert keep_by_rule(blocks(3, keep=None)) == {0, 3}
    ours = search_plan(blocks(3, keep=True))
    assert ours.keep_unsharded == ("root", "blocks.0", "blocks.1", "blocks.2")
    with pytest.raises(PlanError, match="expected it freed after forward"):
        verify(blocks(3, keep=False), ours.plan)
    for keep in (None, True):  # an embedding, which backward does not read
        tasks = (Task("forward", 1.0, 0, (0,)), Task("backward", 1.0, 0, (), (0,)))
        step = Workload(tasks, 1, (UnitCost("embedding", 1.0, 1.0, 1, 1, keep_unsharded=keep),))
        assert search_plan(step).keep_unsharded == ()
        kept = ("at 0 gather", "at 0 wait", "at 2 free", "at 2 reduce", "at 2 wait_reduce")
        with pytest.raises(PlanError, match="at 2 free embedding: expected it freed with the forward that gathered it"):
            verify(step, Plan.parse("".join(f"{each} embedding\n" for each in kept)))


def test_verify_budget():
    """A plan over its budget is refused with the task and the bytes."""
    workload = blocks(5)
    found = search_plan(workload)
    memory = simulate(workload, found.plan).memory
    at = max(range(len(memory)), key=memory.__getitem__)
    said = rf"expected at most {found.peak - 1} bytes, found {found.peak} at task {at}, {workload.tasks[at].name}$"
    with pytest.raises(PlanError, match=said):
        verify(workload, found.plan, found.peak - 1)


def test_simulated_by_hand():
    """One unit, 2 s to gather, 3 to reduce, 1 and 4 s of computing: 2 + 1 + 2 + 4 + 3 s, 7 of them exposed."""
    unit = UnitCost("a", 2.0, 3.0, 10, 20)
    tasks = (Task("forward", 1.0, 5, (0,)), Task("backward", 4.0, 7, (0,), (0,)))
    timeline = simulate(Workload(tasks, 1, (unit,)), no_prefetch(Workload(tasks, 1, (unit,))))
    assert timeline.makespan == 12 and timeline.exposed == 7
    assert [timeline.exposed_of(span) for span in timeline.link] == [2, 2, 3]
    assert timeline.memory == [15, 37, 27]
    step = Workload((*tasks, Task("update", 1.0, reduced=(0,))), 1, (replace(unit, replicate=5.0),))
    assert simulate(step, no_prefetch(step)).makespan == 12 + 5 + 1  # an update in backward waits for the replicas
