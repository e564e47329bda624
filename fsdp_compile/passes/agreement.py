"""What ranks agree on where a search is asked for: figures of links, and plans. The first rank to come decides.

Note [Why ranks agree on plans]
A searched plan depends on seconds, and those on sizes of batches, which may differ between ranks. Ranks that follow
different plans would wait for each other for ever (Note [Why ranks compare before the first collective]). So ranks
whose graphs have the same units, tasks and figures of links follow the plan of the first of them. Nobody waits: who
comes first writes to the store. Nothing is kept for later runs. If the compiler's caches have the graph of one rank and
not that of another, and the two plans differ, ranks find it out when they compare, and raise. The order of blocks,
which is followed where no search is asked for, depends on units and tasks alone.
"""

import hashlib
import json
import logging
from operator import attrgetter

import torch.distributed as dist

from fsdp_compile.comm.comparison import exists
from fsdp_compile.comm.waits import MessageBoard
from fsdp_compile.config import CompileConfig
from fsdp_compile.passes.plan.plan import Plan, simulate, verify
from fsdp_compile.passes.plan.schedule import keep_by_rule, order_of_blocks, search_plan
from fsdp_compile.passes.plan.workload import Workload, lower_bound

log = logging.getLogger("fsdp_compile")

WORTH = 0.01  # of a step: what a search must save


def board() -> MessageBoard | None:
    """Where all ranks read and write; None if there are no others."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return MessageBoard.of_group(world, "fsdp_flat/agreed") if world is not None and exists(world) else None


def agree(key: str, text: str) -> str:
    """`text`, or what another rank has written under `key` before."""
    shared = board()
    return text if shared is None else shared.decide(key, text)


def plan_together(workload: Workload, config: CompileConfig, what: str) -> tuple[Plan, tuple[str, ...]]:
    """A plan that ranks with the same units, tasks and link follow together, and the units that it keeps unsharded.

    Args:
        workload: with seconds and bytes, which may differ between ranks.
        config: with a link.
        what: is planned, for the log.

    Raises:
        PlanError: no plan fits into the budget.
    """
    plan, kept = _searched(workload, config.budget)
    table = json.loads(agree(_shape_of(workload, config), json.dumps({"keep": kept, "plan": str(plan)})))
    plan, kept = Plan.parse(table["plan"]), tuple(table["keep"])
    verify(workload, plan, config.budget)
    if log.isEnabledFor(logging.INFO):
        timeline, bound = simulate(workload, plan), lower_bound(workload)
        log.info(
            "%s: planned for %s, %.1f ms expected, %.1f of them waiting for collectives; no plan takes less than %.1f "
            "ms", what, config.link, timeline.makespan * 1e3, timeline.exposed * 1e3, bound * 1e3,
        )  # fmt: skip
    return plan, kept


def _shape_of(workload: Workload, config: CompileConfig) -> str:
    """All that plans depend on beside seconds of tasks, and bytes that batches, or what a rank pads, decide."""
    tasks = [(task.reads, task.writes, task.reduced) for task in workload.tasks]
    names = "name", "gather", "reduce", "replicate", "keep_unsharded", "module"
    units = list(map(attrgetter(*names), workload.units))
    step = workload.backward, workload.can_coalesce
    chosen = config.link, config.device, config.budget, config.file_contents
    return f"plan/{hashlib.sha256(repr((tasks, units, step, chosen)).encode()).hexdigest()}"


def _searched(workload: Workload, budget: int | None) -> tuple[Plan, tuple[str, ...]]:
    """The plan that the search finds, if by its prices a step is shorter by `WORTH` than in the order of blocks.

    Prices may be wrong, and the order of blocks does not depend on them.
    """
    found = search_plan(workload, budget)
    rule = order_of_blocks(workload)
    timeline = simulate(workload, rule)
    is_as_short = timeline.makespan <= found.seconds * (1 + WORTH)
    if is_as_short and (budget is None or timeline.peak <= budget):
        return rule, tuple(workload.units[unit].name for unit in sorted(keep_by_rule(workload)))
    return found.plan, found.keep_unsharded
