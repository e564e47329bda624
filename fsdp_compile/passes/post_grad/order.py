"""Order: choose a plan, verify it, put the graph into its order; then pin that order against Inductor's scheduler."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain, pairwise, zip_longest

from torch import fx
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

from fsdp_compile.comm.collectives import STARTS, WAIT
from fsdp_compile.core.ops import CHECK_RANKS, DEFER_REDUCE, PACK_GRADS, RECORD_TIME, WAIT_ALL_GATHER
from fsdp_compile.passes._torch import direction
from fsdp_compile.passes.cost.profile import with_profile
from fsdp_compile.passes.graph.node_kinds import is_product, readers
from fsdp_compile.passes.graph.reading import Reading, read, stretches_of, with_preparation
from fsdp_compile.passes.graph.tags import get_tag, set_tag, tag_of, tagged
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.plan import Plan, PlanError, Step, verify
from fsdp_compile.passes.post_grad.plan_pass import choose
from fsdp_compile.passes.post_grad.pricing import costs_of, shares
from fsdp_compile.passes.post_grad.profile_tasks import mark_tasks


def order(context: GraphContext) -> None:
    """Put starts and waits of collectives where the plan wants them.

    Raises:
        PlanError: the plan is none for this graph.
    """
    graph, config = context.graph, context.config
    _place_deferred_reduces(graph)
    reading = read(graph, costs_of(graph, config) or shares(graph))
    workload = reading.workload
    if config.profile is not None:
        workload = with_profile(workload, stretches_of(reading.tasks), direction(), config.profile)
    plan = choose(workload, config)
    verify(workload, plan, config.budget)
    apply(graph, reading, plan)
    check_applied(graph, reading, plan)
    if config.record_profile:
        mark_tasks(graph, reading.tasks)


def _place_deferred_reduces(graph: fx.Graph) -> None:
    """What the eager runtime takes over is packed and handed over right after the last gradient."""
    for defer_reduce in tagged(graph, "defer_reduce"):
        moved = with_preparation(defer_reduce)
        last = max(moved[0].all_input_nodes)
        if last.op != "placeholder":
            for node in reversed(moved):
                last.append(node)


def apply(graph: fx.Graph, reading: Reading, plan: Plan) -> None:
    """Put the nodes of `graph` into the order of `plan`, which verify.py has passed.

    The first stage of a gather in two stages goes one launch ahead of the second.
    """
    _number_launches(reading, plan)
    names = [name for step in plan.of("gather") for name in step.units]
    leads = {one: reading.gathers[other].first for one, other in pairwise(names)}
    ordered: dict[fx.Node, None] = {}
    for nodes, steps in zip([*reading.tasks, reading.tail], _before_each_task(reading, plan), strict=True):
        for step in steps:
            ordered.update(dict.fromkeys(_nodes_of(step, reading, leads)))
        ordered.update(dict.fromkeys(nodes))
    ordered.update(dict.fromkeys(chain.from_iterable(reduce.end for reduce in reading.reduces.values())))
    output = graph.output_node()
    for node in ordered:
        output.prepend(node)


def _number_launches(reading: Reading, plan: Plan) -> None:
    """Note on starts which of them the plan launches together."""
    for number, step in enumerate(plan.of("gather", "reduce")):
        for name in step.units if len(step.units) > 1 else ():
            start = (reading.gathers if step.kind == "gather" else reading.reduces)[name].start[-1]
            set_tag(start, replace(tag_of(start), launch=number))


def _before_each_task(reading: Reading, plan: Plan) -> list[list[Step]]:
    """The steps before each task, and after the last one."""
    steps: list[list[Step]] = [[] for _ in range(len(reading.tasks) + 1)]
    for step in plan.steps:
        steps[step.at].append(step)
    return steps


_NODES: dict[str, Callable[[Reading, str], list[fx.Node]]] = {
    "gather": lambda reading, name: reading.gathers[name].start,
    "wait": lambda reading, name: reading.gathers[name].wait,
    "free": lambda reading, name: [],  # Inductor frees what nothing reads any more
    "reduce": lambda reading, name: reading.reduces[name].start,
    "wait_reduce": lambda reading, name: reading.reduces[name].wait,
}


def _nodes_of(step: Step, reading: Reading, leads: Mapping[str, list[fx.Node]]) -> list[fx.Node]:
    """What runs at a step; of several units first all that prepares the launch."""
    parts = [part for name in step.units if (part := _NODES[step.kind](reading, name))]
    stages = [reading.gathers[name].first + leads.get(name, []) for name in step.units if step.kind == "gather"]
    return [*chain(*stages), *chain(*(part[:-1] for part in parts)), *(part[-1] for part in parts)]


def check_applied(graph: fx.Graph, reading: Reading, plan: Plan) -> None:
    """Raise PlanError unless the order of `graph` is that of `plan`."""
    kinds: dict[fx.Node, tuple[str, str]] = {}
    for name, gather in reading.gathers.items():
        kinds |= {gather.start[-1]: ("gather", name), gather.wait[0]: ("wait", name)}
    for name, reduce in reading.reduces.items():
        kinds |= {reduce.start[-1]: ("reduce", name), reduce.wait[0]: ("wait_reduce", name)}
    tasks = {node: index for index, nodes in enumerate(reading.tasks) for node in nodes}
    at, found = 0, []
    for node in graph.nodes:
        at = max(at, tasks.get(node, -1) + 1)
        if node in kinds:
            found.append((*kinds[node], at))
    planned = [(step.kind, name, step.at) for step in plan.steps if step.kind != "free" for name in step.units]
    if found != planned:
        expected, seen = next((a, b) for a, b in zip_longest(planned, found) if a != b)
        raise PlanError(f"order of the graph: expected {expected}, found {seen}; this is a defect of the pass")


def pin_order(context: GraphContext) -> None:
    """Chain collectives, waits and the matrix products between them by control dependencies.

    Inductor's memory pass moves each gather next to its wait otherwise, and horizontal fusion may tie two units'
    gradients into one kernel, which delays a reduce-scatter. A product that writes into a pack stays out of the chain
    (wrapped, it would get a buffer of its own); the place of its reduce-scatter holds it early enough.
    """
    graph = context.graph
    if not tagged(graph, "gather", "reduce", "defer_reduce"):
        return
    events = [node for node in graph.nodes if _is_event(node)]
    preserve_node_ordering(graph, {after: OrderedSet([_done(before)]) for before, after in pairwise(events)})


def _done(event: fx.Node) -> fx.Node:
    """What to wait for: of a call that returns several tensors, the first."""
    return event.next if isinstance(event.meta["val"], list) else event


def _is_event(node: fx.Node) -> bool:
    if (
        node.target in STARTS
        or node.target in (WAIT, WAIT_ALL_GATHER, DEFER_REDUCE, CHECK_RANKS, RECORD_TIME)
        or _is_mean(node)
    ):
        return True
    return is_product(node) and not any(reader.target is PACK_GRADS for reader in readers(node)[1])


def _is_mean(node: fx.Node) -> bool:
    """Whether the node reduces what an exchange brought: fused with a later one, it would keep all that alive."""
    tag = get_tag(node)
    return tag is not None and tag.kind == "mean"
