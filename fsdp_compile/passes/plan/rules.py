"""Plans by a fixed rule: gathers when a unit is read or some units ahead, reduces as they get ready.

What one module has in several units (of two dtypes, frozen beside trained) is gathered as one: a rule that looked one
such unit ahead would find what is read next, and nothing would hide the module after that.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

from fsdp_compile.passes.plan.plan import Kind, Plan, Step
from fsdp_compile.passes.plan.workload import Workload

_Place = tuple[int, int, int]  # before which task; frees, reduces, gathers; in order
_Gather = tuple[int, int, int]  # unit, first and last task that read it


def no_prefetch(workload: Workload) -> Plan:
    """The plan that needs the least memory: gather when a unit is read, reduce when it is ready, wait at once."""
    gathers = workload.gathers(workload.must_keep)
    issued: list[_Place] = [(first, 2, number - len(gathers)) for number, (_, first, _) in enumerate(gathers)]
    waited: list[_Place] = [(ready + 1, 1, 2 * each + 2) for each, (_, _, ready) in enumerate(workload.reduces())]
    return _plan(workload, gathers, issued, waited)


def prefetch(workload: Workload, forward: int, backward: int, before_wait: bool, in_flight: int) -> Plan:
    """The plan by a rule: gathers so many units ahead, reduces at once.

    The last unit of forward stays for backward, which reads it first, where the step leaves that open.

    Args:
        workload: the step.
        forward: how many units ahead of the one that is waited for a gather is issued in forward.
        backward: the same in backward.
        before_wait: whether that gather is issued before the wait.
        in_flight: reduces that may be under way at once, the one that is issued included.
    """
    gathers = workload.gathers(keep_by_rule(workload))
    split = _first_of_backward(workload, gathers)
    issued = _ahead(workload, gathers[:split], 0, 0, forward, before_wait)
    issued += _ahead(workload, gathers[split:], split, workload.backward, backward, before_wait)
    return _plan(workload, gathers, issued, _once_in_flight(workload, in_flight))


def alternating(workload: Workload) -> Plan:
    """The plan by which a backward has one gathered buffer beside the one that it reads, or one reduce: not both.

    Reduces and gathers share a link. While a unit computes its backward, first the reduce of the unit before is under
    way, then the gather of the next one, each for a part of that time as large as its part of the bytes. If they take
    less time than computing does, no more is exposed than with both at once, and a buffer less is alive.
    """
    gathers = workload.gathers(keep_by_rule(workload))
    split = _first_of_backward(workload, gathers)
    modules = _modules(workload, gathers[split:])
    turns, waits = _turns(workload, gathers[split:], modules)
    issued = _ahead(workload, gathers[:split], 0, 0, 1, True)
    issued += [(workload.backward, 2, each - len(modules[0])) for each in modules[0]] if modules else []
    for at, (before, following) in zip(turns, pairwise(modules), strict=True):
        issued += [_beside_wait(at, split + before[0], True)] * len(following)
    numbers = range(len(workload.reduces()))
    waited = [(waits[each], 1, 2 * each + 4) if each in waits else _at_the_end(workload, each) for each in numbers]
    return _plan(workload, gathers, issued, waited)


def _modules(workload: Workload, gathers: list[_Gather]) -> list[Sequence[int]]:
    """Which of `gathers` are of one module and follow each other."""
    names = [workload.units[unit].module or workload.units[unit].name for unit, _, _ in gathers]
    return [list(run) for _, run in groupby(range(len(gathers)), key=names.__getitem__)]


def _turns(
    workload: Workload, gathers: list[_Gather], modules: list[Sequence[int]]
) -> tuple[list[int], dict[int, int]]:
    """Before which task the gathers of each of backward's modules but the first are issued; each reduce waited for.

    By number; what is waited for at the end is left out.
    """
    reduces = workload.reduces()
    waits = {number: ready + 1 for number, (_, _, ready) in enumerate(reduces[1:])}  # at the latest: with the next one
    turns = []
    for module, following in pairwise(modules):
        first, end = gathers[module[0]][1], gathers[following[0]][1]
        due = [each for each, (_, _, ready) in enumerate(reduces) if ready < first < waits.get(each, end)]
        sent = sum(workload.units[reduces[each][0]].packed for each in due)
        gathered = sum(workload.units[gathers[each][0]].gathered for each in following)
        turn = _turn(workload, first, end, sent, gathered)
        ready = [
            workload.writes[unit][1] for unit, _, _ in (gathers[each] for each in module) if unit in workload.writes
        ]
        turns.append(max(first, min([turn, *ready])))  # never after the next reduce: ranks may turn elsewhere
        waits.update((each, min(turns[-1], waits.get(each, turns[-1]))) for each in due)
    return turns, waits


def _turn(workload: Workload, first: int, end: int, sent: int, gathered: int) -> int:
    """The task, from `first` to `end`, before which about the part of the work is done that `sent` bytes may take."""
    done = [0.0, *accumulate(task.seconds for task in workload.tasks[first:end])]
    share = done[-1] * sent / ((sent + gathered) or 1)
    return first + min(range(len(done)), key=lambda number: abs(done[number] - share))


def keep_by_rule(workload: Workload) -> frozenset[int]:
    """What has to be kept, and the unit that forward reads last, if it may be."""
    forward = sorted(workload.reads_in_forward, key=lambda unit: workload.reads_in_forward[unit])
    return workload.must_keep | (set(forward[-1:]) & set(workload.may_keep))


def _first_of_backward(workload: Workload, gathers: list[_Gather]) -> int:
    """How many of `gathers` are forward's."""
    return sum(first < workload.backward for _, first, _ in gathers)


def _ahead(
    workload: Workload, gathers: list[_Gather], number: int, start: int, ahead: int, before_wait: bool
) -> list[_Place]:
    """Where gathers from a `number` on are issued: of so many modules before task `start`, of others beside the first
    wait of an earlier module.
    """
    modules, places = _modules(workload, gathers), list[_Place]()
    for index, module in enumerate(modules):
        if index < ahead:
            places += [(start, 2, each - len(gathers)) for each in module]
        else:
            beside = modules[index - ahead][0]
            places += [_beside_wait(gathers[beside][1], number + beside, before_wait)] * len(module)
    return places


def _beside_wait(at: int, number: int, before_wait: bool) -> _Place:
    """Before task `at`, and where the gather of a `number` is waited for there, before or after that."""
    return at, 2, 4 * number - 1 if before_wait else 4 * number + 1


def _once_in_flight(workload: Workload, in_flight: int) -> list[_Place]:
    """Where reduces are waited for: each before there would be more than `in_flight` under way; the rest at the end."""
    reduces = workload.reduces()
    places: list[_Place] = [(ready + 1, 1, 2 * later) for later, (_, _, ready) in enumerate(reduces)][in_flight:]
    return places + [_at_the_end(workload, number) for number in range(len(places), len(reduces))]


def _at_the_end(workload: Workload, number: int) -> _Place:
    return len(workload.tasks), 3, number


def _plan(workload: Workload, gathers: list[_Gather], issued: list[_Place], waited: list[_Place]) -> Plan:
    """Gathers are waited for at their first reader and freed after the last, reduces issued when they are ready.

    Args:
        workload: the step.
        gathers: all of it, in order.
        issued: where each of them is issued.
        waited: where each reduce is waited for.
    """
    steps: list[tuple[_Place, Kind, int]] = []
    for number, ((unit, first, last), place) in enumerate(zip(gathers, issued, strict=True)):
        steps += [
            (place, "gather", unit),
            ((first, 2, 4 * number), "wait", unit),
            ((last + 1, 0, number), "free", unit),
        ]
    for number, ((unit, _, ready), place) in enumerate(zip(workload.reduces(), waited, strict=True)):
        steps += [((ready + 1, 1, 2 * number + 1), "reduce", unit), (place, "wait_reduce", unit)]
    steps.sort(key=lambda step: step[0])
    return Plan(tuple(Step(kind, (workload.units[unit].name,), place[0]) for place, kind, unit in steps))
