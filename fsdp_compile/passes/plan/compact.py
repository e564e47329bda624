"""Launch gathers no earlier than pays: the same order, no longer a step, less memory."""

from bisect import bisect_right
from dataclasses import replace

from fsdp_compile.passes.plan.plan import Plan, Step
from fsdp_compile.passes.plan.simulate import Timeline, simulate
from fsdp_compile.passes.plan.workload import Workload


def compact(workload: Workload, plan: Plan) -> Plan:
    """`plan` with gathers moved to later tasks, as long as each still has twice its time until it is read.

    The other half is for links that are slower than they were said to be.
    """
    timeline = simulate(workload, plan)
    moved = _moved(plan, timeline)
    after = simulate(workload, moved)
    return moved if after.makespan <= timeline.makespan and after.peak <= timeline.peak else plan


def _moved(plan: Plan, timeline: Timeline) -> Plan:
    """From the last launch to the first: the latest task before which each may be issued."""
    starts = [*(span.start for span in timeline.compute), float("inf")]
    spans = list(timeline.link)
    readers: dict[tuple[str, ...], int] = {}
    steps = list(plan.steps)
    latest, place = float("inf"), len(starts) - 1  # of the launch that follows: when it starts, where it is issued
    for number, step in reversed(list(enumerate(steps))):
        if step.kind == "wait":
            readers[step.units] = step.at
        elif step.kind in ("gather", "reduce"):
            span = spans.pop()
            end = span.end if step.kind == "reduce" else starts[readers[step.units]] - span.seconds
            latest = min(latest, end) - span.seconds
            place = min(place, _last_before(starts, latest)) if step.kind == "gather" else step.at
            place = max(place, step.at)
            steps[number] = replace(step, at=place)
    return Plan(tuple(sorted(steps, key=lambda step: (step.at, not _gives_back(step, plan)))))


def _last_before(starts: list[float], latest: float) -> int:
    """The last task that starts no later than `latest`."""
    return bisect_right(starts, latest) - 1


def _gives_back(step: Step, plan: Plan) -> bool:
    """Whether the step gives memory back that a launch in the same place can take."""
    if step.kind == "wait_reduce":
        return all(other.at < step.at for other in plan.of("reduce") if other.units == step.units)
    return step.kind == "free"
