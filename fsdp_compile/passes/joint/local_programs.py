"""How local programs come into the graph: on shards, with one all-reduce of maxima, before smaller gathers.

smallest_gather.py decides what is gathered (`GatherChoice`); here the graph is edited:

    scalars     segment_maxima of each shard  ->  cat  ->  all-reduce(max)  ->  what follows from them; vectors alike
    blocks      that no two ranks share: maxima of each shard  ->  all-gather  ->  likewise, a quarter of the bytes
    each unit   spread of its scalars, the program on the whole shard, gather, slices of what was gathered
                take of the segments that need another program, gather, segments joined to parameters

No constant depends on the rank, as Note [Graphs without a rank] demands: operators that need the rank ask for it when
they run (core/shard_ops.py).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.comm.collectives import ALL_GATHER, ALL_REDUCE, WAIT
from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.core.ops import UnshardSpec
from fsdp_compile.core.shard_ops import SEGMENT_MAXIMA, SPREAD, TAKE, segments_of
from fsdp_compile.passes.graph.nodes import CAST, Emit, Kind, Tag, emitter, get_tag, is_view, set_tag
from fsdp_compile.passes.joint.parameter_values import (
    MAXIMA,
    Elements,
    ParameterValues,
    Scalar,
    Vector,
    nodes_in,
    numel_of,
)

aten = torch.ops.aten

_MAXIMUM = Tag("maximum", -1, "parameters", False)
_SENT_AS = {torch.bool: torch.uint8}  # dtypes that Inductor cannot see as bytes on a CPU, and what they are cast to


@dataclass(frozen=True)
class GatheredUnit:
    """A unit that is gathered.

    Attributes:
        spec: its layout and groups.
        shard: what is gathered: the shard, or a cast of it.
        starts: the all-gather of each stage.
        roots: by the slice of the gathered buffer that is a parameter, the parameter's index.
        tag: that of the last gather.
    """

    spec: UnshardSpec
    shard: fx.Node
    starts: tuple[fx.Node, ...]
    roots: Mapping[fx.Node, int]
    tag: Tag

    @property
    def groups(self) -> list[str]:
        """The names of the groups that it is gathered through."""
        return [group.name for group in self.spec.groups]

    @property
    def layout(self) -> FlatParamLayout:
        """Where parameters lie."""
        return self.spec.layout


Items = Sequence[tuple[int, fx.Node]]  # parameters of one unit, by index, and what is gathered of each; equal programs


@dataclass(frozen=True)
class GatherChoice:
    """What is gathered of a unit: `main` in the places of the parameters, each of `rest` as segments, end to end."""

    main: Items
    rest: tuple[Items, ...]


def are_owned(unit: GatheredUnit, param: int, vector: Vector) -> bool:
    """Whether each block of the parameter lies in one rank's shard, where the shard divides into such blocks.

    Formats with a scale for each block have 16, 32, 64 or 128 elements in one, and `lay_out` sees to it that shards of
    all but small units end between them.
    """
    return unit.layout.offsets[param] % vector.block == 0 and unit.layout.shard_numel % vector.block == 0


class LocalPrograms:
    """One graph, being edited.

    Attributes:
        new: what takes the place of a node that is gathered, and of a scalar that is computed from shards.
    """

    def __init__(
        self,
        graph: fx.Graph,
        values: ParameterValues,
        units: Sequence[GatheredUnit],
        choices: Sequence[tuple[GatheredUnit, GatherChoice]],
    ) -> None:
        self.graph, self.values, self.choices = graph, values, choices
        self.unit_of = {root: unit for unit in units for root in unit.roots}
        self.new: dict[fx.Node, fx.Node] = {}

    def run(self, local: set[fx.Node]) -> None:
        """Edit the graph. `local` are the nodes that are computed on shards."""
        first = min(unit.starts[0] for unit, _ in self.choices)
        self._reduce_scalars([node for node in self.values.values if node in local], first)
        for unit, choice in self.choices:
            _UnitPrograms(self, unit, unit.starts[0]).gather(choice)
        self._replace()

    def _reduce_scalars(self, local: list[fx.Node], first: fx.Node) -> None:
        """Compute scalars and vectors before all gathers, level by level: one all-reduce for each group of ranks.

        Maxima of blocks that no two ranks share are gathered instead.
        """
        scalars = {node: value for node in local if isinstance(value := self.values.of(node), Scalar | Vector)}
        for level in range(1 + max((value.level for value in scalars.values()), default=0)):
            maxima = [node for node, value in scalars.items() if node.target in MAXIMA and value.level == level]
            by_groups: dict[tuple[str, ...], list[fx.Node]] = defaultdict(list)
            for node in maxima:
                by_groups[tuple(self._unit_of_maximum(node).groups)].append(node)
            for groups, nodes in by_groups.items():
                owned = self._owned(nodes)
                gathered = set(chain.from_iterable(owned.values()))
                shared = [node for node in nodes if node not in gathered]
                if owned:
                    self._all_gather(owned, first)
                if shared:
                    self._all_reduce(shared, groups, first)
            for node, value in scalars.items():
                if value.level == level and node not in self.new:
                    with self.graph.inserting_before(first):
                        self.new[node] = self.graph.node_copy(node, lambda each: self.new[self.values.first(each)])
                    self.new[node].meta.pop("ac_graph_id", None)
                    self.new[node].meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                    set_tag(self.new[node], _MAXIMUM)

    def _unit_of_maximum(self, node: fx.Node) -> GatheredUnit:
        return self.unit_of[_elements(node.args[0], self.values).root]

    def _owned(self, maxima: list[fx.Node]) -> dict[tuple[Any, ...], list[fx.Node]]:
        """Those of `maxima` that are gathered, by computation, shard and block: no two ranks share one of the blocks.

        The gather has all blocks of a shard, so it pays where a fourth of the unit is asked for.
        """
        alike: dict[tuple[Any, ...], list[fx.Node]] = defaultdict(list)
        for node in maxima:
            value, unit = self.values.of(node), self._unit_of_maximum(node)
            if isinstance(value, Vector) and are_owned(unit, unit.roots[value.root], value):
                program = _elements(node.args[0], self.values).program
                alike[unit.tag.unit, program, value.block, MAXIMA[node.target]].append(node)  # type: ignore[index]  # one of them
        return {key: nodes for key, nodes in alike.items() if self._is_most(nodes)}

    def _is_most(self, maxima: list[fx.Node]) -> bool:
        unit = self._unit_of_maximum(maxima[0])
        params = {unit.roots[_elements(node.args[0], self.values).root] for node in maxima}
        return 4 * sum(unit.layout.numels[param] for param in params) >= unit.layout.numel

    def _on_shard(self, maxima: list[fx.Node], first: fx.Node) -> tuple["_UnitPrograms", list[int], fx.Node]:
        """Of maxima of one computation on one shard: the unit's programs, the parameters, and what is computed."""
        unit = self._unit_of_maximum(maxima[0])
        _move_before(first, unit.shard)
        programs = _UnitPrograms(self, unit, first)
        params = [unit.roots[_elements(node.args[0], self.values).root] for node in maxima]
        sources = [self.values.first(node.args[0]) for node in maxima]  # type: ignore[arg-type]  # fx arguments are untyped
        return programs, params, programs.evaluate(list(zip(params, sources, strict=True)))

    def _all_gather(self, alike: Mapping[tuple[Any, ...], list[fx.Node]], first: fx.Node) -> None:
        """One all-gather of the maxima of all blocks of the shards that have one of the maxima in `alike`."""
        shares = []
        for (_, _, block, smallest), nodes in alike.items():
            programs, _, local = self._on_shard(nodes, first)
            blocks = programs.emit("local", aten.view.default, local, [-1, block])
            share = programs.emit("local", aten.amin.default if smallest else aten.amax.default, blocks, [1])
            is_wide = share.meta["val"].dtype == torch.float32
            shares.append(share if is_wide else programs.emit("local", CAST, share, torch.float32))
        emit = emitter(self.graph, first, _MAXIMUM, first)
        row = shares[0] if len(shares) == 1 else emit("maximum", aten.cat.default, shares)
        full = row
        for group in programs.unit.spec.groups:
            full = emit("maximum", WAIT, emit("maximum", ALL_GATHER, full, group.size, group.name))
        full.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # as those that are reduced
        rows = emit("maximum", aten.view.default, full, [-1, row.meta["val"].numel()])
        begin = 0
        for ((_, _, block, _), nodes), share in zip(alike.items(), shares, strict=True):
            end = begin + share.meta["val"].numel()
            values = emit(
                "maximum", aten.reshape.default, emit("maximum", aten.slice.Tensor, rows, 1, begin, end), [-1]
            )
            begin = end
            for node in nodes:
                unit, root = self._unit_of_maximum(node), _elements(node.args[0], self.values).root
                value = self._taken_of(values, unit.layout.offsets[unit.roots[root]] // block, node, emit)
                dtype = node.meta["val"].dtype
                self.new[node] = value if dtype == torch.float32 else emit("maximum", CAST, value, dtype)

    def _all_reduce(self, maxima: list[fx.Node], groups: tuple[str, ...], first: fx.Node) -> None:
        """One all-reduce of maxima, through each of the groups: the values, and which of them are NaN."""
        alike: dict[Any, list[fx.Node]] = defaultdict(list)  # maxima of one computation on one shard
        for node in maxima:
            source = _elements(node.args[0], self.values)
            alike[self._unit_of_maximum(node).tag.unit, source.program, MAXIMA[node.target]].append(node)  # type: ignore[index]  # one of them
        shares, order = [], []
        for (_, _, smallest), nodes in alike.items():
            programs, params, local = self._on_shard(nodes, first)
            unit = programs.unit
            counts = [node.meta["val"].numel() for node in nodes]
            shares.append(
                programs.emit("local", SEGMENT_MAXIMA, local, unit.layout.text, unit.groups, params, counts, smallest)
            )
            order += [(node, smallest) for node in nodes]
        emit = emitter(self.graph, first, _MAXIMUM, first)
        reduced = shares[0] if len(shares) == 1 else emit("maximum", aten.cat.default, shares, 1)
        for group in groups:
            reduced = emit("maximum", WAIT, emit("maximum", ALL_REDUCE, reduced, "max", group))
        is_nan = emit("maximum", aten.gt.Scalar, emit("maximum", aten.select.int, reduced, 0, 1), 0)
        nan = emit(
            "maximum", aten.full.default, [], float("nan"), dtype=torch.float32, device=reduced.meta["val"].device
        )
        values = emit("maximum", aten.where.self, is_nan, nan, emit("maximum", aten.select.int, reduced, 0, 0))
        values.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # backward takes these: it reduces no maxima again
        begin = 0
        for node, smallest in order:
            value = self._taken_of(values, begin, node, emit)
            value = emit("maximum", aten.neg.default, value) if smallest else value
            dtype = node.meta["val"].dtype
            self.new[node] = value if dtype == torch.float32 else emit("maximum", CAST, value, dtype)
            begin += node.meta["val"].numel()

    def _taken_of(self, values: fx.Node, begin: int, node: fx.Node, emit: Emit) -> fx.Node:
        """The scalar or vector for `node`, which begins there in `values`, in its shape."""
        known = self.values.of(node)
        if isinstance(known, Vector):
            run = emit("maximum", aten.slice.Tensor, values, 0, begin, begin + numel_of(known))
            return _shaped(run, known.size, known.stride, "maximum", emit)
        scalar, shape = emit("maximum", aten.select.int, values, 0, begin), list(node.meta["val"].shape)
        return emit("maximum", aten.view.default, scalar, shape) if shape else scalar

    def _replace(self) -> None:
        """Let all that read the nodes with a new one read that, and erase what nothing reads any more."""
        made = set(self.new.values())
        for node, new in self.new.items():
            for other in (node, *self.values.alike(node)):
                self._copy_outputs(other, new)
                other.replace_all_uses_with(new, delete_user_cb=lambda user: user not in made)
        for node in reversed(list(self.graph.nodes)):
            is_ours = node.op == "call_function" and (self.values.of(node) is not None or _is_local(node))
            if is_ours and not node.users:
                self.graph.erase_node(node)
        for unit, _ in self.choices:
            for start in reversed(unit.starts):
                (wait,) = start.users
                self.graph.erase_node(wait)
                self.graph.erase_node(start)
            if unit.shard.op != "placeholder" and not unit.shard.users:
                self.graph.erase_node(unit.shard)

    def _copy_outputs(self, node: fx.Node, new: fx.Node) -> None:
        """Return a copy where the graph returns `node`: others read the gathered buffer, and callers write in place."""
        output = self.graph.output_node()
        if output in node.users:
            emit = emitter(self.graph, output, replace(self.choices[0][0].tag, reshard=False), new)
            output.replace_input_with(node, emit("view", aten.clone.default, new))


def _elements(node: Any, values: ParameterValues) -> Elements:
    value = values.of(node)
    assert isinstance(value, Elements)
    return value


def _shaped(run: fx.Node, size: Sequence[int], stride: Sequence[int], kind: Kind, emit: Emit) -> fx.Node:
    """A 1-D tensor in that shape, with those strides: a permutation of a contiguous shape."""
    dims = range(len(size))
    order = sorted(dims, key=lambda dim: (-stride[dim], size[dim] == 1, dim))
    shaped = emit(kind, aten.view.default, run, [size[dim] for dim in order])
    if order != list(dims):
        shaped = emit(kind, aten.permute.default, shaped, [order.index(dim) for dim in dims])
    return shaped


def _move_before(first: fx.Node, node: fx.Node) -> None:
    """Move `node`, and what it is computed from, before `first` where that stands earlier."""
    if node.op != "placeholder" and first < node:
        for each in node.all_input_nodes:
            _move_before(first, each)
        first.prepend(node)


def _is_local(node: fx.Node) -> bool:
    tag = get_tag(node)
    return tag is not None and tag.kind in ("local", "maximum") and node.target not in (ALL_REDUCE, WAIT)


class _UnitPrograms:
    """The programs and gathers of one unit, which stand before its old gather."""

    def __init__(self, edit: LocalPrograms, unit: GatheredUnit, before: fx.Node) -> None:
        self.edit, self.unit = edit, unit
        self.emit = emitter(edit.graph, before, unit.tag, unit.starts[0])
        self._evaluated: dict[tuple[tuple[int, fx.Node], ...], fx.Node] = {}

    def gather(self, choice: GatherChoice) -> None:
        """Gather what is chosen, and take the nodes' new ones from that."""
        layout = self.unit.layout
        wire = _wire_dtype([items[0][1].meta["val"].dtype for items in (choice.main, *choice.rest)])
        taken = [
            self.emit("local", TAKE, self._sendable(items), layout.text, self.unit.groups, [p for p, _ in items], wire)
            for items in choice.rest
        ]
        main = self._sendable(choice.main)
        dtype = main.meta["val"].dtype
        sent = [main if dtype == wire else self.emit("local", aten.view.dtype, main, wire)]
        if taken:
            sent.insert(0, taken[0] if len(taken) == 1 else self.emit("local", aten.cat.default, taken))
        *rest, full = self._through_groups(sent)
        full = full if dtype == wire else self.emit("view", aten.view.dtype, full, dtype)
        for param, node in choice.main:
            begin = layout.offsets[param]
            run = self.emit("view", aten.slice.Tensor, full, 0, begin, begin + layout.numels[param])
            self.edit.new[node] = self._as(node, run)
        begin = 0  # of the items in a rank's row, in elements on the wire
        for items, segment in zip(choice.rest, taken, strict=True):
            self._join(items, rest[0], sent[0].meta["val"].numel(), begin)
            begin += segment.meta["val"].numel()

    def evaluate(self, items: Items) -> fx.Node:
        """What the nodes of `items` compute, all by one program, on the whole shard: 1-D."""
        key = tuple((param, self._computed(node)) for param, node in items)
        if key not in self._evaluated:
            self._evaluated[key] = self._evaluate(key)
        return self._evaluated[key]

    def _computed(self, node: fx.Node) -> fx.Node:
        """The node beneath views and copies: order does not matter on the shard."""
        node = self.edit.values.first(node)
        while isinstance(self.edit.values.of(node), Elements) and (is_view(node) or node.target is aten.clone.default):
            if node in self.unit.roots:
                break
            node = self.edit.values.first(node.args[0])  # type: ignore[arg-type]  # fx arguments are untyped
        return node

    def _evaluate(self, items: Items) -> fx.Node:
        values = self.edit.values
        leader = items[0][1]
        value = values.of(leader)
        if isinstance(value, Scalar | Vector):
            return self._spread({param: values.first(node) for param, node in items})
        assert value is not None
        if value.root is leader:
            return self.unit.shard
        columns = zip(*(nodes_in((node.args, node.kwargs)) for _, node in items), strict=True)  # argument by argument
        params = [param for param, _ in items]
        arguments = iter([
            self.evaluate(list(zip(params, column, strict=True)))
            for column in columns
        ])  # fmt: skip
        args, kwargs = fx.map_arg((leader.args, dict(leader.kwargs)), lambda _: next(arguments))
        return self.emit("local", leader.target, *args, **kwargs)

    def _spread(self, nodes: Mapping[int, fx.Node]) -> fx.Node:
        """For each element the scalar of its parameter, or what the vector of its parameter has for its block."""
        flat = [self._flat(nodes[param]) for param in sorted(nodes)]
        counts = [
            nodes[param].meta["val"].numel() if param in nodes else 0 for param in range(len(self.unit.layout.shapes))
        ]
        values = self.emit("local", aten.cat.default, flat)
        return self.emit("local", SPREAD, values, self.unit.layout.text, self.unit.groups, counts)

    def _flat(self, node: fx.Node) -> fx.Node:
        """The new node of a scalar or vector, 1-D, in the order of the blocks."""
        known, new = self.edit.values.of(node), self.edit.new[node]
        if isinstance(known, Vector):
            order = sorted(range(len(known.size)), key=lambda dim: (-known.stride[dim], dim))
            if order != list(range(len(known.size))):
                new = self.emit("local", aten.permute.default, new, order)
        return self.emit("local", aten.reshape.default, new, [-1])

    def _through_groups(self, sent: list[fx.Node]) -> list[fx.Node]:
        """All ranks' `sent`, gathered in as many stages as the unit; what an earlier stage brings is retained."""
        retained = emitter(self.edit.graph, self.unit.starts[0], replace(self.unit.tag, reshard=False))
        groups = self.unit.spec.groups
        for index, group in enumerate(groups):
            emit = self.emit if index + 1 == len(groups) else retained
            started = [emit("gather", ALL_GATHER, each, group.size, group.name) for each in sent]
            sent = [emit("wait", WAIT, each) for each in started]
        return sent

    def _join(self, items: Items, full: fx.Node, row: int, begin: int) -> None:
        """Parameters out of their segments in the ranks' rows of `full`, which begin there, in elements on the wire."""
        wire = full.meta["val"].dtype
        params, dtype = tuple(param for param, _ in items), items[0][1].meta["val"].dtype
        wide = dtype.itemsize // wire.itemsize
        by_rank = [segments_of(self.unit.layout, params, rank) for rank in range(self.unit.layout.world_size)]
        for position, (_, node) in enumerate(items):
            shares = []
            for rank, segments in enumerate(by_rank):
                segment = segments[position]
                if segment is not None:
                    at = rank * row + begin + segment.in_taken * wide
                    shares.append(self.emit("view", aten.slice.Tensor, full, 0, at, at + segment.numel * wide))
            run = shares[0] if len(shares) == 1 else self.emit("view", aten.cat.default, shares)
            if wire not in (dtype, _SENT_AS.get(dtype)):
                run = self.emit("view", aten.view.dtype, run, dtype)
            self.edit.new[node] = self._as(node, run)

    def _sendable(self, items: Items) -> fx.Node:
        """What is sent of `items`, on the whole shard, before segments are taken of it."""
        local = self.evaluate(items)
        sent_as = _SENT_AS.get(local.meta["val"].dtype)
        return local if sent_as is None else self.emit("local", CAST, local, sent_as)

    def _as(self, node: fx.Node, run: fx.Node) -> fx.Node:
        """The elements of a parameter, 1-D, in the shape, with the strides and in the dtype of `node`."""
        value, dtype = _elements(node, self.edit.values), node.meta["val"].dtype
        shaped = _shaped(run, value.size, value.stride, "view", self.emit)
        return self.emit("view", CAST, shaped, dtype) if dtype in _SENT_AS else shaped


def _wire_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """In which dtype all of `dtypes` can be sent: the narrowest of them, or bytes, which every backend knows."""
    narrowest = min(dtypes, key=lambda dtype: dtype.itemsize)
    return torch.uint8 if narrowest.itemsize == 1 else narrowest
