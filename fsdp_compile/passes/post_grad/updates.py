"""What `compile_step` needs of graphs: where units are updated in backward, and what the next forward gathers first."""

from fsdp_compile.core import ops
from fsdp_compile.passes.graph.analyze import stored_shard
from fsdp_compile.passes.graph.nodes import add_call, tag_of, tagged
from fsdp_compile.passes.pipeline import GraphContext


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
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        args, mode = (shards, starts[0].meta["val"].device), starts[0].meta["val"].fake_mode
        add_call(graph, ops.PREFETCH_NEXT, args, mode=mode, name="prefetch_next")
