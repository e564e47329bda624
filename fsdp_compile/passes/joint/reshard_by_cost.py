"""Decide by seconds which units reshard after forward, and what is gathered behind updates."""

from dataclasses import replace

from fsdp_compile.passes.agreement import plan_together
from fsdp_compile.passes.graph.analyze import keep_unsharded
from fsdp_compile.passes.graph.nodes import tag_of, tagged
from fsdp_compile.passes.graph.optimizer_update import note_arrivals, update_cost
from fsdp_compile.passes.graph.prices import prices_of
from fsdp_compile.passes.joint import reshard
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.whole_step import budget_of_step, with_update


def choose_reshard(context: GraphContext) -> None:
    """In place of the rule (`reshard.choose_reshard`), where a search is asked for: decide by cost.

    With "auto" or a budget, a unit stays unsharded if its second gather would make the step longer, as far as the
    budget for forward and backward together allows.

    If the configuration describes the optimizer's update, the step is planned with it, and tags tell when the gathers
    end that are launched behind updates.

    Raises:
        PlanError: no plan fits into `config.budget`.
    """
    graph, config = context.graph, context.config
    prices, gathers = prices_of(graph, config), tagged(graph, "gather")
    is_searched = config.budget is not None or any(spec.is_searched for spec in context.specs.values())
    if prices is None or not is_searched:
        reshard.choose_reshard(context)
    if prices is None:
        return
    is_open = any(tag_of(gather).reshard is None for gather in gathers)
    has_update = config.update is not None
    if not (is_open or has_update):
        return
    info = prices.read(graph, "joint")
    update = update_cost(info, prices, config) if has_update else None
    step = info.workload if update is None else with_update(info.workload, update)
    plan, names = plan_together(step, replace(config, budget=budget_of_step(step, config.budget)), "step")
    note_arrivals(info, step, plan)
    keep_unsharded(graph, info, names)
