"""The plan that asks for no costs: a unit ahead, reduce at once, a few reduces in flight.

    compute     | unit 0      | unit 1      | unit 2      |          forward, and backward in reverse
    gathers      g0 g1          g2            g3                     unit i+1 starts where unit i is waited for
    reduces                 r0            r1            r2           right after the last gradient of the unit

It follows from which tasks read and write which units alone, so ranks whose batches differ in size have the same one.
"""

from fsdp_compile.passes.plan import Plan, Step
from fsdp_compile.passes.workload import Workload

_ORDER = {"free": 0, "wait_reduce": 1, "reduce": 1, "gather": 2, "wait": 3}  # before one task; waits as they are found


def one_ahead(workload: Workload, reduces_in_flight: int | None) -> Plan:
    """The plan for `workload`.

    Args:
        workload: one direction of a step.
        reduces_in_flight: how many reduces may run before the oldest is waited for; None: all, waited for at the end.
    """
    steps: list[Step] = []
    at = 0
    for unit, first, last in workload.gathers(workload.always_kept):
        name = (workload.units[unit].name,)
        steps += [Step("gather", name, at), Step("wait", name, first), Step("free", name, last + 1)]
        at = first
    reduces = [((workload.units[unit].name,), ready + 1) for unit, _, ready in workload.reduces()]
    for number, (name, at) in enumerate(reduces):
        if reduces_in_flight is not None and number >= reduces_in_flight:
            steps.append(Step("wait_reduce", reduces[number - reduces_in_flight][0], at))
        steps.append(Step("reduce", name, at))
    waited = {step.units for step in steps if step.kind == "wait_reduce"}
    steps += [Step("wait_reduce", name, len(workload.tasks)) for name, _ in reduces if name not in waited]
    return Plan(tuple(sorted(steps, key=lambda step: (step.at, _ORDER[step.kind]))))
