"""Which plan a graph gets: the one in a file, the best one for its costs, or a fixed rule."""

import logging
import pathlib
import re

from fsdp_compile.config import CompileConfig
from fsdp_compile.passes._torch import direction
from fsdp_compile.passes.plan.plan import Plan, PlanError
from fsdp_compile.passes.plan.rules import alternating, prefetch
from fsdp_compile.passes.plan.search import search_plan
from fsdp_compile.passes.plan.workload import Workload

plan_log = logging.getLogger("fsdp_compile.plans")


def choose(workload: Workload, config: CompileConfig) -> Plan:
    """A plan for the graph that is being compiled, not verified yet.

    Raises:
        PlanError: the file has no plan for this direction, or the budget is too small for any plan.
    """
    if config.plan is not None:
        plan = plan_in(config.plan, direction())
    elif config.link is not None:
        plan = search_plan(workload, config.budget).plan
    elif config.reduces_in_flight == 1:
        plan = alternating(workload)
    else:
        in_flight = config.reduces_in_flight or len(workload.units)
        plan = prefetch(workload, forward=1, backward=1, before_wait=True, in_flight=in_flight)
    plan_log.debug("%s:\n%s", direction(), plan, extra={"workload": workload})  # for who wants to time it
    return plan


def plan_in(path: str, heading: str) -> Plan:
    """The plan under `heading:` in a file. PlanError if there is none, or if it cannot be read."""
    parts = re.split(r"^(\w+):[ \t]*$", pathlib.Path(path).read_text(), flags=re.MULTILINE)
    plans = dict(zip(parts[1::2], parts[2::2], strict=True))
    if heading not in plans:
        raise PlanError(f"{path}: expected a plan under '{heading}:', found {', '.join(plans) or 'no heading'}")
    return Plan.parse(plans[heading])
