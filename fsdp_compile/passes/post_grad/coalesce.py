"""Issue collectives that the plan launches at once by one call, one kernel of NCCL."""

import operator
from dataclasses import replace

from torch import fx

from fsdp_compile.comm import collectives
from fsdp_compile.passes.graph.analyze import can_coalesce
from fsdp_compile.passes.graph.nodes import set_tag, tag_of, tagged
from fsdp_compile.passes.pipeline import GraphContext


def coalesce_launches(context: GraphContext) -> None:
    """Replace the starts of one launch by one coalesced call, if that exists.

    gather a  gather b  ->  wait a  wait b                                   two launches, next to each other
    both = coalesced gather [a, b]  ->  both[0]  both[1]  ->  their waits    one launch, which the first wait completes
    """
    graph = context.graph
    launches: dict[int, list[fx.Node]] = {}
    for start in tagged(graph, "gather", "reduce"):
        launch = tag_of(start).launch
        if launch is not None:
            launches.setdefault(launch, []).append(start)
    for starts in filter(can_coalesce, launches.values()):
        last, names = max(starts), [start.name for start in starts]
        with graph.inserting_before(last):  # all inputs have been computed there
            sent = [start.args[0] for start in starts]
            call = graph.call_function(collectives.COALESCED[last.target], (sent, *last.args[1:]))  # type: ignore[index]  # can_coalesce
            results = [graph.call_function(operator.getitem, (call, index)) for index in range(len(starts))]
        call.meta["val"] = [start.meta["val"] for start in starts]
        set_tag(call, replace(tag_of(starts[0]), path=" ".join(tag_of(start).path or "root" for start in starts)))
        for start, result in zip(starts, results, strict=True):
            result.meta["val"] = start.meta["val"]
            start.replace_all_uses_with(result)
            graph.erase_node(start)
        for result, name in zip(results, names, strict=True):
            result.name = name
