"""Put a graph into the order of its plan, and pin that order for Inductor's scheduler."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, pairwise

from torch import fx

from fsdp_compile.comm.collectives import STARTS, WAIT
from fsdp_compile.core import ops
from fsdp_compile.passes._torch import OrderedSet, preserve_node_ordering
from fsdp_compile.passes.graph.analyze import GraphInfo, with_preparation
from fsdp_compile.passes.graph.nodes import is_product, readers, set_tag, tag_of, tagged
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.plan import Step


def place_deferred_reduces(context: GraphContext) -> None:
    """Pack gradients whose reduce is deferred as soon as the last of them is computed."""
    for deferred in tagged(context.graph, "defer_reduce"):
        moved = with_preparation(deferred)
        last = max(moved[0].all_input_nodes)
        if last.op != "placeholder":
            for node in reversed(moved):
                last.append(node)


def order(context: GraphContext) -> None:
    """Put the nodes of the graph into the order of the plan.

    The first stage of a two-stage gather is issued one launch ahead of the second. The maxima of parameters are the
    first collective; the wait for them comes before the first gather that needs them.
    """
    info, plan = context.info, context.plan
    for launch, step in enumerate(plan.of("gather", "reduce")):  # tag what the plan launches at once
        by_unit = [info.gathers[n].starts if step.kind == "gather" else info.reduces[n].start[-1:] for n in step.units]
        starts = list(chain(*by_unit))
        for start in starts if len(starts) > 1 else ():
            set_tag(start, replace(tag_of(start), launch=launch))
    steps_before: list[list[Step]] = [[] for _ in range(len(info.tasks) + 1)]  # each task, and what follows the last
    for step in plan.steps:
        steps_before[step.at].append(step)
    gathered = [name for step in plan.of("gather") for name in step.units]
    ahead = {one: info.gathers[following].first for one, following in pairwise(gathered)}
    begins = info.prologue[: next((i + 1 for i, n in enumerate(info.prologue) if n.target in STARTS), 0)]
    later = set(info.prologue) - set(begins)
    ordered: dict[fx.Node, None] = dict.fromkeys(begins)
    ends = list(chain.from_iterable(reduce.end for reduce in info.reduces.values()))
    for task, steps in zip([*info.tasks, [*ends, *info.tail]], steps_before, strict=True):
        for nodes in (*(_nodes_of(step, info, ahead) for step in steps), task):
            if not later.isdisjoint(chain.from_iterable(node.all_input_nodes for node in nodes)):
                ordered.update(dict.fromkeys(info.prologue))
            ordered.update(dict.fromkeys(nodes))
    ordered.update(dict.fromkeys(info.prologue))
    output = context.graph.output_node()
    for node in ordered:
        output.prepend(node)


def _nodes_of(step: Step, info: GraphInfo, ahead: Mapping[str, list[fx.Node]]) -> list[fx.Node]:
    """Return the nodes of a step; with several units, all that prepares the launch comes before the launch itself."""
    if step.kind == "free":
        return []  # Inductor frees what nothing reads any more
    by_unit = info.gathers if step.kind in ("gather", "wait") else info.reduces
    collectives = [by_unit[name] for name in step.units]
    is_launch = step.kind in ("gather", "reduce")
    of_units = [each.start if is_launch else each.wait for each in collectives]
    stages = [info.gathers[name].first + ahead.get(name, []) for name in step.units if step.kind == "gather"]
    before = (nodes[:-1] or ([] if is_launch else nodes) for nodes in of_units)  # a wait, before what reads it if any
    return [*chain(*stages), *chain(*before), *(nodes[-1] for nodes in of_units)]


# Note [Why the order is pinned]
# Inductor lowers an FX graph in its order, but its scheduler may reorder operations afterwards. Its memory pass
# (`reorder_for_peak_memory`) would move each all-gather right before its wait, which undoes all prefetching, and
# postpone reduce-scatters and the products that feed them to the end of backward. `simple_overlap` of torch 2.14 would
# postpone waits of reduce-scatters to there, which keeps all gradients in full size. Both are switched off in our
# graphs (`switched_off`), but horizontal fusion may still compute the gradients of two units in one kernel, so that the
# first reduce-scatter waits for the second unit.
#
# So control dependencies chain collectives, waits and the matrix products between them. A product that writes into a
# pack stays out of the chain: inside `control_deps` it would get a buffer of its own and be copied; its reduce-scatter,
# which is in the chain, holds it early enough.


def pin_order(context: GraphContext) -> None:
    """Chain collectives, waits and matrix products by control dependencies (Note [Why the order is pinned])."""
    if tagged(context.graph, "gather", "reduce", "defer_reduce"):
        events = list(filter(_is_event, context.graph.nodes))
        dependencies = {
            after: OrderedSet([result])
            for before, after in pairwise(events)
            # of a call that returns several tensors: the first of them
            if (result := min(before.users) if isinstance(before.meta["val"], list) else before) < after
        }
        preserve_node_ordering(context.graph, dependencies)


_EVENTS = (*STARTS, WAIT, ops.WAIT_COLLECTIVE, ops.DEFER_REDUCE, ops.UPDATE_SHARD, ops.CHECK_RANKS)


def _is_event(node: fx.Node) -> bool:
    if node.target in _EVENTS:
        return True
    return is_product(node) and not any(reader.target is ops.PACK_GRADS for reader in readers(node)[1])
