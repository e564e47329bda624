"""How other systems place collectives, as plans for the same simulator.

Both keep the last unit of forward for backward where the step leaves that open: backward reads it first.
"""

from collections.abc import Iterator

from fsdp_compile.passes.plan import Plan, Step
from fsdp_compile.passes.workload import Workload

_Place = tuple[int, int, int]  # before which task; frees, reduces, gathers; in order
_Gather = tuple[int, int, int]  # unit, first and last task that read it


def one_ahead(workload: Workload) -> Plan:
    """A fixed prefetch: where a unit is waited for, the next one's gather is issued before; two reduces in flight.

    DeepCompile's and our own passes' rule without a planner (passes/reorder.py).
    """
    return _plan(workload, forward=1, backward=1, before_wait=True, in_flight=2)


def fsdp2(workload: Workload) -> Plan:
    """The order that `torch.distributed.fsdp.fully_shard` gives its streams, the host being far ahead.

    By torch 2.13, _fully_shard/_fsdp_param_group.py:

    - forward: `wait_for_unshard` lets the all-gather stream wait for the copy-out of the unit *before*, so the gather
      of unit i + 2 may start when unit i starts to compute;
    - backward: `pre_backward` waits for unit i, then `_backward_prefetch` gathers i - 1;
    - `post_backward` waits for the reduce-scatter before it issues its own (`reduce_scatter_max_input_buffers` is 1).

    FSDP2's copies in and out of buffers take time and memory that are left out here.
    """
    return _plan(workload, forward=2, backward=1, before_wait=False, in_flight=1)


def _plan(workload: Workload, forward: int, backward: int, before_wait: bool, in_flight: int) -> Plan:
    gathers, split = workload.gathers(_kept(workload)), workload.backward
    steps = [((last + 1, 0, number), _step(workload, "free", unit)) for number, (unit, _, last) in enumerate(gathers)]
    steps += _gathers(workload, [each for each in gathers if each[1] < split], 0, forward, before_wait)
    steps += _gathers(workload, [each for each in gathers if each[1] >= split], split, backward, before_wait)
    steps += _reduces(workload, in_flight)
    return Plan(tuple(Step(step.kind, step.units, at) for (at, _, _), step in sorted(steps, key=lambda each: each[0])))


def _kept(workload: Workload) -> frozenset[int]:
    """What has to be kept, and the unit that forward gathers last."""
    forward = sorted(workload.reads_in_forward, key=lambda unit: workload.reads_in_forward[unit])
    return workload.always_kept | (set(forward[-1:]) & set(workload.keepable))


def _gathers(
    workload: Workload, gathers: list[_Gather], start: int, ahead: int, before_wait: bool
) -> Iterator[tuple[_Place, Step]]:
    """Waits at first readers; beside the wait for gather i, gather i + `ahead` is issued."""
    at_once = gathers[: 1 if before_wait else ahead]
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


def _step(workload: Workload, kind: str, unit: int) -> Step:
    return Step(kind, (workload.units[unit].name,), 0)
