"""How other systems place collectives, as plans for the same simulator: with a fixed prefetch distance."""

from itertools import groupby

from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.plan.schedule import Position, keep_by_rule, plan_of
from fsdp_compile.passes.plan.workload import Workload


def one_ahead(workload: Workload) -> Plan:
    """DeepCompile's fixed prefetch: before a unit is waited for, the next gather is issued; two reduces in flight."""
    return _prefetch(workload, forward=1, before_wait=True, in_flight=2)


def fsdp2(workload: Workload) -> Plan:
    """The order that `torch.distributed.fsdp.fully_shard` gives its streams, the host being far ahead.

    By torch 2.13, _fully_shard/_fsdp_param_group.py:

    - forward: `wait_for_unshard` lets the all-gather stream wait for the copy-out of the unit *before*, so the gather
      of unit i + 2 may start when unit i starts to compute;
    - backward: `pre_backward` waits for unit i, then `_backward_prefetch` gathers i - 1;
    - `post_backward` waits for the reduce-scatter before it issues its own (`reduce_scatter_max_input_buffers` is 1).

    FSDP2's copies in and out of buffers take time and memory that are left out here.
    """
    return _prefetch(workload, forward=2, before_wait=False, in_flight=1)


def _prefetch(workload: Workload, forward: int, before_wait: bool, in_flight: int) -> Plan:
    """Gather `forward` modules ahead of the one that is waited for, in backward one: before that wait, or right after.

    Reduces are issued as they get ready; of these `in_flight` are under way at most, with the one that is issued.
    The last unit of forward stays gathered for backward, which reads it first, if the step leaves that open.
    """
    gathers, reduces = workload.gathers(keep_by_rule(workload)), workload.reduces()
    split, issued = sum(first < workload.backward for _, first, _ in gathers), list[Position]()
    for begin, end, start, distance in ((0, split, 0, forward), (split, len(gathers), workload.backward, 1)):
        modules = groupby(range(begin, end), key=lambda each: workload.units[gathers[each][0]].of_module)
        firsts = list[int]()
        for index, module in enumerate(list(group) for _, group in modules):
            firsts.append(module[0])
            if index < distance:
                issued += [(start, 2, each - end) for each in module]
            else:  # right before the wait of a module before it, or right after that
                beside = firsts[index - distance]
                issued += [(gathers[beside][1], 2, 4 * beside + (-1 if before_wait else 1))] * len(module)
    waited: list[Position] = [(ready + 1, 1, 2 * each) for each, (_, _, ready) in enumerate(reduces)][in_flight:]
    waited += [(len(workload.tasks), 3, each) for each in range(len(waited), len(reduces))]
    return plan_of(workload, gathers, issued, waited)
