"""How other systems place collectives, as plans for the same simulator."""

from fsdp_compile.explain.fixed_prefetch import prefetch
from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.plan.workload import Workload


def one_ahead(workload: Workload) -> Plan:
    """DeepCompile's fixed prefetch: before a unit is waited for, the next gather is issued; two reduces in flight."""
    return prefetch(workload, forward=1, backward=1, before_wait=True, in_flight=2)


def fsdp2(workload: Workload) -> Plan:
    """The order that `torch.distributed.fsdp.fully_shard` gives its streams, the host being far ahead.

    By torch 2.13, _fully_shard/_fsdp_param_group.py:

    - forward: `wait_for_unshard` lets the all-gather stream wait for the copy-out of the unit *before*, so the gather
      of unit i + 2 may start when unit i starts to compute;
    - backward: `pre_backward` waits for unit i, then `_backward_prefetch` gathers i - 1;
    - `post_backward` waits for the reduce-scatter before it issues its own (`reduce_scatter_max_input_buffers` is 1).

    FSDP2's copies in and out of buffers take time and memory that are left out here.
    """
    return prefetch(workload, forward=2, backward=1, before_wait=False, in_flight=1)
