"""Let ranks compare the collectives of a graph before its first one."""

import hashlib
from itertools import chain

from torch import fx

import fsdp_compile.agree.rank_order  # noqa: F401  (the body of `check_ranks`, for who shards nothing by this package)
from fsdp_compile.comm.collectives import GROUP_ARGUMENT, STARTS
from fsdp_compile.core import ops
from fsdp_compile.passes.graph.analyze import with_ancestors
from fsdp_compile.passes.graph.nodes import add_call, get_tag, tag_of, tagged
from fsdp_compile.passes.pipeline import GraphContext

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
# of each group that the graph communicates in (agree/rank_order.py). It notes for long waits that the graph has begun.


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
            values = [sent.meta["val"] for sent in _sent_nodes(start)]
            sizes = " + ".join(str(value.numel() * value.element_size()) for value in values)
            line = f"{get_tag(start)}, {sizes} bytes of {str(values[0].dtype).removeprefix('torch.')}"
        lines.append(f"{line}, group {groups.index(name)}{programs.get(start, '')}")
    first = _sent_nodes(planned[0])[0]
    gathers = [start for start in planned if tag_of(start).kind == "gather"]
    read = with_ancestors(_sent_nodes(gathers[0])) if gathers else ()
    inputs = chain.from_iterable((node, *node.all_input_nodes) for node in read)
    shards = [node for node in inputs if node.op == "placeholder"][:1]  # tells of which model the graph is
    arguments = (shards, "\n".join(lines), groups, context.config.check_ranks_timeout, first.meta["val"].device)
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        add_call(graph, ops.CHECK_RANKS, arguments, mode=first.meta["val"].fake_mode, name="check_ranks")


def _sent_nodes(start: fx.Node) -> list[fx.Node]:
    """What a collective sends: one tensor, or several if it is coalesced."""
    sent = start.args[0]
    return [sent] if isinstance(sent, fx.Node) else list(sent)  # type: ignore[arg-type]  # fx arguments are untyped


def _local_programs(starts: list[fx.Node]) -> list[str]:
    """For each collective, a digest of what ranks compute on their shards for it, without the names of groups."""
    numbers: dict[fx.Node, int] = {}
    texts: list[str] = []
    for start in starts:
        lines = []
        for node in with_ancestors(_sent_nodes(start)) if tag_of(start).kind != "reduce" else ():
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
