"""Tags: what a graph node is to us. Passes match tags and our own operators, never node names or shapes of graphs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import fx

_KEY = "fsdp_compile"

Kind = Literal[
    "cast",
    "gather",
    "wait",
    "view",
    "pack",
    "add_accumulated",
    "defer_reduce",
    "scale",
    "reduce",
    "wait_reduce",
    "mean",
]


@dataclass(frozen=True)
class Tag:
    """What a node does for which unit.

    Attributes:
        kind: what the node does:
            cast            of the shard before its gather, or of a gradient before it is packed
            gather, wait    all-gather of the parameters, and the wait for it
            view            of one parameter in the gathered buffer
            pack            the gradients into one buffer
            add_accumulated  to that the gradients that were accumulated under no_sync
            defer_reduce    passes packed gradients to the eager runtime, which reduces them later
            scale           of gradients, around a sum in float16
            reduce, wait_reduce  reduce-scatter or all-reduce, and the wait for it
            mean            of the rows that an all-to-all brought in place of a reduce-scatter
        unit: index of the unit in order of its first gather in the traced forward; -1 if that is in another graph.
        path: where the unit's module is in the model, for people.
        reshard: whether the unit's gathered buffer is freed between forward and backward; None: not decided yet.
        launch: which coalesced launch of the plan a gather or reduce belongs to; None: it is launched alone.
    """

    kind: Kind
    unit: int
    path: str
    reshard: bool | None
    launch: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.path or 'root'}"


def set_tag(node: fx.Node, tag: Tag) -> None:
    """Attach `tag` to `node`; it survives partitioning."""
    node.meta[_KEY] = tag


def get_tag(node: fx.Node) -> Tag | None:
    """The tag of `node`, or None."""
    return node.meta.get(_KEY)


def tag_of(node: fx.Node) -> Tag:
    """The tag of `node`, which has one."""
    tag = get_tag(node)
    assert tag is not None
    return tag


def tagged(graph: fx.Graph, *kinds: Kind) -> list[fx.Node]:
    """The nodes with a tag of one of `kinds`, in graph order; not a placeholder that brings what such a node made."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    return [n for n in calls if (tag := get_tag(n)) is not None and tag.kind in kinds]


def is_ours(graph: fx.Graph, markers: Iterable[object]) -> bool:
    """Whether the graph has our markers or tags; all other graphs are left untouched."""
    targets = set(markers)
    return any(get_tag(node) or node.target in targets for node in graph.nodes)


def module_path(node: fx.Node) -> str:
    """Path of the module whose forward called `node`, or what it is the derivative of; only for people."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    source = next(reversed(stack.values()))[0] if stack else ""
    words = re.findall(r"\w+", source.replace("L['self']", "").replace("_orig_mod", ""))
    return ".".join(word for word in words if word != "_modules")
