"""Gradients take the place of the parameters that they are of: a unit's backward needs one buffer, not two.

A packed buffer is laid out like the gathered one, and a parameter is read for the last time about when its gradient is
computed. So the gradient may be written where the parameter was, and the reduce-scatter sends the memory that the
all-gather filled:

    wait gather  ->  grad_x = grad_y @ W  ->  W's place = grad_y.T @ x  ->  reduce        the same memory throughout

The pass names the buffer in the pack's last argument; pack_grads.py writes there, after what still reads it.
"""

from collections.abc import Mapping

from torch import fx

from fsdp_compile.core.ops import PACK_GRADS
from fsdp_compile.passes.graph.node_kinds import is_pointwise, is_product, is_view, readers
from fsdp_compile.passes.graph.tags import get_tag, tagged
from fsdp_compile.passes.pipeline import GraphContext


def reuse_gathered(context: GraphContext) -> None:
    """Let each pack whose unit is gathered in the same graph have the gathered buffer."""
    graph = context.graph
    waits = {get_tag(gather).unit: next(iter(gather.users)) for gather in tagged(graph, "gather")}  # type: ignore[union-attr]  # tagged
    for pack in graph.find_nodes(op="call_function", target=PACK_GRADS):
        wait = waits.get(get_tag(pack).unit)  # type: ignore[union-attr]  # likewise
        if wait is None or not _fits(pack, wait):
            continue
        place = {node: index for index, node in enumerate(graph.nodes)}  # the last one has moved nodes
        if _in_time(pack, wait, place):
            _put_in_order(pack, wait, place)
            pack.args = (*pack.args, wait)


def gradients_of(pack: fx.Node) -> list[fx.Node]:
    """The gradients that are packed."""
    return [grad for grad in pack.args[0] if isinstance(grad, fx.Node)]  # type: ignore[union-attr]  # fx arguments are untyped


def is_reused(pack: fx.Node) -> bool:
    """Whether a pack lies in its unit's gathered buffer."""
    return len(pack.args) > 2


def _fits(pack: fx.Node, wait: fx.Node) -> bool:
    """Whether the buffers are alike, the gradients are only sent, and nothing outlives the gathered buffer."""
    packed, gathered = pack.meta["val"], wait.meta["val"]
    if packed.dtype != gathered.dtype or packed.shape != gathered.shape or packed.device != gathered.device:
        return False
    only_packed = all(len(grad.users) == 1 for grad in gradients_of(pack))
    only_sent = all((tag := get_tag(user)) is not None and tag.kind == "reduce" for user in pack.users)
    return only_packed and only_sent and all(reader.op != "output" for reader in readers(wait)[1])


def _in_time(pack: fx.Node, wait: fx.Node, place: Mapping[fx.Node, int]) -> bool:
    """Whether gradients are computed while the parameters are there, and the last of them about when those go.

    Gradients that come later had better have a buffer of their own: until then there is none. A matrix product before
    the first reader, where the plan will wait, had better stay there, for the gather to hide behind, and no reduce
    should wait for readers beyond another product.
    """
    written = [place[grad] for grad in gradients_of(pack)]
    read = [place[reader] for reader in readers(wait)[1]]
    if not read or min(written) > max(read):
        return False
    early = any(is_product(grad) and place[grad] < min(read) for grad in gradients_of(pack))
    between = list(place)[max(written) + 1 : max(read)]
    return not early and not any(map(is_product, between))


def _put_in_order(pack: fx.Node, wait: fx.Node, place: Mapping[fx.Node, int]) -> None:
    """No gradient before the first reader; and the last one last, after all that reads parameters."""
    reading, gradients = readers(wait)[1], gradients_of(pack)
    first, reader = (choose(reading, key=place.__getitem__) for choose in (min, max))
    for early in [grad for grad in gradients if place[grad] < place[first]]:
        first.append(early)
    gradient = max(gradients, key=place.__getitem__)
    if place[gradient] < place[reader]:
        reader.append(gradient)
    end = max(place[gradient], place[reader])
    before = {node for node in _computed_with(reading) if place[node] <= end}
    for node in _next_of(before, place, end):
        if gradient not in node.all_input_nodes:
            gradient.prepend(node)


def _computed_with(nodes: list[fx.Node]) -> set[fx.Node]:
    """The pointwise ones of `nodes`, and what is computed from them in the same kernel: that reads what they read."""
    found: set[fx.Node] = set()
    work = [node for node in nodes if is_pointwise(node)]
    while work:
        node = work.pop()
        if node not in found:
            found.add(node)
            work += [user for user in node.users if is_pointwise(user) or is_view(user)]
    return found


def _next_of(before: set[fx.Node], place: Mapping[fx.Node, int], end: int) -> list[fx.Node]:
    """What follows on `before` beyond `end`, up to the next pointwise node, if all that it needs is there.

    A sum with the residual's gradient, most of the time. Computed later it would read the last result of `before` from
    memory, and that would have to be written first.
    """
    found: list[fx.Node] = []
    for node in sorted(before, key=place.__getitem__):
        for user in sorted(node.users, key=place.__getitem__):
            chain = []
            while is_view(user) and place[user] > end and len(user.users) == 1:
                chain.append(user)
                user = next(iter(user.users))
            there = all(place[each] <= end or each in chain for each in user.all_input_nodes)
            if place[user] > end and is_pointwise(user) and there and user not in found:
                found += [*chain, user]
    return found
