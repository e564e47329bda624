"""Each graph says, before its first collective, which collectives it has: ranks compare that (agreement.py).

The text stands in the graph, so a graph that comes out of a compile cache is compared as well. Groups are numbered in
order of first appearance: under hybrid sharding their names differ from rank to rank.
"""

from torch import fx

from fsdp_compile.comm.collectives import GROUP_ARGUMENT
from fsdp_compile.config import CompileConfig
from fsdp_compile.core.ops import CHECK_RANKS
from fsdp_compile.passes.graph.tags import get_tag, tagged


def agree(graph: fx.Graph, config: CompileConfig) -> None:
    """Put `fsdp_flat::check_ranks` at the start of a graph that has collectives of ours; `pin` keeps it before them."""
    starts = tagged(graph, "gather", "reduce")
    if not starts:
        return
    names: list[str] = [start.args[GROUP_ARGUMENT[start.target]] for start in starts]  # type: ignore[misc,index]  # fx arguments are untyped
    groups = list(dict.fromkeys(names))
    sequence = "\n".join(_describe(start, groups.index(name)) for start, name in zip(starts, names, strict=True))
    value = _sent(starts[0])[0].meta["val"]
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        arguments = (sequence, groups, config.check_ranks_timeout, value.device)
        node = graph.create_node("call_function", CHECK_RANKS, arguments, name="check_ranks")
    with value.fake_mode:
        node.meta["val"] = CHECK_RANKS(*node.args)


def _describe(start: fx.Node, group: int) -> str:
    values = [sent.meta["val"] for sent in _sent(start)]
    sizes = " + ".join(str(value.numel() * value.element_size()) for value in values)
    dtype = str(values[0].dtype).removeprefix("torch.")
    return f"{get_tag(start)}, {sizes} bytes of {dtype}, group {group}"


def _sent(start: fx.Node) -> list[fx.Node]:
    """What a collective sends; several, if one call launches several."""
    sent = start.args[0]
    return [sent] if isinstance(sent, fx.Node) else list(sent)  # type: ignore[arg-type]  # fx arguments are untyped
