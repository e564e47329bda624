"""Planning of a whole step, before its graphs are known, together with the optimizer's update."""

from dataclasses import dataclass, replace
from itertools import pairwise

from fsdp_compile.passes.plan.plan import Plan, Step, simulate
from fsdp_compile.passes.plan.workload import Task, Workload, smallest_budget

ESTIMATED = 0.05  # how far, as a part, bytes of a step that are read from a joint graph may be from those of its graphs


def budget_of_step(workload: Workload, budget: int | None) -> int | None:
    """The budget for planning a whole step, whose bytes are an estimate: forward and backward are planned again.

    The estimate was seen to be up to 3 % above what they need. So a budget that is but a little below the smallest one
    is taken for that, and their own plans decide.
    """
    least = smallest_budget(workload)
    return least if budget is not None and (1 - ESTIMATED) * least <= budget < least else budget


@dataclass(frozen=True)
class UpdateCost:
    """Seconds and bytes of the optimizer's update of a model.

    Attributes:
        seconds: of the update of each unit of the workload; 0 if it has none.
        gradients: for each unit, bytes of its reduced gradients, which live until its update.
        before: seconds from the end of backward to the first update, beside the norm's all-reduce.
        after: seconds from the last update to the first task of the next forward.
        norm: seconds of the all-reduce of the gradients' norm, with its latency; None: gradients are not clipped.
        prefetch: how many units at most are gathered behind updates for the next forward; None: any number.
        in_backward: the units that are updated in backward, each as soon as its gradient is reduced.
        compare: seconds of the message by which ranks compare these gathers when the next forward is called, with its
            latency, if it goes over the same link, behind the gathers; otherwise 0.
    """

    seconds: tuple[float, ...]
    gradients: tuple[int, ...]
    before: float = 0.0
    after: float = 0.0
    norm: float | None = None
    prefetch: int | None = None
    compare: float = 0.0
    in_backward: tuple[int, ...] = ()


def updating_in_backward(workload: Workload, update: UpdateCost) -> Workload:
    """Return `workload` with the updates of `update.in_backward` as parts of its tasks, except those of the last units.

    A unit is updated, and its gradient freed, at the latest when the last gradient of a further unit is ready: before
    the further reduce begins, or the last task.
    """
    tasks = list(workload.tasks)
    ends = sorted({ready for _, _, ready in workload.reduces()})
    following = dict(pairwise(ends))
    for unit, _, ready in workload.reduces():
        if unit in update.in_backward and ready in following:
            at = min(following[ready] + 1, len(tasks) - 1)
            seconds = tasks[at].seconds + update.seconds[unit]
            tasks[at] = replace(tasks[at], seconds=seconds, reduced=(*tasks[at].reduced, unit))
    return replace(workload, tasks=tuple(tasks))


def with_update(step: Workload, update: UpdateCost) -> Workload:
    """Return the backward of `step`, the updates, and the forward of the next step, as one workload.

    Units are updated in the order of their indices, each when its reduce has been waited for; with clipping, the first
    one waits for all. During updates, everything that is alive at the end of backward lives, and gradients live until
    they are used. Of units that are updated in backward only the last are updated after it.
    """
    trained = tuple(sorted(step.writes))
    step = updating_in_backward(step, update)
    alive = step.tasks[-1].memory
    clips = update.norm is not None
    tasks = [Task("before updates", update.before, alive, reduced=trained * clips, all_reduce=update.norm or 0.0)]
    if update.in_backward:
        early = {unit for task in step.tasks for unit in task.reduced}
        last = tuple(unit for unit in update.in_backward if unit not in early)
        seconds = sum(update.seconds[unit] for unit in last)
        tasks.append(Task("last updates", seconds, alive, reduced=last, updates=update.in_backward))
    for unit, cost in enumerate(step.units):
        if unit in update.in_backward:
            continue
        reduced = (unit,) if unit in step.writes else ()
        tasks.append(Task(f"update {cost.name}", update.seconds[unit], alive, reduced=reduced, updates=(unit,)))
        alive = max(0, alive - update.gradients[unit])
    tasks.append(Task("next step", update.after, alive))
    if update.compare:
        tasks.append(Task("compare ranks", 0.0, alive, all_reduce=update.compare))
    tasks[:0] = step.tasks[step.backward :]
    by_first_read = sorted(step.reads_in_forward, key=lambda unit: step.reads_in_forward[unit])
    first = set(by_first_read[: update.prefetch])
    units = [replace(cost, may_prefetch=cost.may_prefetch and unit in first) for unit, cost in enumerate(step.units)]
    tasks_of_all = (*tasks, *step.tasks[: step.backward])
    return replace(step, tasks=tasks_of_all, backward=0, forward=len(tasks), units=tuple(units))


def prefetched(workload: Workload, plan: Plan) -> list[Step]:
    """The gathers of `plan` that are issued behind updates for the next forward, in order."""
    return [step for step in plan.of("gather") if workload.end_of_backward < step.at < workload.forward]


def arrivals_in_forward(workload: Workload, plan: Plan) -> dict[str, float]:
    """By unit, seconds into forward at which the gather ends that `plan` issues behind updates; in their order."""
    if not workload.forward:
        return {}
    timeline, steps = simulate(workload, plan), plan.of("gather", "reduce")
    ends = {step: span.end for step, span in zip(steps, timeline.link, strict=True)}
    begin = timeline.compute[workload.forward - 1].end
    return {name: max(0.0, ends[step] - begin) for step in prefetched(workload, plan) for name in step.units}
