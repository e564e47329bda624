"""The rules of a plan, checked without the planner's help: on every plan before it is applied.

Each unit that a task reads is gathered and waited for before that task, and freed after its last; each gradient is
reduced once, after the last task that writes it, and waited for within the step; memory stays within the budget.
"""

from collections import Counter
from collections.abc import Iterator

from fsdp_compile.passes.plan.plan import Plan, PlanError, Step
from fsdp_compile.passes.plan.simulate import simulate
from fsdp_compile.passes.plan.workload import Workload

_FOLLOWS = {"gather": "free", "wait": "gather", "free": "wait", "reduce": None, "wait_reduce": "reduce"}


def verify(workload: Workload, plan: Plan, budget: int | None = None) -> None:
    """Raise PlanError, naming the step, the unit and the rule, if `plan` is not one for `workload`.

    Args:
        workload: what the step computes.
        plan: any plan, also one written by hand.
        budget: the most bytes that may live at once; None: no limit.
    """
    _check_steps(workload, plan)
    _check_cycles(workload, plan)
    _check_reads(workload, plan)
    _check_reduces(workload, plan)
    if budget is not None:
        _check_budget(workload, plan, budget)


def _check_steps(workload: Workload, plan: Plan) -> None:
    names = Counter(unit.name for unit in workload.units)
    before = 0
    for step in plan.steps:
        if not before <= step.at <= len(workload.tasks):
            raise PlanError(f"{step}: expected steps in order, at {before} to {len(workload.tasks)}, found {step.at}")
        before = step.at
        for name in step.units:
            if names[name] != 1:
                raise PlanError(f"{step}: expected one of the {len(names)} units, found {name}")


def _check_cycles(workload: Workload, plan: Plan) -> None:
    """A unit is gathered, waited for, freed, gathered; reduced, waited for; each launch is waited for as a whole."""
    last: dict[tuple[bool, str], Step] = {}
    for step in plan.steps:
        reduces = step.kind in ("reduce", "wait_reduce")
        for name in step.units:
            found = last.get((reduces, name))
            expected = _FOLLOWS[step.kind]
            if (found.kind if found else "free" if step.kind == "gather" else None) != expected:
                raise PlanError(
                    f"{step}: expected the {expected or 'only reduce'} of {name} before, found {found or 'nothing'}"
                )
            if step.kind in ("wait", "wait_reduce") and found is not None and found.units != step.units:
                raise PlanError(f"{step}: expected to wait for all of one launch, found the launch {found}")
            last[reduces, name] = step
    for (reduces, _), step in last.items():
        if step.kind != ("wait_reduce" if reduces else "free"):
            raise PlanError(f"{step}: expected a {'wait_reduce' if reduces else 'free'} after it, found the plan's end")


def _open_intervals(plan: Plan, name: str) -> Iterator[tuple[int, int, int]]:
    """From each gather of a unit: where it is gathered, waited for, and freed."""
    steps = [step for step in plan.of("gather", "wait", "free") if name in step.units]
    for gather, wait, free in zip(steps[::3], steps[1::3], steps[2::3], strict=True):
        yield gather.at, wait.at, free.at


def _check_reads(workload: Workload, plan: Plan) -> None:
    for number, unit in enumerate(workload.units):
        intervals = list(_open_intervals(plan, unit.name))
        for index, task in enumerate(workload.tasks):
            if number in task.reads and not any(wait <= index < free for _, wait, free in intervals):
                raise PlanError(f"task {index}, {task.name}, reads {unit.name}: expected it gathered, found it freed")
        for gather, _, free in intervals:
            _check_boundary(workload, number, gather, free)


def _check_boundary(workload: Workload, number: int, gather: int, free: int) -> None:
    """Forward and backward are two graphs: between them there is a gathered buffer, or none, as the unit demands."""
    unit, crosses = workload.units[number], gather < workload.backward < free
    kept = crosses and any(first < free for first, _ in [workload.reads_in_backward.get(number, (free, free))])
    if crosses and not kept:
        raise PlanError(f"at {free} free {unit.name}: expected it freed with the forward that gathered it")
    if kept and unit.keep is False:
        raise PlanError(f"at {free} free {unit.name}: expected it freed after forward, found it kept for backward")


def _check_reduces(workload: Workload, plan: Plan) -> None:
    reduces = {name: step for step in plan.of("reduce") for name in step.units}
    for number, (_, ready) in workload.writes.items():
        name = workload.units[number].name
        if name not in reduces:
            raise PlanError(f"{name}: expected a reduce of its gradients, found none")
        if reduces[name].at <= ready:
            raise PlanError(f"{reduces[name]}: expected it after task {ready}, which writes the last gradient")


def _check_budget(workload: Workload, plan: Plan, budget: int) -> None:
    memory = simulate(workload, plan).memory
    over = max(range(len(memory)), key=memory.__getitem__)
    if memory[over] > budget:
        name = workload.tasks[over].name if over < len(workload.tasks) else "the end of the step"
        raise PlanError(f"budget: expected at most {budget} bytes, found {memory[over]} at task {over}, {name}")
