"""What `compile_step(..., update_in_backward=True)` needs of graphs: where units are updated in backward."""

from fsdp_compile.passes.graph.nodes import tag_of, tagged
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
