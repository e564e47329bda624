"""What the plan launches together becomes one call: NCCL then launches one kernel, and no byte is copied.

gather a  gather b  ->  wait a  wait b                                 two launches, next to each other
both = coalesced gather [a, b]  ->  both[0], both[1]  ->  their waits   one; the first wait completes it
"""

import operator
from collections.abc import Iterable, Sequence

from torch import fx

from fsdp_compile.comm.collectives import COALESCED, GROUP_ARGUMENT, copies
from fsdp_compile.passes.graph.tags import Tag, set_tag, tag_of, tagged
from fsdp_compile.passes.pipeline import GraphContext


def can_coalesce(starts: Sequence[fx.Node]) -> bool:
    """Whether one call can start all of `starts`: they are alike but for what they send.

    Gloo has no such call: its own runs them one by one, and copies.
    """
    if not starts:
        return True
    first, *others = starts
    if first.target not in COALESCED or copies(first.meta["val"], _group(first)):
        return False
    return all(_how(each) == _how(first) for each in others)


def coalesce_launches(context: GraphContext) -> None:
    """Make one call of each launch of several units, if one call can start them. After autograd only."""
    graph = context.graph
    launches: dict[int, list[fx.Node]] = {}
    for start in tagged(graph, "gather", "reduce"):
        launch = tag_of(start).launch
        if launch is not None:
            launches.setdefault(launch, []).append(start)
    for starts in launches.values():
        if can_coalesce(starts):
            _coalesce(graph, starts)


def _coalesce(graph: fx.Graph, starts: list[fx.Node]) -> None:
    """One call where the last of `starts` is: what each sends has been computed there."""
    last, names = starts[-1], [start.name for start in starts]
    with graph.inserting_before(last):
        sent = [start.args[0] for start in starts]
        call = graph.call_function(COALESCED[last.target], (sent, *last.args[1:]))  # type: ignore[index]  # can_coalesce
        call.meta["val"] = [start.meta["val"] for start in starts]
        set_tag(call, _joined(starts))
        results = [graph.call_function(operator.getitem, (call, number)) for number in range(len(starts))]
    for start, result in zip(starts, results, strict=True):
        result.meta["val"] = start.meta["val"]
        start.replace_all_uses_with(result)
        graph.erase_node(start)
    call.name = "_".join([names[0], *(name.partition("_")[2] for name in names[1:])])
    for result, name in zip(results, names, strict=True):
        result.name = name


def _joined(starts: Iterable[fx.Node]) -> Tag:
    """The tag of one call for several units: that of the first, with all their paths."""
    first, *others = map(tag_of, starts)
    paths = " ".join(each.path or "root" for each in (first, *others))
    return Tag(first.kind, first.unit, paths, first.reshard, first.launch)


def _group(start: fx.Node) -> str:
    return start.args[GROUP_ARGUMENT[start.target]]  # type: ignore[return-value,index]  # fx arguments are untyped


def _how(start: fx.Node) -> tuple[object, ...]:
    """What has to be alike: the operator, the reduction, the group, dtype and device."""
    value = start.meta["val"]
    return start.target, *start.args[1:], value.dtype, value.device
