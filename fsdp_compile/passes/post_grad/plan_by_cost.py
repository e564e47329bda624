"""Read a graph with what its nodes and collectives cost, and choose its plan: from a file, or by search.

Costs are estimates by the files of a named device and link (passes/cost/hardware.py).
"""

import pathlib
import re
import reprlib
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

from fsdp_compile.config import read_text
from fsdp_compile.passes.agreement import plan_together
from fsdp_compile.passes.graph.analyze import analyze
from fsdp_compile.passes.graph.nodes import tagged
from fsdp_compile.passes.graph.prices import prices_of
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.plan import Plan, PlanError
from fsdp_compile.passes.plan.workload import Workload
from fsdp_compile.passes.post_grad import plan_by_rule
from fsdp_compile.passes.post_grad.plan_by_rule import tell_plan


def read_graph(context: GraphContext) -> None:
    """Set `context.info` and `context.workload`.

    Raises:
        ValueError: the configuration names a link or device that is unknown.
    """
    graph, config = context.graph, context.config
    prices = prices_of(graph, config)
    info = prices.read(graph, context.direction) if prices else analyze(graph)
    updated = [name for name, reduce in info.reduces.items() if reduce.updates]
    context.info, context.workload = info, updating_in_backward(info.workload, updated)


def updating_in_backward(workload: Workload, names: Collection[str]) -> Workload:
    """`workload`, in which the units of these names are updated in backward: a gradient lives until then.

    That is at the latest when the last gradient of a further unit is ready: before the further reduce begins, or the
    last task. Updates take no seconds here: few, beside those of products.
    """
    tasks, ends = list(workload.tasks), sorted({ready for _, _, ready in workload.reduces()})
    following = dict(pairwise(ends))
    for unit, _, ready in workload.reduces():
        if workload.units[unit].name in names and ready in following:
            at = min(following[ready] + 1, len(tasks) - 1)
            tasks[at] = replace(tasks[at], reduced=(*tasks[at].reduced, unit))
    return replace(workload, tasks=tuple(tasks))


def choose_plan(context: GraphContext) -> None:
    """Set `context.plan`: from a file, by search, or by a fixed rule (`plan_by_rule.choose_plan`).

    Raises:
        PlanError: the file has no plan for this direction, or no plan fits into the budget.
    """
    config = context.config
    if config.plan is not None:
        plans = plans_in_file(config.plan)
        if context.direction not in plans:
            raise PlanError(f"plan: expected {config.plan} to have a plan under '{context.direction}:', found "
                            f"{', '.join(map(reprlib.repr, plans))}")  # fmt: skip
        context.plan = plans[context.direction]
    elif config.link is not None and tagged(context.graph, "gather", "reduce"):  # else nothing is planned
        context.plan, _ = plan_together(context.workload, config, context.direction)
    else:
        plan_by_rule.choose_plan(context)
        return
    tell_plan(context)


def plans_in_file(path: str) -> dict[str, Plan]:
    """Parse the plans in a file, by their headings. PlanError if one cannot be read or two have one heading."""
    try:
        text = read_text(pathlib.Path(path))
    except ValueError as error:
        raise PlanError(f"plan: expected {path} to be text with plans, found {error}") from None
    headings = list(re.finditer(r"^(\w+):[ \t]*$", text, flags=re.MULTILINE))
    ends = [*(each.start() for each in headings[1:]), len(text)]
    plans: dict[str, Plan] = {}
    if not headings:
        raise PlanError(f"plan: expected {path} to have plans under 'forward:' and 'backward:', found no heading")
    for heading, end in zip(headings, ends, strict=True):
        name, begin = heading[1], heading.end()
        if name in plans:
            raise PlanError(f"plan: expected {path} to have one plan under {reprlib.repr(name + ':')}, found two")
        try:
            plans[name] = Plan.parse("\n" * text.count("\n", 0, begin) + text[begin:end])  # errors have the file's line
        except PlanError as error:
            raise PlanError(f"plan: {path}, {name}, {error}") from None
    return plans
