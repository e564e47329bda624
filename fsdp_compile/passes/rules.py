"""Plans by a fixed rule: gathers a number of units ahead, reduces as they get ready."""

from collections.abc import Iterator
from itertools import accumulate

from fsdp_compile.passes.plan import Kind, Plan, Step
from fsdp_compile.passes.workload import Workload

_Place = tuple[int, int, int]  # before which task; frees, reduces, gathers; in order
_Gather = tuple[int, int, int]  # unit, first and last task that read it


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
    gathers, split = workload.gathers(kept_by_rule(workload)), workload.backward
    steps = [((last + 1, 0, number), _step(workload, "free", unit)) for number, (unit, _, last) in enumerate(gathers)]
    steps += _gathers(workload, [each for each in gathers if each[1] < split], 0, forward, before_wait)
    steps += _gathers(workload, [each for each in gathers if each[1] >= split], split, backward, before_wait)
    steps += _reduces(workload, in_flight)
    return Plan(tuple(Step(step.kind, step.units, at) for (at, _, _), step in sorted(steps, key=lambda each: each[0])))


def take_turns(workload: Workload) -> Plan:
    """The plan by which a backward has one gathered buffer beside the one that it reads, or one reduce: not both.

    Reduces and gathers share a link. While a unit computes its backward, first the reduce of the unit before is under
    way, then the gather of the next one, each for a part of that time as large as its part of the bytes. If they take
    less time than computing does, no more is exposed than with both at once, and a buffer less is alive.
    """
    gathers, split = workload.gathers(kept_by_rule(workload)), workload.backward
    steps = [((last + 1, 0, number), _step(workload, "free", unit)) for number, (unit, _, last) in enumerate(gathers)]
    steps += _gathers(workload, [each for each in gathers if each[1] < split], 0, 1, True)
    backward = [each for each in gathers if each[1] >= split]
    reduces = workload.reduces()
    ready_at = {unit: ready for unit, _, ready in reduces}
    waits = {number: ready + 1 for number, (_, _, ready) in enumerate(reduces[1:])}  # at the latest: with the next one
    steps += [((split, 2, -1), _step(workload, "gather", unit)) for unit, _, _ in backward[:1]]
    for number, (unit, first, _) in enumerate(backward):
        steps.append(((first, 2, 4 * number), _step(workload, "wait", unit)))
        if number + 1 < len(backward):
            following, end, _ = backward[number + 1]
            due = [each for each, (_, _, ready) in enumerate(reduces) if ready < first < waits.get(each, end)]
            sent = sum(workload.units[reduces[each][0]].packed for each in due)
            turn = _turn(workload, first, end, sent, workload.units[following].gathered)
            at = max(
                first, min(turn, ready_at.get(unit, turn))
            )  # never after the next reduce: ranks may turn elsewhere
            waits.update((each, min(at, waits.get(each, at))) for each in due)
            steps.append(((at, 2, 4 * number - 1), _step(workload, "gather", following)))
    for number, (unit, _, ready) in enumerate(reduces):
        place = (waits[number], 1, 2 * number + 4) if number in waits else (len(workload.tasks), 3, number)
        steps += [((ready + 1, 1, 2 * number + 1), _step(workload, "reduce", unit))]
        steps += [(place, _step(workload, "wait_reduce", unit))]
    return Plan(tuple(Step(step.kind, step.units, at) for (at, _, _), step in sorted(steps, key=lambda each: each[0])))


def _turn(workload: Workload, first: int, end: int, sent: int, gathered: int) -> int:
    """The task, from `first` to `end`, before which about the part of the work is done that `sent` bytes may take."""
    done = [0.0, *accumulate(task.seconds for task in workload.tasks[first:end])]
    share = done[-1] * sent / ((sent + gathered) or 1)
    return first + min(range(len(done)), key=lambda number: abs(done[number] - share))


def kept_by_rule(workload: Workload) -> frozenset[int]:
    """What has to be kept, and the unit that forward reads last, if it may be."""
    forward = sorted(workload.reads_in_forward, key=lambda unit: workload.reads_in_forward[unit])
    return workload.always_kept | (set(forward[-1:]) & set(workload.keepable))


def _gathers(
    workload: Workload, gathers: list[_Gather], start: int, ahead: int, before_wait: bool
) -> Iterator[tuple[_Place, Step]]:
    """Waits at first readers; beside the wait for gather i, gather i + `ahead` is issued."""
    at_once = gathers[:ahead]
    for number, (unit, _, _) in enumerate(at_once):
        yield (start, 2, number - len(gathers)), _step(workload, "gather", unit)
    for number, (unit, first, _) in enumerate(gathers):
        order = 4 * number
        yield (first, 2, order), _step(workload, "wait", unit)
        if number + ahead < len(gathers):
            yield (
                (first, 2, order - 1 if before_wait else order + 1),
                _step(workload, "gather", gathers[number + ahead][0]),
            )


def _reduces(workload: Workload, in_flight: int) -> Iterator[tuple[_Place, Step]]:
    """Each as soon as it is ready, once no more than `in_flight - 1` others are under way; the rest at the end."""
    reduces = workload.reduces()
    for number, (unit, _, ready) in enumerate(reduces):
        yield (ready + 1, 1, 2 * number + 1), _step(workload, "reduce", unit)
        later = number + in_flight
        place = (reduces[later][2] + 1, 1, 2 * later) if later < len(reduces) else (len(workload.tasks), 3, number)
        yield place, _step(workload, "wait_reduce", unit)


def _step(workload: Workload, kind: Kind, unit: int) -> Step:
    return Step(kind, (workload.units[unit].name,), 0)
