"""Activations on the host between forward and backward: which of a block, when, and how the joint graph says so.

    forward    block 3  z = product          copy = to_host(z)
               block 4  ...                  host = wait_copy(copy, z)               z is freed
    backward   block 4  g = first gradient   returned = from_host(host, g)
               ...
               block 3                       z' = wait_copy(returned, host)          what backward reads for z

Copies are made while other blocks compute. `from_host` has the gradient among its arguments for two reasons: it may not
begin before it is computed, and the partitioner takes it for a node of backward, so that what forward saves is `host`.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.core.ops import FROM_HOST, TO_HOST, WAIT_COPY
from fsdp_compile.passes.graph.costs import size_of
from fsdp_compile.passes.graph.nodes import Kind, Tag, backward_nodes, block_path, module_path, set_tag

LARGE = 1 << 16  # bytes below which an activation is not worth a copy of its own


@dataclass(frozen=True)
class Again:
    """What of a block is computed again in backward: `nodes`, in order, of which none needs more than `saved`.

    What is `copied` is copied to the host at the end of the `next` block's forward at the latest, and back from the
    beginning of that block's backward on.
    """

    nodes: list[fx.Node]
    saved: list[fx.Node]
    copied: list[fx.Node] = field(default_factory=list)
    next: "Next | None" = None


class Next(NamedTuple):
    """The last node of a block's forward, and the first one of its backward that is a tensor."""

    last: fx.Node
    first: fx.Node


def to_copy(
    nodes: Sequence[fx.Node], again: Set[fx.Node], stored: Set[fx.Node], position: Mapping[fx.Node, int], split: int
) -> list[fx.Node]:
    """Those of a block's `nodes` that backward needs beside what it computes again, if they are large and dense."""
    return [
        node
        for node in nodes
        if node not in again | stored and size_of(node) >= LARGE and node.meta["val"].is_contiguous()
        if any(user in again or position.get(user, 0) >= split for user in node.users)
    ]


def following(
    graph: fx.Graph, spans: Mapping[str, Sequence[fx.Node]], position: Mapping[fx.Node, int], split: int
) -> dict[str, Next]:
    """What follows each block but the last: where the next one's forward ends, and where its backward begins."""
    begins: dict[str, fx.Node] = {}
    for node in sorted(backward_nodes(graph)):
        path = block_path(node)
        if path and position.get(node, 0) >= split and isinstance(node.meta.get("val"), Tensor):
            begins.setdefault(path, node)
    return {name: Next(spans[other][-1], begins[other]) for name, other in pairwise(spans) if other in begins}


def copy_to_host(graph: fx.Graph, again: Again, position: Mapping[fx.Node, int], split: int) -> set[fx.Node]:
    """Copy what of a block is copied; return which nodes have copies of their own in backward.

    Those that follow from what was copied back: computed from that, they are nodes of backward and need no tags.
    """
    assert again.next is not None
    back: dict[fx.Node, fx.Node] = {}  # what backward reads instead
    users = [user for node in (*again.nodes, *again.copied) for user in node.users if position.get(user, 0) >= split]
    first = min(users)

    def call(target: Any, args: tuple[fx.Node, ...], kind: Kind | None = None) -> fx.Node:
        node = graph.call_function(target, args)
        values = fx.map_arg(args, lambda arg: arg.meta["val"])
        with args[0].meta["val"].fake_mode:
            node.meta["val"] = target(*values)
        if kind is not None:
            set_tag(node, Tag(kind, -1, module_path(args[0]), False))
        return node

    for node in again.copied:
        with graph.inserting_after(node):
            copy = call(TO_HOST, (node,), "host")
        with graph.inserting_after(again.next.last):
            host = call(WAIT_COPY, (copy, node), "host")
        host.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with graph.inserting_after(again.next.first):
            returned = call(FROM_HOST, (host, again.next.first))
        with graph.inserting_before(first):
            back[node] = call(WAIT_COPY, (returned, host))
    for node in again.nodes:
        if not back.keys().isdisjoint(node.all_input_nodes):
            with graph.inserting_before(first):
                back[node] = graph.node_copy(node, lambda each: back.get(each, each))
    for user in users:
        for node in user.all_input_nodes:
            if node in back:
                user.replace_input_with(node, back[node])
    return back.keys() - set(again.copied)
