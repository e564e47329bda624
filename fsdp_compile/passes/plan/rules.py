"""Plans by a fixed rule, without a search: what other systems do, and what a plan needs at least.

    no_prefetch    gather when a unit is read, reduce when its gradients are ready, wait at once: the least memory
    prefetch       gather so many units before they are read; FSDP2's plan is one of these
    alternating    one unit before; in backward the link carries either a gather or a reduce, never both

The units of one module (of two dtypes, or frozen beside trained parameters) are gathered together. A rule that looked
one such unit ahead would reach the unit that is read next, and nothing would hide the module after that.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

from fsdp_compile.passes.plan.plan import Kind, Plan, Step
from fsdp_compile.passes.plan.workload import Workload

_Position = tuple[int, int, int]  # before which task; 0: frees, 1: reduces, 2: gathers, 3: the end; order among these
_Gather = tuple[int, int, int]  # unit, first and last task that read it


def no_prefetch(workload: Workload) -> Plan:
    """The plan that needs the least memory: gather when a unit is read, reduce when it is ready, wait at once."""
    gathers = workload.gathers(workload.must_keep)
    issued: list[_Position] = [(first, 2, index - len(gathers)) for index, (_, first, _) in enumerate(gathers)]
    waited: list[_Position] = [(ready + 1, 1, 2 * each + 2) for each, (_, _, ready) in enumerate(workload.reduces())]
    return _plan(workload, gathers, issued, waited)


def prefetch(workload: Workload, forward: int, backward: int, before_wait: bool, in_flight: int) -> Plan:
    """The plan with a fixed prefetch distance: gathers so many units ahead, reduces as they get ready.

    The last unit of forward stays for backward, which reads it first, where the step leaves that open.

    Args:
        workload: the step.
        forward: how many units ahead of the one that is waited for a gather is issued in forward.
        backward: the same in backward.
        before_wait: whether that gather is issued before the wait.
        in_flight: reduces that may be under way at once, the one that is issued included.
    """
    gathers, reduces = workload.gathers(keep_by_rule(workload)), workload.reduces()
    split = sum(first < workload.backward for _, first, _ in gathers)
    issued = _ahead(workload, gathers[:split], 0, 0, forward, before_wait)
    issued += _ahead(workload, gathers[split:], split, workload.backward, backward, before_wait)
    # Each reduce is waited for before there would be more than `in_flight` under way, the rest at the end.
    waited: list[_Position] = [(ready + 1, 1, 2 * each) for each, (_, _, ready) in enumerate(reduces)][in_flight:]
    waited += [_at_the_end(workload, each) for each in range(len(waited), len(reduces))]
    return _plan(workload, gathers, issued, waited)


def alternating(workload: Workload) -> Plan:
    """The plan by which a backward has one gathered buffer beside the one that it reads, or one reduce: not both.

    Reduces and gathers share a link. While a unit computes its backward, first the reduce of the unit before is under
    way, then the gather of the next one, each for a part of that time as large as its part of the bytes. If they take
    less time than computing does, no more is exposed than with both at once, and a buffer less is alive.
    """
    gathers, reduces = workload.gathers(keep_by_rule(workload)), workload.reduces()
    split = sum(first < workload.backward for _, first, _ in gathers)
    back = gathers[split:]
    modules = _modules(workload, back)
    issued = _ahead(workload, gathers[:split], 0, 0, 1, True)
    issued += [(workload.backward, 2, each - len(modules[0])) for each in modules[0]] if modules else []
    waits = {each: ready + 1 for each, (_, _, ready) in enumerate(reduces[1:])}  # at the latest: with the next one
    for module, following in pairwise(modules):
        first, end = back[module[0]][1], back[following[0]][1]
        due = [each for each, (_, _, ready) in enumerate(reduces) if ready < first < waits.get(each, end)]
        sent = sum(workload.units[reduces[each][0]].packed for each in due)
        gathered = sum(workload.units[back[each][0]].gathered for each in following)
        # The task before which about that part of the computing is done that `sent` has among all bytes.
        done = [0.0, *accumulate(task.seconds for task in workload.tasks[first:end])]
        share = done[-1] * sent / ((sent + gathered) or 1)
        switch = first + min(range(len(done)), key=lambda each: abs(done[each] - share))
        # Never after the module's own reduce: the switch goes by this device's costs, and launches have one order.
        units = [back[each][0] for each in module]
        own = [workload.writes[unit][1] for unit in units if unit in workload.writes]
        switch = max(first, min([switch, *own]))
        waits.update((each, min(switch, waits.get(each, switch))) for each in due)
        issued += [_beside_wait(switch, split + module[0], True)] * len(following)
    waited = [
        (waits[each], 1, 2 * each + 4) if each in waits else _at_the_end(workload, each) for each in range(len(reduces))
    ]
    return _plan(workload, gathers, issued, waited)


def keep_by_rule(workload: Workload) -> frozenset[int]:
    """What has to be kept unsharded, and the unit that forward reads last, if it may be."""
    forward = sorted(workload.reads_in_forward, key=lambda unit: workload.reads_in_forward[unit])
    return workload.must_keep | (set(forward[-1:]) & set(workload.may_keep))


def _modules(workload: Workload, gathers: list[_Gather]) -> list[Sequence[int]]:
    """Which of `gathers` are of one module and follow each other."""
    names = [workload.units[unit].module or workload.units[unit].name for unit, _, _ in gathers]
    return [list(group) for _, group in groupby(range(len(gathers)), key=names.__getitem__)]


def _ahead(
    workload: Workload, gathers: list[_Gather], offset: int, start: int, distance: int, before_wait: bool
) -> list[_Position]:
    """Where `gathers`, the first of which is number `offset`, are issued: of the first `distance` modules before task
    `start`, of others beside the first wait of the module so many before.
    """
    modules, positions = _modules(workload, gathers), list[_Position]()
    for index, module in enumerate(modules):
        if index < distance:
            positions += [(start, 2, each - len(gathers)) for each in module]
        else:
            beside = modules[index - distance][0]
            positions += [_beside_wait(gathers[beside][1], offset + beside, before_wait)] * len(module)
    return positions


def _beside_wait(at: int, index: int, before_wait: bool) -> _Position:
    """Before task `at`, and where gather `index` is waited for there, before or after that."""
    return at, 2, 4 * index - 1 if before_wait else 4 * index + 1


def _at_the_end(workload: Workload, index: int) -> _Position:
    return len(workload.tasks), 3, index


def _plan(workload: Workload, gathers: list[_Gather], issued: list[_Position], waited: list[_Position]) -> Plan:
    """Gathers are waited for at their first reader and freed after the last, reduces issued when they are ready.

    Args:
        workload: the step.
        gathers: all of it, in order.
        issued: where each of them is issued.
        waited: where each reduce is waited for.
    """
    steps: list[tuple[_Position, Kind, int]] = []
    for index, ((unit, first, last), position) in enumerate(zip(gathers, issued, strict=True)):
        steps += [(position, "gather", unit), ((first, 2, 4 * index), "wait", unit)]
        steps.append(((last + 1, 0, index), "free", unit))
    for index, ((unit, _, ready), position) in enumerate(zip(workload.reduces(), waited, strict=True)):
        steps += [((ready + 1, 1, 2 * index + 1), "reduce", unit), (position, "wait_reduce", unit)]
    steps.sort(key=lambda step: step[0])
    return Plan(tuple(Step(kind, (workload.units[unit].name,), position[0]) for position, kind, unit in steps))
