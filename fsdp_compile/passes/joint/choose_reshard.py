"""`reshard_after_forward="auto"`: which units stay gathered between forward and backward, decided on the joint graph.

By cost if the configuration names a link: the units whose second gather would make the step longer, as far as the
budget goes, which holds for the whole step: what is kept lives in both of its graphs. Without a link: the units that
backward reads before any other gather could hide.
"""

from dataclasses import replace

from fsdp_compile.passes.cost.profile import step_with_profile
from fsdp_compile.passes.graph.reading import read, stretches_of
from fsdp_compile.passes.graph.tags import get_tag, set_tag, tagged
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.search import search_plan
from fsdp_compile.passes.plan.workload import Workload
from fsdp_compile.passes.post_grad.plan_pass import costs_of


def choose_reshard(context: GraphContext) -> None:
    """Settle `reshard` in all tags that leave it open.

    Raises:
        PlanError: no plan fits into `config.budget`.
    """
    graph, config = context.graph, context.config
    if not any(tag.reshard is None for node in tagged(graph, "gather") if (tag := get_tag(node))):
        return
    costs = costs_of(graph, config)
    reading = read(graph, costs, joint=True)
    if costs:
        step = reading.workload
        if config.profile is not None:
            step = step_with_profile(step, stretches_of(reading.tasks), config.profile)
        kept = search_plan(step, config.budget).keep_unsharded
    else:
        kept = _first_in_backward(reading.workload)
    numbers = {tag.unit for name in kept if (tag := get_tag(reading.gathers[name].start[-1]))}
    for node in graph.nodes:
        tag = get_tag(node)
        if tag is not None and tag.reshard is None:
            set_tag(node, replace(tag, reshard=tag.unit not in numbers))


def _first_in_backward(workload: Workload) -> tuple[str, ...]:
    """The unit that backward reads first: it has just been read."""
    by_first_read = sorted(workload.may_keep, key=lambda unit: workload.reads_in_backward[unit])
    return tuple(workload.units[unit].name for unit in by_first_read[:1])
