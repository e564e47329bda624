"""Plans with a fixed prefetch distance, in which other systems place collectives (FSDP2, DeepCompile)."""

from itertools import groupby

from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.plan.schedule import Gather, Position, keep_by_rule, plan_of
from fsdp_compile.passes.plan.workload import Workload


def prefetch(workload: Workload, forward: int, backward: int, before_wait: bool, in_flight: int) -> Plan:
    """The plan with a fixed prefetch distance. Reduces are issued as they get ready.

    The last unit of forward stays gathered for backward, which reads it first, if the step leaves that open.

    Args:
        workload: the step.
        forward: how many units ahead of the one that is waited for a gather is issued in forward.
        backward: the same in backward.
        before_wait: whether that gather is issued before the wait.
        in_flight: reduces that may be under way at once, the one that is issued included.
    """
    gathers, reduces = workload.gathers(keep_by_rule(workload)), workload.reduces()
    split = sum(first < workload.backward for _, first, _ in gathers)
    issued = _issue_positions(workload, gathers[:split], 0, 0, forward, before_wait)
    issued += _issue_positions(workload, gathers[split:], split, workload.backward, backward, before_wait)
    # Each reduce is waited for before there would be more than `in_flight` under way, the rest at the end.
    waited: list[Position] = [(ready + 1, 1, 2 * each) for each, (_, _, ready) in enumerate(reduces)][in_flight:]
    waited += [(len(workload.tasks), 3, each) for each in range(len(waited), len(reduces))]
    return plan_of(workload, gathers, issued, waited)


def _issue_positions(
    workload: Workload, gathers: list[Gather], offset: int, start: int, distance: int, before_wait: bool
) -> list[Position]:
    """Where `gathers`, the first of which is number `offset`, are issued.

    The first `distance` modules are gathered before task `start`, others beside the first wait of the module that is so
    many before.
    """
    names, positions = [workload.units[unit].of_module for unit, _, _ in gathers], list[Position]()
    modules = [list(group) for _, group in groupby(range(len(gathers)), key=names.__getitem__)]
    for index, module in enumerate(modules):
        if index < distance:
            positions += [(start, 2, each - len(gathers)) for each in module]
        else:
            beside = modules[index - distance][0]
            place = 4 * (offset + beside) + (-1 if before_wait else 1)  # right before its wait, or right after it
            positions += [(gathers[beside][1], 2, place)] * len(module)
    return positions
