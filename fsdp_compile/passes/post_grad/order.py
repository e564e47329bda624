"""Put a graph into the order of its plan, pin that order for Inductor's scheduler, and compare it among ranks."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, pairwise, zip_longest
from typing import Any

from torch import fx

import fsdp_compile.agree.order  # noqa: F401  (the body of `check_ranks`, for who shards nothing by this package)
from fsdp_compile.comm.collectives import GROUP_ARGUMENT, STARTS, WAIT
from fsdp_compile.core import ops
from fsdp_compile.passes._torch import OrderedSet, inductor_config, preserve_node_ordering
from fsdp_compile.passes.graph.analyze import GraphInfo, stored_shard, with_ancestors, with_preparation
from fsdp_compile.passes.graph.nodes import Tag, add_call, get_tag, is_product, readers, set_tag, tag_of, tagged
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.plan import PlanError, Step


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
    of_units = [each.start if step.kind in ("gather", "reduce") else each.wait for each in collectives]
    stages = [info.gathers[name].first + ahead.get(name, []) for name in step.units if step.kind == "gather"]
    is_wait = step.kind in ("wait", "wait_reduce")  # which comes first, before what reads it if there is any
    before = (nodes[:-1] or (nodes if is_wait else []) for nodes in of_units)
    return [*chain(*stages), *chain(*before), *(nodes[-1] for nodes in of_units)]


def check_order(context: GraphContext) -> None:
    """Raise PlanError unless the order of the graph is that of its plan."""
    info, plan = context.info, context.plan
    steps: dict[fx.Node, tuple[str, str]] = {}
    for name, gather in info.gathers.items():
        steps |= {gather.start[-1]: ("gather", name), gather.wait[0]: ("wait", name)}
    for name, reduce in info.reduces.items():
        steps |= {reduce.start[-1]: ("reduce", name), reduce.wait[0]: ("wait_reduce", name)}
    tasks = {node: index for index, nodes in enumerate(info.tasks) for node in nodes}
    at, actual = 0, []
    for node in context.graph.nodes:
        at = max(at, tasks.get(node, -1) + 1)
        if node in steps:
            actual.append((*steps[node], at))
    planned = [(step.kind, name, step.at) for step in plan.steps if step.kind != "free" for name in step.units]
    if actual != planned:
        expected, seen = next((a, b) for a, b in zip_longest(planned, actual) if a != b)
        raise PlanError(f"order of the graph: expected {expected}, found {seen}; this is a defect of the pass")


def start_reduces(context: GraphContext) -> None:
    """Let the eager runtime reduce the packed gradients of a flat parameter as soon as the last of them is computed."""
    if _runs_apart():
        return
    graph, packs = context.graph, {tag_of(pack).unit: pack for pack in tagged(context.graph, "pack")}
    for full, tag in _arriving(graph):
        pack = packs.get(tag.unit)
        if pack is not None and any(user.op == "output" for user in pack.users):
            last = max(pack.all_input_nodes, default=pack)
            if last is not pack and last.op != "placeholder":
                last.append(pack)
            with graph.inserting_after(pack):
                add_call(graph, ops.START_REDUCE_, (pack, full), mode=pack.meta["val"].fake_mode)


def await_gathers(context: GraphContext) -> None:
    """Wait for parameters that the eager runtime gathers where they are first read, each flat parameter by itself.

    Not for Inductor's CUDA graphs, which copy inputs before, nor in its C++ wrapper: there the runtime waits for all.
    """
    if _runs_apart():
        return
    graph = context.graph
    for full, tag in _arriving(graph):
        for view in sorted(readers(full)[0], reverse=True):
            if view.users:
                min(view.users).prepend(view)
        # as an output it is saved for backward
        read_by = [user for user in full.users if user.op != "output" and user.target is not ops.START_REDUCE_]
        if read_by:
            with graph.inserting_before(min(read_by)):
                name, mode = f"await_{tag.path or 'root'}", full.meta["val"].fake_mode
                wait = add_call(graph, ops.AWAIT_GATHER, (full,), mode=mode, name=name)
        for user in read_by:
            user.replace_input_with(full, wait)


def _runs_apart() -> bool:
    return bool(inductor_config.triton.cudagraphs or inductor_config.cpp_wrapper)


def _arriving(graph: fx.Graph) -> list[tuple[fx.Node, Tag]]:
    """The flat parameters that the eager runtime gathers, inputs of the graph."""
    inputs = [(node, get_tag(node)) for node in graph.find_nodes(op="placeholder")]
    return [(node, tag) for node, tag in inputs if tag is not None and tag.kind == "arriving"]


def place_updates(context: GraphContext) -> None:
    """Move each update behind the waits for all-gathers of the same unit, which read the shard that it changes.

    They rarely are in the wrong order: the product that computes the gradient would read nothing gathered.
    """
    waits = tagged(context.graph, "wait")
    for update in tagged(context.graph, "update"):
        last = max((wait for wait in waits if tag_of(wait).unit == tag_of(update).unit), default=update)
        if last > update:
            last.append(update)


def name_prefetched(context: GraphContext) -> None:
    """Put `fsdp_flat::prefetch_next` before a forward: it tells `compile_step` what to gather for the next one.

    Needs a link and an update in the configuration; without them `compile_step` follows a rule.
    """
    graph, info, config = context.graph, context.info, context.config
    starts = tagged(graph, "gather")
    if context.direction != "forward" or config.update is None or config.link is None or not starts:
        return
    gathers = [gather for gather in info.gathers.values() if tag_of(gather.start[-1]).arrives is not None]
    shards = [shard for gather in gathers if (shard := stored_shard(gather)) is not None]
    _put_first(graph, "prefetch_next", ops.PREFETCH_NEXT, (shards, starts[0].meta["val"].device), starts[0])


def _put_first(graph: fx.Graph, name: str, target: Any, args: tuple[Any, ...], like: fx.Node) -> None:
    """Insert a call before all other calls."""
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        add_call(graph, target, args, mode=like.meta["val"].fake_mode, name=name)


# Note [Why the order is pinned]
# Inductor lowers an FX graph in its order, but its scheduler may reorder operations afterwards. Its memory pass
# (`reorder_for_peak_memory`) would move each all-gather right before its wait, which undoes all prefetching, and
# postpone reduce-scatters and the products that feed them to the end of backward. `simple_overlap` of torch 2.14 would
# postpone waits of reduce-scatters to there, which keeps all gradients in full size. Both are switched off in our
# graphs (`switched_off`), but horizontal fusion may still compute the gradients of two units in one kernel, so that the
# first reduce-scatter waits for the second unit.
#
# So control dependencies chain collectives, waits and the matrix products between them. Two kinds of nodes are special.
# A product that writes into a pack stays out of the chain: inside `control_deps` it would get a buffer of its own and
# be copied; its reduce-scatter, which is in the chain, holds it early enough. The reduction of the rows that an
# all-to-all brought is in the chain although it is no product: fused with a later one it would keep the received rows
# alive (Note [Why gloo's reduce-scatter is an all-to-all]).


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


_EVENTS = (
    *STARTS, WAIT, ops.TO_HOST, ops.FROM_HOST, ops.WAIT_COPY,
    ops.WAIT_COLLECTIVE, ops.DEFER_REDUCE, ops.UPDATE_SHARD, ops.CHECK_RANKS, ops.RECORD_TIME, ops.PREFETCH_NEXT,
)  # fmt: skip


def _is_event(node: fx.Node) -> bool:
    if node.target in _EVENTS or ((tag := get_tag(node)) is not None and tag.kind == "mean"):
        return True
    return is_product(node) and not any(reader.target is ops.PACK_GRADS for reader in readers(node)[1])


# --- among ranks ------------------------------------------------------------------------------------------------------

# Note [Why ranks compare before the first collective]
# Ranks that run different collectives wait for each other for ever, or read each other's parameters as their own. Which
# collectives a graph has depends on the model, its inputs and the plan, so a mistake of the user's can make them differ
# and no rank can see it alone. Therefore each graph names its collectives, and ranks compare the names before they run
# the first one.
#   - The sequence is text in the graph, so that a graph from a compile cache is compared as well. Groups are numbered
#     in order of first appearance: under hybrid sharding their names differ from rank to rank, and the graph must not
#     hold the rank.
#   - The comparison goes through the store of the process group. A collective could not time out, and would itself be
#     one of those that ranks run in different order.
#   - `pin_order` keeps the operator before the first collective.
#
# At the first run of a sequence, and where ranks did not expect it next, the operator compares it with the other ranks
# of each group that the graph communicates in (agree/order.py). It notes for long waits that the graph has begun.


def check_ranks(context: GraphContext) -> None:
    """Put `fsdp_flat::check_ranks` at the start of the graph (Note [Why ranks compare before the first collective])."""
    graph = context.graph
    planned = [node for node in tagged(graph, "gather", "reduce", "maximum") if node.target in STARTS]
    if not planned:
        return
    starts = [node for node in graph.nodes if node.target in STARTS]
    names: list[str] = [start.args[GROUP_ARGUMENT[start.target]] for start in starts]
    groups, programs = list(dict.fromkeys(names)), dict(zip(planned, _local_programs(planned), strict=True))
    lines = []
    for start, name in zip(starts, names, strict=True):
        line = f"{start.target} of the model itself"  # of a size that ranks may choose, such as rows for experts
        if start in programs:
            values = [sent.meta["val"] for sent in _sent(start)]
            sizes = " + ".join(str(value.numel() * value.element_size()) for value in values)
            line = f"{get_tag(start)}, {sizes} bytes of {str(values[0].dtype).removeprefix('torch.')}"
        lines.append(f"{line}, group {groups.index(name)}{programs.get(start, '')}")
    first = _sent(planned[0])[0]
    gathers = [start for start in planned if tag_of(start).kind == "gather"]
    read = with_ancestors(_sent(gathers[0])) if gathers else ()
    inputs = chain.from_iterable((node, *node.all_input_nodes) for node in read)
    shards = [node for node in inputs if node.op == "placeholder"][:1]  # tells of which model the graph is
    arguments = (shards, "\n".join(lines), groups, context.config.check_ranks_timeout, first.meta["val"].device)
    _put_first(graph, "check_ranks", ops.CHECK_RANKS, arguments, first)


def _sent(start: fx.Node) -> list[fx.Node]:
    """What a collective sends: one tensor, or several if it is coalesced."""
    sent = start.args[0]
    return [sent] if isinstance(sent, fx.Node) else list(sent)  # type: ignore[arg-type]  # fx arguments are untyped


def _local_programs(starts: list[fx.Node]) -> list[str]:
    """For each collective, a digest of what ranks compute on their shards for it, without the names of groups."""
    numbers: dict[fx.Node, int] = {}
    texts: list[str] = []
    for start in starts:
        lines = []
        for node in with_ancestors(_sent(start)) if tag_of(start).kind != "reduce" else ():
            if (tag := get_tag(node)) is not None and tag.kind in ("local", "maximum") and node.target not in STARTS:
                numbers[node] = len(numbers)
                known = [
                    a for a in node.args if not (isinstance(a, list | tuple) and any(isinstance(t, str) for t in a))
                ]
                args, kwargs = fx.map_arg((known, dict(node.kwargs)), lambda each: f"%{numbers.get(each, '')}")
                lines.append(f"{node.target}{args}{kwargs}")
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        texts.append(f", computed from the shard by {digest}" if lines else "")
    return texts
