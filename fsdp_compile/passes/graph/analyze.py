"""A graph with collectives as the planner sees it: tasks and units, and the nodes that a plan moves.

A plan moves the nodes that start collectives or wait for them, and what prepares or follows those. All others compute,
in the order in which they stand in the graph. That order is cut into tasks wherever a plan may have something to do:

    nodes of the graph   add  mm  relu  mm  mul  sum          reads of unit a: mm .. relu, gradients of a: sum
    tasks                add | mm  relu | mm  mul  sum |      cut before a unit is first read, after it was last read,
                                                              after its last gradient, before each matrix product
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.comm.collectives import COALESCED, GROUP_ARGUMENT, STARTS, WAIT, copies
from fsdp_compile.passes._torch import is_tangent
from fsdp_compile.passes.graph.lifetimes import Lifetime, lifetimes, live_bytes
from fsdp_compile.passes.graph.nodes import (
    CAST,
    get_tag,
    is_product,
    is_view,
    is_view_or_cast,
    module_path,
    readers,
    set_tag,
    source_of,
    tag_of,
    tagged,
)
from fsdp_compile.passes.graph.work import FREE, Costs, message_size, size_of
from fsdp_compile.passes.plan.workload import Task, UnitCost, Workload

Span = tuple[int, int]  # first and last position


@dataclass(frozen=True)
class Gather:
    """The gather of a unit: the nodes that start it, wait for it and view it, and the nodes that read the views.

    A gather in two stages has the first one in `first`; `start` then begins with the wait for it. Parameters that are
    gathered in another form than the rest of the unit have an all-gather of their own before that of the rest.
    """

    first: list[fx.Node]
    start: list[fx.Node]
    wait: list[fx.Node]
    readers: list[fx.Node]

    @property
    def starts(self) -> list[fx.Node]:
        """The all-gathers of the last stage, in the order in which they are launched."""
        return [node for node in self.start if node.target in STARTS]


@dataclass(frozen=True)
class Reduce:
    """The reduce of a unit: its gradients, and the nodes that pack and start it, wait for it, and finish it.

    With hybrid sharding, or a second stage, `wait` also starts the next stage, and `end` waits for that.
    """

    gradients: list[fx.Node]
    start: list[fx.Node]
    wait: list[fx.Node]
    end: list[fx.Node]

    @property
    def result(self) -> fx.Node:
        """The reduced gradient."""
        return next(node for node in reversed((*self.wait, *self.end)) if not _is_update(node))

    @property
    def updates(self) -> bool:
        """Whether the unit is updated where the reduce is waited for, so that its gradient lives no longer."""
        return any(map(_is_update, self.wait))


@dataclass(frozen=True)
class GraphInfo:
    """A graph as `analyze` reads it.

    Attributes:
        workload: the planner's input; its `backward` is 0 if the graph has one direction.
        tasks: the nodes of each task.
        gathers: by name of the unit.
        reduces: likewise.
        prologue: nodes that run before the gathers that read them: maxima of parameters.
        tail: nodes that read reduced gradients, such as a sum of two; they run after all tasks.
    """

    workload: Workload
    tasks: list[list[fx.Node]]
    gathers: dict[str, Gather]
    reduces: dict[str, Reduce]
    prologue: list[fx.Node]
    tail: list[fx.Node]


def analyze(graph: fx.Graph, costs: Costs = FREE, joint: bool = False) -> GraphInfo:
    """Read `graph`.

    Args:
        graph: one direction of a step, or both.
        costs: what its nodes take.
        joint: whether the graph is forward and backward in one: backward begins where a gradient of an output is first
            read.
    """
    names = _start_names(graph)
    prologue = with_ancestors(tagged(graph, "maximum"))
    starts: dict[str, list[fx.Node]] = {}
    for start in tagged(graph, "gather"):
        if start in names:
            starts.setdefault(names[start], []).append(start)
    gathers = {name: _make_gather(of_unit, prologue) for name, of_unit in starts.items()}
    reduces = {names[start]: _make_reduce(start) for start in tagged(graph, "reduce") if start in names}
    computing, tail = _fixed_nodes(graph, prologue, gathers, reduces)
    position = {node: index for index, node in enumerate(computing)}
    backward = 0
    if joint:  # backward begins with the first node that is computed from the gradient of an output
        from_gradients = (at for at, node in enumerate(computing) if any(map(is_tangent, node.all_input_nodes)))
        backward = next(from_gradients, len(computing))
    reads = {name: _spans(gather.readers, position, backward) for name, gather in gathers.items()}
    writes = {name: _spans(reduce.gradients, position, backward) for name, reduce in reduces.items()}
    cuts = _task_starts(computing, [*reads.values(), *writes.values()], backward)
    tasks = [computing[begin:end] for begin, end in pairwise((*cuts, len(computing)))]
    units = list(dict.fromkeys([*gathers, *reduces]))
    reading = {user for node in prologue for user in node.users}
    first = next((name for name, each in gathers.items() if reading.intersection((*each.first, *each.start))), None)
    ready = [spans[-1][1] for spans in writes.values()]
    alive = [] if costs is FREE else _alive_beside_plan(graph, computing, reduces, ready, gathers.keys(), joint)
    memory = live_bytes(alive, len(computing))
    touched = zip(cuts, tasks, _units_by_task(reads, units, cuts), _units_by_task(writes, units, cuts), strict=True)
    workload = Workload(
        tasks=tuple(
            Task(
                _task_name(nodes),
                seconds=sum(map(costs.node, nodes)),
                memory=max(memory[begin : begin + len(nodes)]),
                reads=tuple(read),
                writes=tuple(written),
            )
            for begin, nodes, read, written in touched
        ),
        backward=cuts.index(backward) if backward < len(computing) else len(tasks),
        units=tuple(
            _unit_cost(name, gathers.get(name), reduces.get(name), costs, prologue if name == first else ())
            for name in units
        ),
        latency=costs.latency,
        can_coalesce=can_coalesce([start for each in gathers.values() for start in each.starts])
        and can_coalesce([each.start[-1] for each in reduces.values()]),
    )
    return GraphInfo(workload, tasks, gathers, reduces, prologue, tail)


def _start_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """A name for each start of a gather or a reduce: the unit's path, with a suffix if several units have that path.

    Suffixes count as in the joint graph, so that forward and backward use the same names. Of a gather in stages the
    last one counts, of a reduce in stages the first one.
    """
    names: dict[int, str] = {}
    by_start: dict[fx.Node, str] = {}
    taken: Counter[str] = Counter()
    for start in sorted(tagged(graph, "gather", "reduce"), key=lambda each: tag_of(each).unit):
        tag = tag_of(start)
        if tag.kind == "gather":
            is_further = any(user.target in STARTS for wait in start.users for user in wait.users)
        else:
            is_further = start.all_input_nodes[0].target is WAIT
        if not is_further:
            path = tag.path or "root"
            if tag.unit not in names:
                taken[path] += 1
                names[tag.unit] = path if taken[path] == 1 else f"{path}:{taken[path]}"
            by_start[start] = names[tag.unit]
    return by_start


# --- what a plan moves ------------------------------------------------------------------------------------------------


def _make_gather(starts: Sequence[fx.Node], prologue: Sequence[fx.Node]) -> Gather:
    waits = [user for start in starts for user in start.users]
    both = [readers(wait) for wait in waits]
    views = sorted({view for each, _ in both for view in each})
    others = [reader for _, each in both for reader in each]
    nodes = with_ancestors(starts, prologue)
    firsts = [index + 1 for index, node in enumerate(nodes) if node.target in STARTS and node not in starts]
    split = max(firsts, default=0)
    return Gather(nodes[:split], nodes[split:], [*waits, *views], list(dict.fromkeys(others)))


def with_ancestors(nodes: Sequence[fx.Node], without: Sequence[fx.Node] = ()) -> list[fx.Node]:
    """`nodes` and what they are computed from, such as a cast of an input, in the graph's order."""
    ancestors = set(nodes)
    work = list(nodes)
    while work:
        inputs = {node for node in work.pop().all_input_nodes if node.op != "placeholder"} - ancestors - set(without)
        ancestors |= inputs
        work += inputs
    return sorted(ancestors)


def _make_reduce(start: fx.Node) -> Reduce:
    chain = with_preparation(start)
    stages: list[list[fx.Node]] = []  # of each the wait, which may start a further one
    following: fx.Node | None = start
    while following is not None:
        (wait,) = following.users
        following = next((user for user in wait.users if user.target in STARTS), None)
        stages.append([wait, following] if following is not None else [wait, *_nodes_after(wait)])
    return Reduce(chain[0].all_input_nodes, chain, stages[0], [node for stage in stages[1:] for node in stage])


def with_preparation(start: fx.Node) -> list[fx.Node]:
    """`start`, which starts or defers a reduce, after the nodes that pack, add accumulated gradients, and scale."""
    nodes = [start]
    while isinstance(sent := nodes[0].args[0], fx.Node) and (tag := get_tag(sent)) is not None:
        if tag.kind not in ("pack", "add_accumulated", "scale"):
            break
        nodes.insert(0, sent)
    return nodes


def _nodes_after(wait: fx.Node) -> list[fx.Node]:
    """What follows a reduce: the rest of a division, a cast to the shard's dtype, an update of the unit."""
    scales = [user for user in wait.users if (tag := get_tag(user)) is not None and tag.kind == "scale"]
    casts = [user for each in (wait, *scales) for user in each.users if user.target is CAST]
    return [*scales, *casts, *(user for each in (wait, *scales, *casts) for user in each.users if _is_update(user))]


def _is_update(node: fx.Node) -> bool:
    tag = get_tag(node)
    return tag is not None and tag.kind == "update"


def can_coalesce(starts: Sequence[fx.Node]) -> bool:
    """Whether one coalesced call can start all of `starts`: they differ only in what they send.

    Gloo has no such call: its own runs them one by one, and copies.
    """
    if not starts:
        return True
    first = starts[0]
    if first.target not in COALESCED or "tree" in first.args:
        return False
    group: Any = first.args[GROUP_ARGUMENT[first.target]]
    if copies(first.meta["val"], group):
        return False
    common = {(start.target, *start.args[1:], start.meta["val"].dtype, start.meta["val"].device) for start in starts}
    return len(common) == 1


# --- tasks ------------------------------------------------------------------------------------------------------------


def _fixed_nodes(
    graph: fx.Graph, prologue: Sequence[fx.Node], gathers: Mapping[str, Gather], reduces: Mapping[str, Reduce]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes that no plan moves, in order: those that compute, and those that read what was reduced."""
    moved = set(prologue).union(*((*each.first, *each.start, *each.wait) for each in gathers.values()))
    moved = moved.union(*(each.start for each in reduces.values()))
    reduced = {node for each in reduces.values() for node in (*each.wait, *each.end)}
    computing: list[fx.Node] = []
    tail: list[fx.Node] = []
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and node not in moved and node not in reduced:
            after = not reduced.isdisjoint(node.all_input_nodes)
            (tail if after else computing).append(node)
            reduced |= {node} if after else set()
    return computing, tail


def _spans(nodes: Iterable[fx.Node], position: Mapping[fx.Node, int], split: int) -> list[Span]:
    """From the first to the last of `nodes`, before and from `split`; placeholders come first, outputs last."""
    positions = [position.get(node, len(position) if node.op == "output" else 0) for node in nodes]
    sides = [[at for at in positions if at < split], [at for at in positions if at >= split]]
    return [(min(side), max(side)) for side in sides if side]


def _task_starts(computing: list[fx.Node], touched: Iterable[list[Span]], backward: int) -> list[int]:
    """The nodes at which tasks begin (see the module's docstring)."""
    spans = [span for spans in touched for span in spans]
    cuts = {0, backward, *(first for first, _ in spans), *(last + 1 for _, last in spans)}
    cuts |= {index for index, node in enumerate(computing) if is_product(node)}
    return sorted(cut for cut in cuts if cut < len(computing))


def _units_by_task(spans: Mapping[str, list[Span]], units: list[str], cuts: list[int]) -> list[list[int]]:
    """For each task, which begin at `cuts`, the indices of the units with a span that overlaps it."""
    touched: list[list[int]] = [[] for _ in cuts]
    for index, unit in enumerate(units):
        for first, last in spans.get(unit, ()):
            for task in touched[bisect_right(cuts, first) - 1 : bisect_right(cuts, last)]:
                task.append(index)
    return touched


def _task_name(nodes: list[fx.Node]) -> str:
    """The module that a task computes for, and its matrix product."""
    paths = [path for node in nodes if (path := module_path(node))]
    product = [node.name for node in nodes if is_product(node)]
    return " ".join([*paths[:1], *product[:1]]) or nodes[0].name


def _unit_cost(
    name: str, gather: Gather | None, reduce: Reduce | None, costs: Costs, prologue: Sequence[fx.Node]
) -> UnitCost:
    """The first gather that reads the `prologue` waits for it, and has its seconds too."""
    before = [node for node in prologue if node.target in STARTS]
    further = [node for node in (*reduce.wait, *reduce.end) if node.target in STARTS] if reduce else []
    nodes = [*gather.first, *gather.start] if gather else []
    held = [node for node in nodes if node.target is not WAIT and not is_view(node)]
    sent = [*before, *(node for node in nodes if node.target in STARTS)]
    tag = tag_of((gather or reduce).start[-1])  # type: ignore[union-attr]  # it has one of them
    return UnitCost(
        name,
        gather=sum(map(costs.collective, sent)) + len(before) * costs.latency,
        reduce=costs.collective(reduce.start[-1]) if reduce else 0.0,
        gathered=sum(size_of(node) + message_size(node) for node in held),
        packed=size_of(reduce.start[-1].all_input_nodes[0]) + 2 * message_size(reduce.start[-1]) if reduce else 0,
        replicate=sum(map(costs.collective, further)),
        keep_unsharded=None if tag.reshard is None else not tag.reshard,
        module=tag.path or "root",
    )


# --- what is alive ----------------------------------------------------------------------------------------------------


def _alive_beside_plan(
    graph: fx.Graph,
    computing: list[fx.Node],
    reduces: Mapping[str, Reduce],
    ready: Sequence[int],
    gathered: Set[str],
    joint: bool,
) -> list[Lifetime]:
    """What is alive when, except gathered and packed buffers, which are part of the plan.

    A unit that is not `gathered` in this graph was kept unsharded by the forward. Its shard and its full buffer are
    alive then, and of the buffer only what backward reads is an input of the graph. In a joint graph, a tensor whose
    views are packed will be packed itself, see `pack_in_place`.
    """
    packed = {node: at for reduce, at in zip(reduces.values(), ready, strict=True) for node in reduce.gradients}
    sizes = {name: size_of(reduce.result) for name, reduce in reduces.items()}
    added = [(0, sizes[name] + _beside_matrices(reduces[name])) for name in reduces if name not in gathered]
    results = [(at, sizes[name], reduces[name].updates) for name, at in zip(reduces, ready, strict=True)]
    added += [(at, size) for at, size, is_used in results if not is_used]
    if used := [(at, size) for at, size, is_used in results if is_used]:  # by updates: no two of them live together
        added.append((min(used)[0], max(size for _, size in used)))
    position = {node: index for index, node in enumerate(computing)}
    late = {source_of(node): at for node, at in packed.items()} if joint else {}
    return lifetimes(graph, position, packed, added, joint, late=late)


def _beside_matrices(reduce: Reduce) -> int:
    """Bytes of a unit's buffer that are padding or vectors, which backward need not read."""
    computed = ((each, source_of(each, is_view_or_cast)) for each in reduce.gradients)  # casts are of flat views
    matrices = sum(size_of(each) for each, source in computed if source.meta["val"].dim() > 1)
    return size_of(reduce.start[-1].all_input_nodes[0]) - matrices


# --- choices --------------------------------------------------------------------------------------------------------


def keep_unsharded(graph: fx.Graph, info: GraphInfo, names: Iterable[str]) -> None:
    """Tag the undecided units: those in `names` stay unsharded after forward, the others reshard."""
    unsharded = {tag_of(info.gathers[name].starts[0]).unit for name in names}
    for node in graph.nodes:
        tag = get_tag(node)
        if tag is not None and tag.reshard is None:
            set_tag(node, replace(tag, reshard=tag.unit not in unsharded))


def set_policy(nodes: Iterable[fx.Node], policy: CheckpointPolicy) -> None:
    """Tell the partitioner whether to save or to recompute `nodes`."""
    for node in nodes:
        node.meta.pop("ac_graph_id", None)
        node.meta["recompute"] = policy
