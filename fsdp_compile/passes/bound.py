"""What no plan can beat: the shortest step and the smallest memory."""

from itertools import accumulate

from fsdp_compile.passes.workload import Workload


def smallest_budget(workload: Workload, kept: frozenset[int] | None = None) -> int:
    """Bytes that live at once if each unit is gathered when it is read, reduced and waited for when it is ready.

    Every plan needs these: beside a task live what it reads and what it, or one before it, has begun to write.

    Args:
        workload: the step.
        kept: units whose gathered buffers stay between forward and backward; None: only those that have to.
    """
    live = [task.memory for task in workload.tasks]
    held = [
        (first, last, workload.units[unit].gathered)
        for unit, first, last in workload.gathers(workload.always_kept if kept is None else kept)
    ]
    held += [(first, last, workload.units[unit].packed) for unit, first, last in workload.reduces()]
    for first, last, size in held:
        for index in range(first, last + 1):
            live[index] += size
    return max(live, default=0)


def lower_bound(workload: Workload, kept: frozenset[int] | None = None, budget: int | None = None) -> float:
    """Seconds below which no plan can be: backward follows forward, the link carries one launch at a time.

    With g1 the first gather, A all gathers, C all computing, R all reduces, r the last one to get ready, f and b for
    forward and backward, this is at least `g1 + max(Cf, Af - g1) + max(Cb, Ab + R - r) + r`.

    Args:
        workload: the step.
        kept: units whose gathered buffers stay; None: whichever the planner may choose.
        budget: bytes that may live at once, if `kept` is open: they limit what can be kept.
    """
    most = workload.always_kept | set(workload.keepable) if kept is None else kept
    gathers = workload.gathers(most)
    split = workload.backward
    forward = [(unit, first) for unit, first, _ in gathers if first < split]
    backward = [(unit, first) for unit, first, _ in gathers if first >= split]
    seconds = [task.seconds for task in workload.tasks]
    unavoidable = _cannot_be_kept(workload, budget) if kept is None and budget is not None else 0.0
    return _phase(workload, seconds, forward, 0, split) + _backward(workload, seconds, backward, unavoidable)


def _phase(workload: Workload, seconds: list[float], gathers: list[tuple[int, int]], start: int, end: int) -> float:
    """What gathers make of one direction: all up to any one, then the tasks from its first reader on."""
    bounds, moved = [sum(seconds[start:end])], workload.latency
    for unit, first in gathers:
        moved += workload.units[unit].gather
        bounds.append(moved + sum(seconds[first:end]))
    return max(bounds)


def _backward(workload: Workload, seconds: list[float], gathers: list[tuple[int, int]], unavoidable: float) -> float:
    end, split, latency = len(seconds), workload.backward, workload.latency
    reduces = [(unit, last) for unit, _, last in workload.reduces()]
    tails = list(accumulate((workload.units[unit].reduce for unit, _ in reversed(reduces)), initial=0.0))[::-1]
    bounds = [_phase(workload, seconds, gathers, split, end)]
    for (_, ready), tail in zip(reduces, tails, strict=False):
        upto = [(unit, first) for unit, first in gathers if first <= ready]
        bounds.append(_phase(workload, seconds, upto, split, ready + 1) + tail + latency)
    moved = sum(workload.units[unit].gather for unit, _ in gathers) + unavoidable
    bounds.append(moved + tails[0] + latency * (bool(gathers) + bool(reduces)))
    if reduces:
        last = workload.units[reduces[-1][0]].replicate
        bounds = [*bounds, max(bounds[1 : len(reduces) + 1]) + (last + latency if last else 0.0)]
    return max(bounds)


def _cannot_be_kept(workload: Workload, budget: int) -> float:
    """Seconds of gathers in backward that memory forces, if parts of units could be kept."""
    first = workload.tasks[workload.backward]  # of backward: beside it lives all that is kept
    beside = first.memory + sum(workload.units[unit].gathered for unit in first.reads)
    beside += sum(workload.units[unit].packed for unit in first.writes)
    room = budget - beside - sum(workload.units[unit].gathered for unit in workload.always_kept - set(first.reads))
    units = [workload.units[unit] for unit in workload.keepable if unit not in first.reads]
    forced = 0.0
    for unit in sorted(units, key=lambda unit: -unit.gather / max(unit.gathered, 1)):
        part = min(1.0, max(0, room) / unit.gathered) if unit.gathered else 1.0
        room -= unit.gathered
        forced += unit.gather * (1 - part)
    return forced
