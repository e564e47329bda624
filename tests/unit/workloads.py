"""Random and regular steps for tests of the planner."""

import random

from fsdp_compile.passes.plan.plan import Plan, Step
from fsdp_compile.passes.plan.workload import Task, UnitCost, Workload


def random_workload(rng: random.Random, count: int, may_keep: bool = True) -> Workload:
    """A step of `count` units with small whole numbers: idle links, ties, tight places, a root that is read twice."""
    hybrid = rng.random() < 0.2
    choices = (False, None, None, True) if may_keep else (False, False, True)
    units = []
    for number in range(count):
        size = rng.randint(1, 4)
        replicate = rng.randint(1, 4) if hybrid else 0
        keep = rng.choice(choices)
        units.append(UnitCost(f"u{number}", rng.randint(1, 6), rng.randint(1, 6), size, size, replicate, keep))
    ends = (0,) if count > 1 and rng.random() < 0.4 else ()  # what the last unit's tasks read beside it
    tasks = []
    for number in range(count):
        root = ends if number == count - 1 else ()
        tasks.append(Task(f"f{number}", rng.randint(0, 6), rng.randint(0, 3) + number, (number, *root)))
    for number in reversed(range(count)):
        root = ends if number == count - 1 else ()
        seconds, memory = rng.randint(0, 9), rng.randint(0, 3) + number
        tasks.append(Task(f"b{number}", seconds, memory, (number, *root), (number, *root)))
    return Workload(tuple(tasks), count, tuple(units), rng.choice([0, 0, 1, 2]))


def blocks(
    count: int, forward: float = 1.2, latency: float = 0.02, keep: bool | None = False, rng: random.Random | None = None
) -> Workload:
    """A root around `count` blocks. A block takes the link about 1 s, and computes `forward` and twice that."""

    def about(seconds: float) -> float:
        return seconds * rng.uniform(0.5, 1.5) if rng else seconds

    units = [UnitCost("root", about(0.7), about(0.7), 70, 70, 0, keep)]
    units += [UnitCost(f"blocks.{number}", about(1.0), about(1.0), 100, 100, 0, keep) for number in range(count)]
    tasks = [Task("embedding", 0.05, 0, (0,))]
    tasks += [Task(f"blocks.{n} forward", about(forward), n, (n + 1,)) for n in range(count)]
    tasks += [Task("head", 0.5, count, (0,)), Task("head backward", 1.0, count, (0,), (0,))]
    tasks += [Task(f"blocks.{n} backward", about(2 * forward), n, (n + 1,), (n + 1,)) for n in reversed(range(count))]
    tasks += [Task("embedding backward", 0.05, 0, (), (0,))]
    return Workload(tuple(tasks), count + 2, tuple(units), latency)


def no_prefetch(workload: Workload) -> Plan:
    """The plan that needs the least memory: gather when a unit is read, reduce when it is ready, wait at once."""
    steps = []  # before which task; frees, reduces, gathers; the order among these
    for number, (unit, first, last) in enumerate(workload.gathers(workload.must_keep)):
        name = (workload.units[unit].name,)
        steps += [
            ((first, 2, 0, number), Step("gather", name, first)),
            ((first, 2, 1, number), Step("wait", name, first)),
        ]
        steps.append(((last + 1, 0, 0, number), Step("free", name, last + 1)))
    for number, (unit, _, ready) in enumerate(workload.reduces()):
        both = (Step(kind, (workload.units[unit].name,), ready + 1) for kind in ("reduce", "wait_reduce"))
        steps += [((ready + 1, 1, number, count), step) for count, step in enumerate(both)]
    return Plan(tuple(step for _, step in sorted(steps)))
