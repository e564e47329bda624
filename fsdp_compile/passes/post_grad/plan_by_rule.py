"""Read a graph as tasks and units, choose its plan by a fixed rule, and verify it."""

import logging

from fsdp_compile.passes._torch import symbols_of
from fsdp_compile.passes.graph.analyze import analyze
from fsdp_compile.passes.pipeline import GraphContext, log
from fsdp_compile.passes.plan.plan import verify
from fsdp_compile.passes.plan.schedule import order_of_blocks

plan_log = logging.getLogger("fsdp_compile.plans")


def read_graph(context: GraphContext) -> None:
    """Set `context.info` and `context.workload`, of which the rule needs neither seconds nor bytes of tasks."""
    context.info = analyze(context.graph)
    context.workload = context.info.workload


def choose_plan(context: GraphContext) -> None:
    """Set `context.plan` by the rule (`order_of_blocks`)."""
    log.info("%s: collectives follow the order of blocks; a link or a budget asks for a search", context.direction)
    context.plan = order_of_blocks(context.workload, context.config.reduces_in_flight)
    tell_plan(context)


def tell_plan(context: GraphContext) -> None:
    """Log the plan, for people, and with its workload for handlers that time it."""
    plan_log.debug("%s:\n%s", context.direction, context.plan, extra={"workload": context.workload})


def verify_plan(context: GraphContext) -> None:
    """Raise PlanError if the plan breaks a rule of plans, or needs more bytes than the budget.

    Rules are about the order alone, and bytes are counted for the most that symbolic sizes may be: what holds here does
    for all of them.
    """
    verify(context.workload, context.plan, context.config.budget)
    for size in symbols_of(context.graph).values() if context.config.budget is not None else ():
        if size.most is None:
            log.warning("budget: bytes are counted for %s = %d, as nothing says how large it may be; "
                        "torch._dynamo.mark_dynamic(tensor, dim, max=...) does", size.source, size.hint)  # fmt: skip
