"""Which plan a graph gets: it is read with its costs, a plan is chosen, and the plan is verified.

    read_graph     the graph as tasks and units, with seconds and bytes, for a planner that knows nothing of graphs
    choose_plan    the plan in a file, the best one that a search finds for these costs, or the one of a fixed rule
    verify_plan    refuses a plan that breaks a rule or exceeds the budget

Costs are estimates by the roofline of a named device and link (passes/cost.py). A recorded profile replaces the seconds
of tasks.
"""

import logging
import pathlib
import re

import torch
from torch import fx

from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.collectives import ALL_REDUCE, ALL_REDUCE_IN_PLACE, GROUP_ARGUMENT
from fsdp_compile.config import CompileConfig
from fsdp_compile.passes._torch import tree_leaves
from fsdp_compile.passes.cost import (
    DEVICES,
    Device,
    all_reduce_seconds,
    compute_seconds,
    device,
    launch_seconds,
    link,
    transfer_seconds,
    with_profile,
)
from fsdp_compile.passes.graph.costs import node_work, size_of
from fsdp_compile.passes.graph.nodes import tagged
from fsdp_compile.passes.graph.reading import Costs, read, stretches_of
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.plan import Plan, PlanError, verify
from fsdp_compile.passes.plan.search import alternating, prefetch, search_plan

plan_log = logging.getLogger("fsdp_compile.plans")


def read_graph(context: GraphContext) -> None:
    """Set `context.reading`, and `context.workload`: what the planner sees of it, with measured seconds if there are.

    Raises:
        PlanError: the profile that the configuration names has no graph of this direction and as many products.
        ValueError: the configuration names a link or device that is unknown.
    """
    graph, config = context.graph, context.config
    context.reading = read(graph, costs_of(graph, config) or relative_costs(graph))
    context.workload = context.reading.workload
    if config.profile is not None:
        stretches = stretches_of(context.reading.tasks)
        context.workload = with_profile(context.workload, stretches, context.direction, config.profile)


def choose_plan(context: GraphContext) -> None:
    """Set `context.plan`.

    Raises:
        PlanError: the file has no plan for this direction, or no plan fits into the budget.
    """
    workload, config = context.workload, context.config
    if config.plan is not None:
        plan = plan_in_file(config.plan, context.direction)
    elif config.link is not None:
        plan = search_plan(workload, config.budget).plan
    elif config.reduces_in_flight == 1:
        plan = alternating(workload)
    else:
        in_flight = config.reduces_in_flight or len(workload.units)
        plan = prefetch(workload, forward=1, backward=1, before_wait=True, in_flight=in_flight)
    context.plan = plan
    plan_log.debug("%s:\n%s", context.direction, plan, extra={"workload": workload})  # for who wants to time it


def plan_in_file(path: str, heading: str) -> Plan:
    """The plan under `heading:` in a file. PlanError if there is none, or if it cannot be read."""
    sections = re.split(r"^(\w+):[ \t]*$", pathlib.Path(path).read_text(), flags=re.MULTILINE)
    plans = dict(zip(sections[1::2], sections[2::2], strict=True))
    if heading not in plans:
        raise PlanError(f"{path}: expected a plan under '{heading}:', found {', '.join(plans) or 'no heading'}")
    return Plan.parse(plans[heading])


def verify_plan(context: GraphContext) -> None:
    """Raise PlanError if the plan breaks a rule of plans, or needs more bytes than the budget."""
    verify(context.workload, context.plan, context.config.budget)


# --- costs of one graph -----------------------------------------------------------------------------------------------

_FLOPS_PER_BYTE = {"cpu": 12.0, "cuda": 240.0}
"""How much a device computes while it moves a byte (passes/cost.py): the CPU in float32, an H100 in bfloat16."""


def costs_of(graph: fx.Graph, config: CompileConfig) -> Costs | None:
    """Costs of nodes and collectives by `config.link` and `config.device`; None without a link.

    Raises:
        ValueError: a name is unknown.
    """
    starts = tagged(graph, "gather", "reduce")
    if config.link is None or not starts:
        return None
    wire = link(config.link)
    computer = device(config.device) if config.device else _device_of(starts[0].meta["val"].device)

    def of_node(node: fx.Node) -> float:
        work = node_work(node)
        return compute_seconds(work.flops, work.read_bytes + work.written_bytes, _dtype_of(node), computer)

    def of_collective(start: fx.Node) -> float:
        if start.target in (ALL_REDUCE, ALL_REDUCE_IN_PLACE):
            return all_reduce_seconds(size_of(start), _world_size(start), wire) - wire.latency
        full = max(size_of(start), size_of(start.args[0]))  # type: ignore[arg-type]  # fx arguments are untyped
        return transfer_seconds(full, _world_size(start), wire)

    return Costs(of_node, of_collective, launch_seconds(max(map(_world_size, starts)), wire))


def relative_costs(graph: fx.Graph) -> Costs:
    """Costs where no link is named: how long a task takes relative to others, in no unit, on this kind of device."""
    starts = tagged(graph, "gather", "reduce")
    kind = starts[0].meta["val"].device.type if starts else "cpu"
    flops_per_byte = _FLOPS_PER_BYTE.get(kind, _FLOPS_PER_BYTE["cuda"])

    def of_node(node: fx.Node) -> float:
        work = node_work(node)
        return work.flops + flops_per_byte * (work.read_bytes + work.written_bytes)

    return Costs(of_node, lambda start: 0.0, memory=False)


def _world_size(start: fx.Node) -> int:
    return group_named(start.args[GROUP_ARGUMENT[start.target]]).size()  # type: ignore[arg-type,index]  # fx arguments are untyped


def _device_of(where: torch.device) -> Device:
    if where.type == "cpu":
        return DEVICES["cpu"]
    name = torch.cuda.get_device_name(where).lower()
    named = [each for key, each in DEVICES.items() if key in name]
    if not named:
        raise ValueError(f"device: expected one of {', '.join(DEVICES)} to be named, found none that {name!r} is")
    return named[0]


def _dtype_of(node: fx.Node) -> str:
    """In which dtype a node computes: that of its first floating-point input."""
    inputs = (leaf for each in node.all_input_nodes for leaf in tree_leaves(each.meta.get("val")))
    dtypes = (each.dtype for each in inputs if isinstance(each, torch.Tensor) and each.dtype.is_floating_point)
    return str(next(dtypes, torch.float32)).removeprefix("torch.")
