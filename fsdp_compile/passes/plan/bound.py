"""What no plan can be below: the smallest memory and the shortest step."""

from itertools import accumulate

from fsdp_compile.passes.plan.workload import Workload


def least_memory(workload: Workload, keep: frozenset[int]) -> list[int]:
    """Bytes that live beside each task if units are gathered when they are read and reduced when they are ready."""
    costs = [(workload.units[unit], first, last) for unit, first, last in workload.gathers(keep)]
    held = [(first if unit.arrives is None else 0, last, unit.gathered) for unit, first, last in costs]
    held += [(0, last, workload.units[unit].gathered) for unit, last in workload.held(keep).items()]
    held += [(first, last, workload.units[unit].packed) for unit, first, last in workload.reduces()]
    changes = [0] * (len(workload.tasks) + 1)
    for first, last, size in held:
        changes[first] += size
        changes[last + 1] -= size
    return [task.memory + more for task, more in zip(workload.tasks, accumulate(changes), strict=False)]


def smallest_budget(workload: Workload, keep: frozenset[int] | None = None) -> int:
    """The smallest budget that has a plan: beside a task live what it reads and the gradients that it writes.

    Args:
        workload: the step.
        keep: units whose gathered buffers stay between forward and backward; None: only those that have to.
    """
    return max(least_memory(workload, workload.must_keep if keep is None else keep), default=0)


def lower_bound(workload: Workload, merge: int | None = None) -> float:
    """Seconds below which no plan can be, however much memory there is.

    Tasks follow each other, each after the gathers and reduces that it needs. The link carries one launch at a time,
    none of them before the task that it follows has ended; a launch of any number of units has one latency at least.
    As few units as possible are gathered twice.

    Args:
        workload: the step.
        merge: 1: each unit has a launch of its own.
    """
    latency, tasks = workload.latency, workload.tasks
    each = latency if merge == 1 or not workload.can_coalesce else 0.0  # of each unit; otherwise of all together
    needs: list[list[tuple[int, float]]] = [[] for _ in range(len(tasks) + 1)]  # released before which task, seconds
    replicas: list[tuple[int, int, float]] = []
    under_way, arrived, latest = 0.0, 0, 0
    for unit, first, _ in workload.gathers(workload.must_keep | set(workload.may_keep)):
        early, free = workload.first_issue(unit, first)
        if workload.forward and free:
            latest = early = max(early, latest) if min(early, latest) >= 0 else -1
        if (arrives := workload.units[unit].arrives) is None:
            needs[first].append((free if early < 0 else early, workload.units[unit].gather + each))
        else:
            needs[first].append((0, max(0.0, arrives - under_way)))
            under_way, arrived = max(under_way, arrives), arrived + 1
    needed = {unit: at for at, task in reversed([*enumerate(tasks)]) for unit in task.reduced}
    for unit, _, ready in workload.reduces():
        cost, at = workload.units[unit], needed.get(unit, len(tasks))
        needs[at].append((ready + 1, cost.reduce + each))
        if cost.replicate:
            replicas.append((at, ready + 1, cost.reduce + cost.replicate + 2 * latency))
    ends, before = [0.0], list[tuple[int, float]]()
    for at, needed_here in enumerate(needs):
        start = ends[at]
        if needed_here:
            before = sorted([*before, *needed_here])
            carried = 0.0
            for released, seconds in before:
                carried = max(carried, ends[released]) + seconds
            start = max(start, carried + (latency - each if len(before) > arrived else 0.0))
        start = max([start, *(ends[ready] + seconds for place, ready, seconds in replicas if place == at)])
        ends.append(start + (tasks[at].all_reduce + tasks[at].seconds if at < len(tasks) else 0.0))
    return ends[-1] * (1 - 1e-12)  # sums are rounded
