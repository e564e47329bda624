"""The optimizer's update in a workload: a step that repeats, cut between forward and backward.

    updating_in_backward   backward  ->  backward in which each unit is updated when its gradient is reduced
    with_update       forward, backward  ->  backward, before updates, update of each unit, next step, forward
    without_update    the way back, for rules that know of no update
    repeated          a plan of the one as a plan of the other, which gathers nothing behind updates

A step with updates, whose gathers for the next forward begin behind these:

    computing    backward | clip | update a | update b | update c | next step         | forward a | forward b
    link         reduces  |norm|            [gather a ][gather b ]           |compare|[gather c ]
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from fsdp_compile.passes.plan.plan import Plan, Step, simulate
from fsdp_compile.passes.plan.workload import Task, Workload


@dataclass(frozen=True)
class UpdateCost:
    """What the update of a whole model takes.

    Attributes:
        seconds: for each unit of the workload, of its update; 0 if it has none.
        gradients: for each unit, bytes of its reduced gradients, which live until its update.
        before: seconds from the end of backward to the first update, beside the norm's all-reduce.
        after: seconds from the last update to the first task of the next forward.
        norm: seconds of the all-reduce of the gradients' norm, with its latency; None: gradients are not clipped.
        prefetch: of how many units at most the gathers for the next forward start behind updates; None: of any number.
        in_backward: the units that are updated in backward, each as soon as its gradient is reduced.
        compare: seconds of the message by which ranks compare what they know of these gathers when the next forward is
            called, with its latency: it goes over the same link, behind the gathers; 0: it goes elsewhere.
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
    """`workload` with the updates of `update.in_backward` as parts of its tasks, or, of the last units, behind them.

    A unit is updated, and its gradient freed, when the last gradient of a further unit is there, at the latest: before
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
    """`step`, forward and backward, with the update between that backward and the next forward.

    Units are updated in the order of their indices, each when its reduce has been waited for; with clipping, the first
    one waits for all. Beside updates live what is alive at the end of backward, and gradients until they are used. Of
    units that are updated in backward only the last follow it.
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


def without_update(workload: Workload) -> Workload:
    """The forward and the backward of a step with updates, in this order."""
    forward = workload.tasks[workload.forward :]
    return replace(
        workload, tasks=forward + workload.tasks[: end_of_backward(workload)], backward=len(forward), forward=0
    )


def repeated(workload: Workload, plan: Plan) -> Plan:
    """`plan`, of `without_update(workload)`, as a plan of `workload`: reduces are waited for before any update."""
    split = len(workload.tasks) - workload.forward
    # What is freed right between forward and backward was read in forward, unless it was gathered there again.
    count = next((i for i, s in enumerate(plan.steps) if s.at > split or (s.at == split and s.kind != "free")), None)
    forward = [replace(step, at=step.at + workload.forward) for step in plan.steps[:count]]
    backward = [replace(step, at=step.at - split) for step in plan.steps[len(forward) :]]
    return Plan((*backward, *forward))


def prefetched(workload: Workload, plan: Plan) -> list[Step]:
    """The steps of `plan` that gather for the next forward behind updates, in order."""
    return [step for step in plan.of("gather") if end_of_backward(workload) < step.at < workload.forward]


def arrivals_in_forward(workload: Workload, plan: Plan) -> dict[str, float]:
    """By unit, how long after forward begins the gather ends that `plan` issues behind updates; in their order."""
    if not workload.forward:
        return {}
    timeline, steps = simulate(workload, plan), plan.of("gather", "reduce")
    ends = {step: span.end for step, span in zip(steps, timeline.link, strict=True)}
    begin = timeline.compute[workload.forward - 1].end
    return {name: max(0.0, ends[step] - begin) for step in prefetched(workload, plan) for name in step.units}


def end_of_backward(workload: Workload) -> int:
    """The first task after the backward that comes first in a step with updates; 0 if there are none."""
    return next((at for at, task in enumerate(workload.tasks) if task.updates), 1) - 1
