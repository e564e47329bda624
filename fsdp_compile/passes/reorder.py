"""Order: gather one unit ahead, reduce as soon as packed; then pin that order against Inductor's scheduler.

    compute     | unit 0      | unit 1      | unit 2      |          forward, and backward in reverse
    gathers      g0 g1          g2            g3                     unit i+1 starts where unit i is waited for
    reduces                 r0            r1            r2           right after the last gradient of the unit

A unit counts from the first node that really reads its parameters, not from where its gather stood in the trace.
"""

from itertools import pairwise

import torch
from torch import fx
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet
from torch.utils.flop_counter import flop_registry

from fsdp_compile.collectives import STARTS, WAIT
from fsdp_compile.config import CompileConfig
from fsdp_compile.ops import ADD_KEPT, AGREE, HAND_OVER, PACK_GRADS, WAIT_GATHER
from fsdp_compile.passes.insert_collectives import SCALE
from fsdp_compile.passes.tags import get_tag, tagged
from fsdp_compile.passes.views import CAST, readers


def reorder(graph: fx.Graph, config: CompileConfig) -> None:
    """Place gathers, packs, reduces and all waits."""
    _place_gathers(graph)
    _place_reduces(graph, config.reduces_in_flight)


def _place_gathers(graph: fx.Graph) -> None:
    """Wait and views go before the first reader; each gather starts where the one before it is waited for.

    Where gathers go through two stages, the first stage runs one unit ahead of the second.
    """
    sent = {gather.args[0] for gather in tagged(graph, "gather")}
    waits = tagged(graph, "wait")
    _place_stage(graph, [wait for wait in waits if wait not in sent])
    _place_stage(graph, [wait for wait in waits if wait in sent])


def _place_stage(graph: fx.Graph, waits: list[fx.Node]) -> None:
    place = {node: i for i, node in enumerate(graph.nodes)}
    uses = []
    for wait in waits:
        views, others = readers(wait)
        first = min(others, key=lambda reader: place[reader])
        uses.append((place[first], wait, sorted(views, key=lambda view: place[view]), first))
    previous: fx.Node | None = None
    for _, wait, views, first in sorted(uses, key=lambda use: use[0]):
        for node in (wait, *views):
            first.prepend(node)
        anchor = previous if previous is not None else _first_compute(graph)
        gather: fx.Node = wait.args[0]  # type: ignore[assignment]  # fx arguments are untyped
        moved = [*_cast_of(gather), gather]
        while anchor in moved:
            anchor = anchor.next
        for node in moved:
            anchor.prepend(node)
        previous = wait


def _cast_of(gather: fx.Node) -> list[fx.Node]:
    """The cast of the shard to the dtype in which it is gathered, if there is one."""
    shard: fx.Node = gather.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    return [shard] if shard.target is CAST else []


def _first_compute(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def _place_reduces(graph: fx.Graph, in_flight: int | None) -> None:
    """Pack and reduce right after the last gradient; wait `in_flight` reduces later, the rest at the end.

    A reduce-scatter's input, a unit's full gradients, lives until the wait: waiting only at the end would keep the full
    gradients of the whole model.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    packs = sorted(tagged(graph, "pack"), key=lambda pack: _ready(pack, place))
    started: list[fx.Node] = []
    for pack in packs:
        max(pack.all_input_nodes, key=lambda grad: place[grad]).append(pack)
        sent = pack
        for target in (ADD_KEPT, SCALE):
            for following in [user for user in sent.users if user.target is target]:
                sent.append(following)
                sent = following
        for start in [user for user in sent.users if user.target in (*STARTS, HAND_OVER)]:
            sent.append(start)
            started += [start] if start.target in STARTS else []
    while started:
        started = _place_waits(graph, started, in_flight)


def _place_waits(graph: fx.Graph, started: list[fx.Node], in_flight: int | None) -> list[fx.Node]:
    """Wait for each `in_flight` reduces later; the reduces that start there, in a second group of ranks."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    second = []
    for index, start in enumerate(started):
        later = index + in_flight if in_flight is not None else len(started)
        where = started[later] if later < len(started) else graph.output_node()
        finishing = _finishing(start)
        others = [user for each in finishing for user in each.users if user not in finishing]
        first = min(where, *others, key=lambda node: place[node])  # a sum of two reduces reads it earlier
        for node in finishing:
            first.prepend(node)
        second += [node for node in finishing if node.target in STARTS][:1]
    return second


def _finishing(start: fx.Node) -> list[fx.Node]:
    """What makes a reduced tensor the shard's gradient: a wait, the rest of a division, a cast to the shard's dtype;
    before that, where ranks reduce in two groups, the second reduce."""
    found = [start]
    for node in found:
        found += [user for user in node.users if user.target in (WAIT, SCALE, CAST, *STARTS)]
    return found[1:]


def _ready(pack: fx.Node, place: dict[fx.Node, int]) -> int:
    return max(place[grad] for grad in pack.all_input_nodes)


def pin(graph: fx.Graph, config: CompileConfig) -> None:
    """Chain collectives, waits and the matrix products between them by control dependencies.

    Inductor's memory pass moves each gather next to its wait otherwise, and horizontal fusion may tie two units'
    gradients into one kernel, which delays a reduce-scatter. A product that writes into a pack stays out of the chain
    (wrapped, it would get a buffer of its own); the place of its reduce-scatter holds it early enough.
    """
    if not tagged(graph, "gather", "reduce", "hand_over"):
        return
    events = [node for node in graph.nodes if _is_event(node)]
    preserve_node_ordering(graph, {after: OrderedSet([before]) for before, after in pairwise(events)})


def _is_event(node: fx.Node) -> bool:
    if node.target in STARTS or node.target in (WAIT, WAIT_GATHER, HAND_OVER, AGREE) or _is_mean(node):
        return True
    return _is_product(node) and not any(reader.target is PACK_GRADS for reader in readers(node)[1])


def _is_mean(node: fx.Node) -> bool:
    """Whether the node reduces what an exchange brought: fused with a later one, it would keep all that alive."""
    tag = get_tag(node)
    return tag is not None and tag.kind == "mean"


def _is_product(node: fx.Node) -> bool:
    """Whether the node does the kind of work that hides communication: it is in torch's flop counter."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in flop_registry
