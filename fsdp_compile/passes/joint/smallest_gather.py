"""Gather the smallest thing: what is computed from a parameter alone is computed on the shard, if that is smaller.

    before   gather float32  ->  slice w  ->  cast bfloat16  ->  mm           4 bytes an element on the wire
    after    shard  ->  cast bfloat16  ->  gather  ->  slice w  ->  mm        2

    before   gather float32  ->  slice w  ->  amax  ->  w / scale  ->  cast float8  ->  mm
    after    shard  ->  maxima of segments  ->  all-reduce  ->  scales           a few bytes, once for all parameters
             shard / scales  ->  cast float8  ->  gather  ->  slice w  ->  mm      1 byte an element; a scale of each
                                                                                   row, or of each block, likewise

All values stay the same bit for bit (parameter_values.py says what follows from a parameter alone, and exactly so). For
each parameter a minimum cut finds what to gather: the fewest bytes from which the rest of the graph follows. Parameters
of one unit with equal programs are computed on the whole shard at once. The program that makes the unit's gathers
smallest is that of the first gather, which keeps the places of all parameters; where others need another program or
none, their segments travel in a second gather beside the first.

Local programs read the shard and scalars. They come again in backward, where the unit is gathered again.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import networkx
import torch
from torch import fx

from fsdp_compile.comm.collectives import ALL_GATHER
from fsdp_compile.core.ops import UnshardSpec
from fsdp_compile.core.shard_ops import most_taken
from fsdp_compile.passes.graph.nodes import tag_of, tagged
from fsdp_compile.passes.joint.local_programs import GatherChoice, GatheredUnit, LocalPrograms, are_owned
from fsdp_compile.passes.joint.parameter_values import (
    MAXIMA,
    UNCHANGED,
    Elements,
    ParameterValues,
    Scalar,
    Vector,
    numel_of,
)
from fsdp_compile.passes.pipeline import GraphContext

aten = torch.ops.aten

_MAXIMUM_BYTES = 16  # of one maximum: the value, and whether there is a NaN; an all-reduce moves both twice
_OWNED_BYTES = 4  # of the maximum of a block that no two ranks share: it is gathered


@dataclass(frozen=True)
class _Cut:
    """What is gathered of one parameter, and what is computed on the shard: that and what it is computed from."""

    gathered: tuple[fx.Node, ...]
    local: frozenset[fx.Node]


def smallest_gather(context: GraphContext) -> None:
    """Compute on the shards what makes gathers smaller, and gather that."""
    graph = context.graph
    units = _units(graph, context.specs)
    values = ParameterValues(graph, [root for unit in units for root in unit.roots])
    cuts = {root: _minimum_cut(unit, root, values) for unit in units for root in unit.roots}
    choices = [(unit, choice) for unit in units if (choice := _choose(unit, cuts, values)) is not None]
    if choices:
        LocalPrograms(graph, values, units, choices).run(_with_inputs(cuts, choices, values))


def _units(graph: fx.Graph, specs: Mapping[int, UnshardSpec]) -> list[GatheredUnit]:
    """The units whose gathered buffer is read as parameters alone."""
    units: list[GatheredUnit] = []
    for start in tagged(graph, "gather"):
        (wait,) = start.users
        if any(user.target is ALL_GATHER for user in wait.users):
            continue  # the first of two stages
        if all(user.target is aten.slice.Tensor for user in wait.users):
            spec, starts = specs[tag_of(start).unit], (start,)
            if len(spec.groups) > 1:
                starts = (start.args[0].args[0], start)  # type: ignore[union-attr,assignment]  # fx arguments are untyped
            index = {offset: index for index, offset in enumerate(spec.layout.offsets) if spec.layout.numels[index]}
            roots = {user: index[user.args[2]] for user in wait.users}  # type: ignore[index]  # likewise
            shard: fx.Node = starts[0].args[0]  # type: ignore[assignment]  # likewise
            units.append(GatheredUnit(spec, shard, starts, roots, tag_of(start)))
    return units


# --- what to gather ---------------------------------------------------------------------------------------------------


def _minimum_cut(unit: GatheredUnit, root: fx.Node, values: ParameterValues) -> _Cut:
    """What of one parameter of the unit to gather: the fewest bytes, and of equal ones what is computed first.

    In the network a node with elements is an edge whose capacity are its bytes. What is computed on the shard is
    computed from nothing but that: edges back, without a limit, keep the source's side closed. A maximum on that side
    costs its bytes in the all-reduce, or in the all-gather.
    """
    region = {
        node: value for node, value in values.values.items() if isinstance(value, Elements) and value.root is root
    }
    scalars = _scalars_behind(region, values)
    network = networkx.DiGraph()
    network.add_edge("source", (root, "in"))
    for order, (node, value) in enumerate(region.items()):
        size = numel_of(value) * node.meta["val"].element_size()
        network.add_edge((node, "in"), (node, "out"), capacity=size * len(values.values) + order)
        for user in values.users(node):
            if user in region:
                network.add_edge((node, "out"), (user, "in"))
                network.add_edge((user, "in"), (node, "in"))
            elif user in scalars:
                network.add_edge((node, "out"), user)
                network.add_edge(user, (node, "in"))
            else:
                network.add_edge((node, "out"), "sink")
    for node in scalars:
        maxima = node.meta["val"].numel() * (node.target in MAXIMA)
        of_blocks = values.of(node)
        is_owned = isinstance(of_blocks, Vector) and are_owned(unit, unit.roots[root], of_blocks)
        size = (_OWNED_BYTES if is_owned else _MAXIMUM_BYTES) * maxima
        network.add_edge(node, "sink", capacity=size * len(values.values))
        for user in values.users(node):
            if user in region:
                network.add_edge((user, "in"), node)
            elif user in scalars:
                network.add_edge(user, node)
    if "sink" not in network:
        return _Cut((), frozenset())
    _, (near, _) = networkx.minimum_cut(network, "source", "sink")
    gathered = tuple(node for node in region if (node, "in") in near and (node, "out") not in near)
    local = frozenset({node for node in region if (node, "in") in near} | {node for node in scalars if node in near})
    return _Cut(gathered, local)


def _scalars_behind(region: Iterable[fx.Node], values: ParameterValues) -> dict[fx.Node, None]:
    """The scalars and vectors that follow from the nodes of `region`, in an order that is the same everywhere."""
    scalars: dict[fx.Node, None] = {}
    work = list(region)
    while work:
        for user in values.users(work.pop(0)):
            if isinstance(values.of(user), Scalar | Vector) and user not in scalars:
                scalars[user] = None
                work.append(user)
    return scalars


def _choose(unit: GatheredUnit, cuts: Mapping[fx.Node, _Cut], values: ParameterValues) -> GatherChoice | None:
    """What is gathered of a unit; None: the parameters, as before."""
    classes: dict[tuple[str, torch.dtype], list[tuple[int, fx.Node]]] = defaultdict(list)
    for root, param in unit.roots.items():
        for node in cuts[root].gathered:
            classes[_elements(node, values).program, node.meta["val"].dtype].append((param, node))
    if all(program == UNCHANGED for program, _ in classes):
        return None

    def in_place(key: tuple[str, torch.dtype]) -> int:
        return unit.layout.numel * key[1].itemsize

    def as_segments(key: tuple[str, torch.dtype]) -> int:
        params = tuple(param for param, _ in classes[key])
        return unit.layout.world_size * most_taken(unit.layout, params) * key[1].itemsize

    def total(main: tuple[str, torch.dtype]) -> int:
        return in_place(main) + sum(as_segments(other) for other in classes if other != main)

    main = min(classes, key=total)
    before = unit.layout.numel * unit.shard.meta["val"].element_size()
    if total(main) >= before:
        return None
    return GatherChoice(classes[main], tuple(items for key, items in classes.items() if key != main))


def _elements(node: fx.Node, values: ParameterValues) -> Elements:
    value = values.of(node)
    assert isinstance(value, Elements)
    return value


def _with_inputs(
    cuts: Mapping[fx.Node, _Cut], choices: Iterable[tuple[GatheredUnit, GatherChoice]], values: ParameterValues
) -> set[fx.Node]:
    """All that is computed on shards: what the chosen cuts have there, and what that is computed from."""
    local = {node for unit, _ in choices for root in unit.roots for node in cuts[root].local}
    work = list(local)
    while work:
        for each in map(values.first, work.pop().all_input_nodes):
            if values.of(each) is not None and each not in local:
                local.add(each)
                work.append(each)
    return local
