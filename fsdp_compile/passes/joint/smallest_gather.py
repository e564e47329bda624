"""Gather fewer bytes: compute on the shard what follows from a parameter alone, and gather the result if it is smaller.

    before   gather float32  ->  slice w  ->  cast bfloat16  ->  mm           4 bytes an element on the wire
    after    shard  ->  cast bfloat16  ->  gather  ->  slice w  ->  mm        2

    before   gather float32  ->  slice w  ->  amax  ->  w / scale  ->  cast float8  ->  mm
    after    shard  ->  maxima of segments  ->  all-reduce  ->  scales           a few bytes, once for all parameters
             shard / scales  ->  cast float8  ->  gather  ->  slice w  ->  mm      1 byte an element; a scale of each
                                                                                   row, or of each block, likewise

All values stay the same bit for bit (parameter_values.py finds what follows from a parameter alone, exactly). For each
parameter a minimum cut finds the fewest bytes from which the rest of the graph follows. Parameters of one unit with
equal programs are computed on the whole shard at once. The program that makes the unit's gathers smallest runs in the
first gather, which keeps the places of all parameters; segments of parameters with another program travel in a second
gather beside the first.

Local programs read the shard and scales, and run again in backward where the unit is gathered again. No constant
depends on the rank, as Note [Graphs without a rank] demands: operators that need the rank ask for it when they run
(core/ops.py).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import networkx
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.comm.collectives import ALL_GATHER, ALL_REDUCE, WAIT
from fsdp_compile.core.ops import UnshardSpec
from fsdp_compile.passes.graph.nodes import (
    CAST,
    Emit,
    Kind,
    Tag,
    eliminate_dead_code,
    emitter,
    keeps_values,
    set_tag,
    tag_of,
    tagged,
)
from fsdp_compile.passes.joint.parameter_values import MAXIMA, Elements, ParameterValues, Scales, nodes_in
from fsdp_compile.passes.joint.segment_ops import (
    EXPAND_SCALES,
    PACK_SEGMENTS,
    SEGMENT_MAXIMA,
    packed_numel,
    segments_of,
)
from fsdp_compile.passes.pipeline import GraphContext

aten = torch.ops.aten

_MAXIMUM_BYTES = 16  # of one maximum: the value, and whether there is a NaN; an all-reduce moves both twice
_MAXIMUM = Tag("maximum", -1, "parameters", False)
_SENT_AS = {torch.bool: torch.uint8}  # dtypes that Inductor cannot see as bytes on a CPU, and what they are cast to

Items = Sequence[tuple[int, fx.Node]]  # parameters of one unit, by index, and what is gathered of each; equal programs


@dataclass(frozen=True)
class GatheredUnit:
    """A unit that is gathered.

    Attributes:
        spec: its layout and groups.
        shard: the shard that is gathered, or a cast of it.
        starts: the all-gather of each stage.
        roots: parameters as slices of the gathered buffer -> their indices.
        tag: of the last gather.
    """

    spec: UnshardSpec
    shard: fx.Node
    starts: tuple[fx.Node, ...]
    roots: Mapping[fx.Node, int]
    tag: Tag

    @property
    def groups(self) -> list[str]:
        """Names of the groups that the unit is gathered through."""
        return [group.name for group in self.spec.groups]


def smallest_gather(context: GraphContext) -> None:
    """Compute on shards what makes all-gathers smaller, and gather the results."""
    graph = context.graph
    units = _rewritable_units(graph, context.specs)
    values = ParameterValues(graph, [root for unit in units for root in unit.roots])
    if not any(_is_smaller(node, value) for node, value in values.values.items()):
        return
    regions: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, value in values.values.items():
        if isinstance(value, Elements):
            regions[value.root].append(node)
    cuts = {root: _minimum_cut(root, regions[root], values) for unit in units for root in unit.roots}
    choices = [(unit, items) for unit in units if (items := _choose_items(unit, cuts, values))]
    if choices:
        local = {node for unit, _ in choices for root in unit.roots for node in cuts[root].local}
        work = list(local)
        while work:  # what that is computed from, too
            for each in map(values.first, work.pop().all_input_nodes):
                if each not in local:
                    local.add(each)
                    work.append(each)
        edit = _LocalPrograms(graph, values, units)
        first = min(unit.starts[0] for unit, _ in choices)
        edit.reduce_maxima([node for node in values.values if node in local], first)
        for unit, items in choices:
            _UnitPrograms(edit, unit, unit.starts[0]).gather(*items)
        edit.replace_nodes([unit for unit, _ in choices])


def _is_smaller(node: fx.Node, value: Elements | Scales) -> bool:
    """Whether `node` has fewer bytes than the parameter that it is computed from, as maxima have."""
    if isinstance(value, Elements):
        return node.meta["val"].nbytes < value.root.meta["val"].nbytes
    return node.target in MAXIMA


def _rewritable_units(graph: fx.Graph, specs: Mapping[int, UnshardSpec]) -> list[GatheredUnit]:
    """Find the units whose gathered buffer is read only through views of parameters, and sent as it is."""
    units: list[GatheredUnit] = []
    for start in tagged(graph, "gather"):
        (wait,) = start.users  # of the first of two stages the second all-gather reads it
        if all(user.target is aten.slice.Tensor for user in wait.users) and not tag_of(start).wire:
            spec, starts = specs[tag_of(start).unit], (start,)
            if len(spec.groups) > 1:
                starts = (start.args[0].args[0], start)  # type: ignore[union-attr,assignment]  # fx arguments are untyped
            index = {offset: index for index, offset in enumerate(spec.layout.offsets) if spec.layout.numels[index]}
            roots = {user: index[user.args[2]] for user in wait.users}  # type: ignore[index]  # likewise
            shard: fx.Node = starts[0].args[0]  # type: ignore[assignment]  # likewise
            units.append(GatheredUnit(spec, shard, starts, roots, tag_of(start)))
    return units


# --- what to gather ---------------------------------------------------------------------------------------------------


class _Cut(NamedTuple):
    gathered: list[fx.Node]
    local: list[fx.Node]  # all that is computed on the shard for them


def _minimum_cut(root: fx.Node, region: list[fx.Node], values: ParameterValues) -> _Cut:
    """Choose what to gather of one parameter, of the nodes `region`: the fewest bytes; of equal choices the earlier.

    Each node with elements is an edge of the network whose capacity is its bytes. Edges back without a limit close the
    source's side: what is computed on the shard needs only what is there too. A maximum on that side costs its bytes
    in the all-reduce.
    """
    members = set(region)
    scales: dict[fx.Node, None] = {}  # that follow from `region`, in an order that is the same everywhere
    work = list(region)
    while work:
        found = [user for user in values.users(work.pop(0)) if isinstance(values.of(user), Scales)]
        work += [user for user in found if user not in scales]
        scales.update(dict.fromkeys(found))

    def entry(node: fx.Node) -> Any:
        return (node, "in") if node in members else node if node in scales else "sink"

    network = networkx.DiGraph()
    network.add_edge("source", (root, "in"))
    for order, node in enumerate(region):
        network.add_edge((node, "in"), (node, "out"), capacity=node.meta["val"].nbytes * len(values.values) + order)
    for node in scales:
        maxima = node.meta["val"].numel() * (node.target in MAXIMA)
        network.add_edge(node, "sink", capacity=_MAXIMUM_BYTES * maxima * len(values.values))
    for node in (*region, *scales):
        for user in map(entry, values.users(node)):
            if node in members:
                network.add_edge((node, "out"), user)
            if user != "sink":
                network.add_edge(user, entry(node))
    if "sink" not in network:
        return _Cut([], [])
    _, (near, _) = networkx.minimum_cut(network, "source", "sink")
    local = [node for node in region if (node, "in") in near]
    return _Cut([node for node in local if (node, "out") not in near], [*local, *(n for n in scales if n in near)])


def _choose_items(unit: GatheredUnit, cuts: Mapping[fx.Node, _Cut], values: ParameterValues) -> list[Items]:
    """Choose the items of a unit's first gather, then those that travel as segments; empty: gather the parameters."""
    classes: dict[tuple[str, torch.dtype], list[tuple[int, fx.Node]]] = defaultdict(list)
    for root, param in unit.roots.items():
        for node in cuts[root].gathered:
            classes[values.elements(node).program, node.meta["val"].dtype].append((param, node))
    if not classes:
        return []

    def total(main: tuple[str, torch.dtype]) -> int:
        rest = [(dtype, items) for (program, dtype), items in classes.items() if (program, dtype) != main]
        sizes = [packed_numel(unit.spec.layout, tuple(p for p, _ in items)) * dtype.itemsize for dtype, items in rest]
        return unit.spec.layout.numel * main[1].itemsize + unit.spec.layout.world_size * sum(sizes)

    main = min(classes, key=total)
    if total(main) >= unit.spec.layout.numel * unit.shard.meta["val"].element_size():
        return []
    return [classes[main], *(items for key, items in classes.items() if key != main)]


# --- the edit ---------------------------------------------------------------------------------------------------------


class _LocalPrograms:
    """Puts local programs into the graph: on shards, with one all-reduce of maxima, before smaller gathers.

        scales      segment_maxima of each shard  ->  cat  ->  all-reduce(max)  ->  what follows from them
        each unit   expand_scales, the program on the whole shard, gather, slices of the gathered buffer
                    pack_segments of parameters with another program, gather, segments joined to parameters

    Attributes:
        new: the replacement of each node that is gathered, and of each scale.
    """

    def __init__(self, graph: fx.Graph, values: ParameterValues, units: Sequence[GatheredUnit]) -> None:
        self.graph, self.values = graph, values
        self.unit_of = {root: unit for unit in units for root in unit.roots}
        self.new: dict[fx.Node, fx.Node] = {}

    def reduce_maxima(self, local: list[fx.Node], first: fx.Node) -> None:
        """Compute scales before all gathers, level by level, with one all-reduce of maxima per process group."""
        scales = {node: value for node in local if isinstance(value := self.values.of(node), Scales)}
        for level in sorted({value.level for value in scales.values()}):
            of_level = [node for node, value in scales.items() if value.level == level]
            by_groups: dict[tuple[str, ...], list[fx.Node]] = defaultdict(list)
            for node in of_level:
                if node.target in MAXIMA:
                    by_groups[tuple(self._unit_of_maximum(node).groups)].append(node)
            for groups, nodes in by_groups.items():
                self._all_reduce(nodes, groups, first)
            for node in of_level:
                if node not in self.new:
                    with self.graph.inserting_before(first):
                        self.new[node] = self.graph.node_copy(node, lambda each: self.new[self.values.first(each)])
                    self.new[node].meta.pop("ac_graph_id", None)
                    self.new[node].meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                    set_tag(self.new[node], _MAXIMUM)

    def _unit_of_maximum(self, node: fx.Node) -> GatheredUnit:
        return self.unit_of[self.values.elements(node.args[0]).root]

    def _all_reduce(self, maxima: list[fx.Node], groups: tuple[str, ...], first: fx.Node) -> None:
        """All-reduce maxima through each of the groups: values, and which of them are NaN."""
        alike: dict[Any, list[fx.Node]] = defaultdict(list)  # maxima of one computation on one shard
        for node in maxima:
            program = self.values.elements(node.args[0]).program
            alike[self._unit_of_maximum(node).tag.unit, program, MAXIMA[node.target]].append(node)  # type: ignore[index]  # one of them
        shares = []
        for (_, _, smallest), nodes in alike.items():
            unit = self._unit_of_maximum(nodes[0])
            if first < unit.shard:  # a cast of an input
                first.prepend(unit.shard)
            programs = _UnitPrograms(self, unit, first)
            params = [unit.roots[self.values.elements(node.args[0]).root] for node in nodes]
            sources = [self.values.first(node.args[0]) for node in nodes]  # type: ignore[arg-type]  # fx arguments are untyped
            local = programs.evaluate(list(zip(params, sources, strict=True)))
            counts = [node.meta["val"].numel() for node in nodes]
            arguments = (local, unit.spec.layout.text, unit.groups, params, counts, smallest)
            shares.append(programs.emit("local", SEGMENT_MAXIMA, *arguments))
        emit = emitter(self.graph, first, _MAXIMUM, first)
        reduced = shares[0] if len(shares) == 1 else emit("maximum", aten.cat.default, shares, 1)
        for group in groups:
            reduced = emit("maximum", WAIT, emit("maximum", ALL_REDUCE, reduced, "max", group))
        is_nan = emit("maximum", aten.gt.Scalar, emit("maximum", aten.select.int, reduced, 0, 1), 0)
        like = reduced.meta["val"]
        nan = emit("maximum", aten.full.default, [], float("nan"), dtype=like.dtype, device=like.device)
        values = emit("maximum", aten.where.self, is_nan, nan, emit("maximum", aten.select.int, reduced, 0, 0))
        values.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # backward takes these: it reduces no maxima again
        begin = 0
        for (_, _, smallest), nodes in alike.items():
            for node in nodes:
                value = node.meta["val"]
                run = emit("maximum", aten.slice.Tensor, values, 0, begin, begin + value.numel())
                new = _give_shape(run, value.shape, value.stride(), "maximum", emit)
                new = emit("maximum", aten.neg.default, new) if smallest else new
                self.new[node] = new if value.dtype == torch.float32 else emit("maximum", CAST, new, value.dtype)
                begin += value.numel()

    def replace_nodes(self, units: Sequence[GatheredUnit]) -> None:
        """Replace the nodes by their new ones, and erase the old programs and the gathers of `units`."""
        output = self.graph.output_node()
        for node, new in self.new.items():
            for other in (node, *self.values.alike(node)):
                if output in other.users:  # a copy: others read the gathered buffer, and callers write in place
                    emit = emitter(self.graph, output, units[0].tag, new)
                    output.replace_input_with(other, emit("view", aten.clone.default, new))
                other.replace_all_uses_with(new)
        eliminate_dead_code(self.graph)


def _give_shape(run: fx.Node, size: Sequence[int], stride: Sequence[int], kind: Kind, emit: Emit) -> fx.Node:
    """Give a 1-D tensor that shape and those strides, a permutation of a contiguous shape."""
    order = sorted(range(len(size)), key=lambda dim: -stride[dim])
    shaped = emit(kind, aten.view.default, run, [size[dim] for dim in order])
    back = [order.index(dim) for dim in range(len(size))]
    return shaped if back == sorted(back) else emit(kind, aten.permute.default, shaped, back)


class _UnitPrograms:
    """Emits the programs and gathers of one unit in front of its old gather."""

    def __init__(self, edit: _LocalPrograms, unit: GatheredUnit, before: fx.Node) -> None:
        self.edit, self.values, self.unit = edit, edit.values, unit
        self.emit = emitter(edit.graph, before, unit.tag, unit.starts[0])
        self._evaluated: dict[tuple[tuple[int, fx.Node], ...], fx.Node] = {}

    def gather(self, main: Items, *rest: Items) -> None:
        """Gather the chosen items, and take the new nodes from the result."""
        layout, emit = self.unit.spec.layout, self.emit
        # Send everything as the narrowest dtype, or as bytes, which every backend knows.
        wire = min((items[0][1].meta["val"].dtype for items in (main, *rest)), key=lambda dtype: dtype.itemsize)
        wire = torch.uint8 if wire.itemsize == 1 else wire
        groups, taken = self.unit.groups, []
        for items in rest:
            params = [param for param, _ in items]
            taken.append(emit("local", PACK_SEGMENTS, self._sendable_values(items), layout.text, groups, params, wire))
        in_place = self._sendable_values(main)
        dtype = in_place.meta["val"].dtype
        sent = [in_place if dtype == wire else emit("local", aten.view.dtype, in_place, wire)]
        if taken:
            sent.insert(0, taken[0] if len(taken) == 1 else emit("local", aten.cat.default, taken))
        row = sent[0].meta["val"].numel()
        retained = emitter(self.edit.graph, self.unit.starts[0], replace(self.unit.tag, reshard=False))
        for group in self.unit.spec.groups:  # results of an earlier stage are retained
            emit_stage = emit if group is self.unit.spec.groups[-1] else retained
            started = [emit_stage("gather", ALL_GATHER, each, group.size, group.name) for each in sent]
            sent = [emit_stage("wait", WAIT, each) for each in started]
        *rows, full = sent
        full = full if dtype == wire else emit("view", aten.view.dtype, full, dtype)
        for param, node in main:
            begin = layout.offsets[param]
            run = emit("view", aten.slice.Tensor, full, 0, begin, begin + layout.numels[param])
            self.edit.new[node] = self._shaped_as(node, run)
        begin = 0  # of the items in a rank's row, in elements on the wire
        for items, segment in zip(rest, taken, strict=True):
            self._join_parameters(items, rows[0], row, begin)
            begin += segment.meta["val"].numel()

    def evaluate(self, items: Items) -> fx.Node:
        """Evaluate the common program of `items` on the whole shard, 1-D."""
        key = tuple((param, self._source_of(node)) for param, node in items)
        if key not in self._evaluated:
            self._evaluated[key] = self._evaluate(key)
        return self._evaluated[key]

    def _source_of(self, node: fx.Node) -> fx.Node:
        """Strip views and copies: order does not matter on the shard."""
        node = self.values.first(node)
        while isinstance(self.values.of(node), Elements) and (keeps_values(node) or node.target is aten.clone.default):
            if node in self.unit.roots:
                break
            node = self.values.first(node.args[0])  # type: ignore[arg-type]  # fx arguments are untyped
        return node

    def _evaluate(self, items: Items) -> fx.Node:
        leader = items[0][1]
        if isinstance(self.values.of(leader), Scales):
            return self._spread({param: self.values.first(node) for param, node in items})
        if leader in self.unit.roots:
            return self.unit.shard
        columns = zip(*(nodes_in((node.args, node.kwargs)) for _, node in items), strict=True)  # argument by argument
        params = [param for param, _ in items]
        arguments = iter([self.evaluate(list(zip(params, column, strict=True))) for column in columns])
        args, kwargs = fx.map_arg((leader.args, dict(leader.kwargs)), lambda _: next(arguments))
        return self.emit("local", leader.target, *args, **kwargs)

    def _spread(self, scales: Mapping[int, fx.Node]) -> fx.Node:
        """Expand scales to one value for each element of the shard."""
        flat = []
        for _, node in sorted(scales.items()):
            new, stride = self.edit.new[node], self.values.of(node).stride  # type: ignore[union-attr]  # these are scales
            order = sorted(range(len(stride)), key=lambda dim: (-stride[dim], dim))
            if order != sorted(order):
                new = self.emit("local", aten.permute.default, new, order)
            flat.append(self.emit("local", aten.reshape.default, new, [-1]))
        params = range(len(self.unit.spec.layout.shapes))
        counts = [scales[param].meta["val"].numel() if param in scales else 0 for param in params]
        values = self.emit("local", aten.cat.default, flat)
        return self.emit("local", EXPAND_SCALES, values, self.unit.spec.layout.text, self.unit.groups, counts)

    def _join_parameters(self, items: Items, full: fx.Node, row: int, begin: int) -> None:
        """Join parameters from their segments in the ranks' rows of `full`; `row` and `begin` count its elements."""
        wire = full.meta["val"].dtype
        params, dtype = tuple(param for param, _ in items), items[0][1].meta["val"].dtype
        wide = dtype.itemsize // wire.itemsize
        by_rank = [segments_of(self.unit.spec.layout, params, rank) for rank in range(self.unit.spec.layout.world_size)]
        for position, (_, node) in enumerate(items):
            shares = []
            for rank, segments in enumerate(by_rank):
                segment = segments[position]
                if segment is not None:
                    at = rank * row + begin + segment.in_packed * wide
                    shares.append(self.emit("view", aten.slice.Tensor, full, 0, at, at + segment.numel * wide))
            run = shares[0] if len(shares) == 1 else self.emit("view", aten.cat.default, shares)
            if wire not in (dtype, _SENT_AS.get(dtype)):
                run = self.emit("view", aten.view.dtype, run, dtype)
            self.edit.new[node] = self._shaped_as(node, run)

    def _sendable_values(self, items: Items) -> fx.Node:
        """Evaluate `items` in a dtype that can be sent."""
        local = self.evaluate(items)
        sent_as = _SENT_AS.get(local.meta["val"].dtype)
        return local if sent_as is None else self.emit("local", CAST, local, sent_as)

    def _shaped_as(self, node: fx.Node, run: fx.Node) -> fx.Node:
        """Give the 1-D elements of a parameter the shape, strides and dtype of `node`."""
        value, dtype = self.values.elements(node), node.meta["val"].dtype
        shaped = _give_shape(run, value.size, value.stride, "view", self.emit)
        return self.emit("view", CAST, shaped, dtype) if dtype in _SENT_AS else shaped
