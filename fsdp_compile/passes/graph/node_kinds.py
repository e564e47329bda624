"""What kind of node a node is, and looking through views in a graph: the one place that knows."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default

_LIKE = {  # not in torch's registry as of 2.13
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}

_POINTWISE = {aten.select_scatter, aten.slice_scatter, aten.constant_pad_nd}  # for Inductor, without torch's tag

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


def packet_of(node: fx.Node) -> Any:
    """What `node` calls, whichever the overload."""
    return getattr(node.target, "overloadpacket", node.target)


def formula_of(node: fx.Node) -> Callable[..., Any] | None:
    """How torch counts the operations of what `node` calls; None: it does not."""
    packet = packet_of(node)
    return flop_registry.get(_LIKE.get(packet, packet))


def is_product(node: fx.Node) -> bool:
    """Whether the node does the kind of work that hides communication: an operator in torch's flop counter."""
    # Of what is only counted like one, attention on CPU and flex attention, no graph is cut into tasks.
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return is_operator and packet_of(node) not in _LIKE and formula_of(node) is not None


def is_pointwise(node: fx.Node) -> bool:
    """Whether the node computes each element from elements of its inputs: kernels that read it may compute it."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or packet_of(node) in _POINTWISE


def is_loop(node: fx.Node) -> bool:
    """Whether Inductor computes the node in a loop that it may fuse with others: pointwise, or a reduction."""
    return is_pointwise(node) or torch.Tag.reduction in getattr(node.target, "tags", ())


def is_view_or_cast(node: fx.Node) -> bool:
    """Whether `node` is its first argument in another shape or dtype."""
    return is_view(node) or node.target is CAST


def derived(node: fx.Node, kind: Callable[[fx.Node], bool] = is_view_or_cast) -> list[fx.Node]:
    """The users of `node` of a kind, the views and casts if none is named, and theirs; each once."""
    found: dict[fx.Node, None] = {}
    work = [node]
    while work:
        users = [user for user in work.pop().users if kind(user) and user not in found]
        found.update(dict.fromkeys(users))
        work += users
    return list(found)


def reads(node: fx.Node, through: Callable[[fx.Node], bool] = is_view) -> Iterator[fx.Node]:
    """The nodes that read `node`, also through views, in the order of users; once for each way to it."""
    for user in node.users:
        if through(user):
            yield from reads(user, through)
        else:
            yield user


def readers(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The views of `node`, views of views included, and the other nodes that read it or them; each once."""
    return derived(node, is_view), list(dict.fromkeys(reads(node)))
