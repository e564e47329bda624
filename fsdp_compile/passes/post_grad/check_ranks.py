"""Ranks compare, before the first collective of a compiled graph, which collectives they are about to run.

The pass writes the sequence of collectives into the graph, as an argument of `fsdp_flat::check_ranks`. At the first run
of a sequence in a process the operator compares it with the other ranks of each group that the graph communicates in
(comm/comparison.py); later runs only look it up.
"""

import torch
from torch import fx

from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.collectives import GROUP_ARGUMENT
from fsdp_compile.comm.comparison import GroupCheck, Subject, compare_in_groups
from fsdp_compile.core.ops import CHECK_RANKS
from fsdp_compile.passes.graph.tags import get_tag, tagged
from fsdp_compile.passes.pipeline import GraphContext

# Note [Why ranks compare before the first collective]
# Ranks that run different collectives wait for each other for ever, or read each other's parameters as their own. Which
# collectives a graph has, and in which order, depends on the model, its inputs and the plan, so it can differ by a
# mistake of the user's that no rank can see alone. Therefore each graph names its collectives, and ranks compare this
# before they run the first one.
#   - The sequence is text in the graph, so a graph that comes out of a compile cache is compared as well. Groups are
#     numbered in order of first appearance: under hybrid sharding their names differ from rank to rank, and the graph
#     must not hold the rank.
#   - The comparison goes through the store of the process group. A collective could not time out, and would itself be
#     one of the collectives that ranks run in different order.
#   - `pin_order` keeps the operator before the first collective.


def check_ranks(context: GraphContext) -> None:
    """Put `fsdp_flat::check_ranks` at the start of the graph (Note [Why ranks compare before the first collective])."""
    graph = context.graph
    starts = tagged(graph, "gather", "reduce")
    if not starts:
        return
    names: list[str] = [start.args[GROUP_ARGUMENT[start.target]] for start in starts]  # type: ignore[misc,index]  # fx arguments are untyped
    groups = list(dict.fromkeys(names))
    sequence = "\n".join(_describe(start, groups.index(name)) for start, name in zip(starts, names, strict=True))
    value = _sent(starts[0])[0].meta["val"]
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        arguments = (sequence, groups, context.config.check_ranks_timeout, value.device)
        node = graph.create_node("call_function", CHECK_RANKS, arguments, name="check_ranks")
    with value.fake_mode:
        node.meta["val"] = CHECK_RANKS(*node.args)


def _describe(start: fx.Node, group: int) -> str:
    values = [sent.meta["val"] for sent in _sent(start)]
    sizes = " + ".join(str(value.numel() * value.element_size()) for value in values)
    dtype = str(values[0].dtype).removeprefix("torch.")
    return f"{get_tag(start)}, {sizes} bytes of {dtype}, group {group}"


def _sent(start: fx.Node) -> list[fx.Node]:
    """What a collective sends; several tensors, if one call launches several."""
    sent = start.args[0]
    return [sent] if isinstance(sent, fx.Node) else list(sent)  # type: ignore[arg-type]  # fx arguments are untyped


# --- at run time ------------------------------------------------------------------------------------------------------

_GRAPH = Subject(
    "compiled graph",
    "the same collectives in the same order",
    "the end of the graph",
    "compile the same model with the same arguments on all ranks",
)


@torch.library.impl("fsdp_flat::check_ranks", "default")
def _check_ranks(sequence: str, groups: list[str], timeout: float, device: torch.device) -> torch.Tensor:
    pairs = [(group, sequence) for group in map(group_named, groups) if sequence not in GroupCheck.of(group).agreed]
    if pairs:
        compare_in_groups(pairs, timeout, _GRAPH)
        for group, _ in pairs:
            GroupCheck.of(group).agreed.add(sequence)
    return torch.empty(0, device=device)
