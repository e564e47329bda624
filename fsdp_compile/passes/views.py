"""Kinds of nodes, and looking through views in a graph."""

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default

# Views that keep the elements' logical order: a flattened result is the flattened input.
SAME_ORDER = frozenset(
    (
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.alias.default,
        aten.detach.default,
    )
)


def is_view(node: fx.Node) -> bool:
    """Whether `node` is a view of its first argument."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target in SAME_ORDER:
        return True
    schema = getattr(node.target, "_schema", None)
    alias = schema.arguments[0].alias_info if schema and schema.arguments else None
    return alias is not None and not alias.is_write


def is_product(node: fx.Node) -> bool:
    """Whether the node does the kind of work that hides communication: it is in torch's flop counter."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in flop_registry


def is_pointwise(node: fx.Node) -> bool:
    """Whether the node computes each element from elements of its inputs: kernels that read it may compute it."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def is_view_or_cast(node: fx.Node) -> bool:
    """Whether `node` is its first argument in another shape or dtype."""
    return is_view(node) or node.target is CAST


def derived(node: fx.Node) -> list[fx.Node]:
    """The views and casts of `node`, and theirs."""
    found: dict[fx.Node, None] = {}
    work = [node]
    while work:
        users = [user for user in work.pop().users if is_view_or_cast(user) and user not in found]
        found.update(dict.fromkeys(users))
        work += users
    return list(found)


def readers(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The views of `node`, views of views included, and the other nodes that read it or them; each once."""
    views: dict[fx.Node, None] = {}
    others: dict[fx.Node, None] = {}
    work = [node]
    while work:
        for user in work.pop().users:
            if is_view(user):
                views[user] = None
                work.append(user)
            else:
                others[user] = None
    return list(views), list(others)
