"""Decide by seconds which units reshard after forward."""

from dataclasses import replace

from fsdp_compile.passes.agreement import plan_together
from fsdp_compile.passes.graph.analyze import keep_unsharded
from fsdp_compile.passes.graph.nodes import tag_of, tagged
from fsdp_compile.passes.graph.prices import prices_of
from fsdp_compile.passes.joint import reshard
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.workload import Workload, smallest_budget

ESTIMATED = 0.05  # how far, as a part, bytes of a step that are read from a joint graph may be from those of its graphs


def choose_reshard(context: GraphContext) -> None:
    """In place of the rule (`reshard.choose_reshard`), where a search is asked for: decide by cost.

    With "auto" or a budget, a unit stays unsharded if its second gather would make the step longer, as far as the
    budget for forward and backward together allows.

    Raises:
        PlanError: no plan fits into `config.budget`.
    """
    graph, config = context.graph, context.config
    prices = prices_of(graph, config)
    is_searched = config.budget is not None or any(spec.is_searched for spec in context.specs.values())
    if prices is None or not is_searched:
        reshard.choose_reshard(context)
    elif any(tag_of(gather).reshard is None for gather in tagged(graph, "gather")):
        info = prices.read(graph, "joint")
        budget = budget_of_step(info.workload, config.budget)
        _, names = plan_together(info.workload, replace(config, budget=budget), "step")
        keep_unsharded(graph, info, names)


def budget_of_step(workload: Workload, budget: int | None) -> int | None:
    """The budget for planning forward and backward together, whose bytes are an estimate: each is planned again.

    The estimate was seen to be up to 3 % above what they need. So a budget that is but a little below the smallest one
    is taken for that, and their own plans decide.
    """
    least = smallest_budget(workload)
    return least if budget is not None and (1 - ESTIMATED) * least <= budget < least else budget
