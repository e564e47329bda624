"""What becomes of activations between forward and backward, per block: read from the joint graph, chosen, and tagged.

A block is a module of the outermost list of modules, such as `layers.3`. Its nodes are those of its forward, by the
module stack that Dynamo notes. `choose_activations` reads the blocks, lets the planner (plan/memory.py) choose a policy
for each, and tells the partitioner.

Note [What is computed again]
Backward recomputes all that it needs of a block from what enters the block: tensors of other blocks or of the model
around it, which are stored. What leaves the block is stored too, as the next one starts there; so are the results of
random operators, which would differ the second time. The nodes get the tags of activation checkpoints,
`MUST_RECOMPUTE` and `MUST_SAVE`, so that the partitioner has no choice left in a recomputed block, and what was planned
is what happens. The policy "products" also stores the results of matrix products and of attention.

A block in which the user has put a checkpoint is left alone, and so is one that computes twice in a step, or whose
nodes are interleaved with another block's.

Note [Activations on the host]

    forward    block 3  z = product          copy = to_host(z)
               block 4  ...                  host = wait_copy(copy, z)               z is freed
    backward   block 4  g = first gradient   returned = from_host(host, g)
               ...
               block 3                       z' = wait_copy(returned, host)          what backward reads for z

Copies run while other blocks compute. `from_host` takes the gradient as an argument for two reasons: the copy must not
begin before the gradient is computed, and the partitioner puts `from_host` into backward, so that forward saves `host`.

Note [When the joint plan is wrong]
The joint graph is planned before the partitioner splits it, with an estimate of what will be alive: it does not know in
which order backward computes again, nor which gradients take the place of their parameters. Seen were 0.7 % too little,
and 3 % too much. The plans of forward and backward, made later from the real graphs, check the same budget. If one of
them needs more, it is too late to choose anew, because the forward is compiled by then: compilation of that graph ends
with a PlanError that says how much is needed, and the graph does not run.

So a choice has to fit with 2 % to spare. Where none does, the one that needs the least is taken, unless the budget is
far below it (`budget_of_step`), and the plans of the graphs have the last word.
"""

import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.config import CompileConfig
from fsdp_compile.core.ops import FROM_HOST, TO_HOST, WAIT_COPY
from fsdp_compile.passes._torch import V, WaitKernel, register_lowering
from fsdp_compile.passes.agreement import decide_together, read_plan, shape_of
from fsdp_compile.passes.graph.analyze import GraphInfo, analyze, keep_unsharded, set_policy
from fsdp_compile.passes.graph.lifetimes import Lifetime, inlined, last_uses_of, live_bytes
from fsdp_compile.passes.graph.nodes import (
    Tag,
    add_call,
    backward_nodes,
    block_path,
    flop_formula,
    is_pure,
    is_scalar,
    module_path,
    set_tag,
    source_of,
)
from fsdp_compile.passes.graph.optimizer_update import note_arrivals, update_cost
from fsdp_compile.passes.graph.prices import Prices, prices_of
from fsdp_compile.passes.graph.work import size_of
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.memory import (
    Block,
    Copy,
    Options,
    Policy,
    Repeat,
    Result,
    choose,
    least_of,
    planned,
    workload_of,
)
from fsdp_compile.passes.plan.plan import Plan, PlanError
from fsdp_compile.passes.plan.whole_step import budget_of_step
from fsdp_compile.passes.plan.workload import Workload, smallest_budget

RECOMPUTE, PRODUCTS, OFFLOAD = "recompute", "recompute but products", "offload"  # policies for a block
_TOO_LOW = 0.02  # by how much, as a part of the budget, the estimate of a step may be too low
LARGE = 1 << 16  # bytes below which an activation is not worth a copy of its own


def choose_activations(context: GraphContext) -> None:
    """Choose a policy for each block by `config.activations`; with a link, also which units stay unsharded.

    Raises:
        PlanError: no plan fits into `config.budget`.
    """
    graph, config = context.graph, context.config
    if config.activations == "keep":
        return
    blocks = read_blocks(graph, prices_of(graph, config))
    if config.link is None:
        blocks.tag((RECOMPUTE,) * len(blocks.blocks))
    else:
        names, step, plan, kept = _choose_together(blocks.options(config), config)
        blocks.tag(names)
        keep_unsharded(graph, blocks.info, kept)
        note_arrivals(blocks.info, step, plan)


def _choose_together(
    options: Options, config: CompileConfig
) -> tuple[tuple[str | None, ...], Workload, Plan, tuple[str, ...]]:
    """The name of each block's policy, the step that this makes, its plan, and the units that it keeps unsharded.

    They are those of the first rank: what backward recomputes decides when it gathers.
    """
    by_name = [{policy.name: policy for policy in block.policies} for block in options.blocks]

    def make() -> dict[str, Any]:
        chosen = choose_policies(options, config)
        names, found = [policy.name if policy else None for policy in chosen.policies], chosen.planned
        return {"policies": names, "plan": str(found.plan), "keep": found.keep_unsharded}

    def read(table: dict[str, Any]) -> tuple[tuple[str | None, ...], Workload, Plan, tuple[str, ...]]:
        names = tuple(table["policies"])
        chosen = zip(by_name, names, strict=True)
        step = workload_of(options, tuple(None if name is None else policies[name] for policies, name in chosen))
        return names, step, *read_plan(table, step, budget_of_step(step, config.budget))

    known = [(block.name, [(policy.name, policy.at) for policy in block.policies]) for block in options.blocks]
    key = shape_of(options.plain, config, config.activations, known)
    return decide_together(key, make, read)


def choose_policies(options: Options, config: CompileConfig) -> Result:
    """Return the policies that `config.activations` names, or the best. PlanError if none fits the budget."""
    if config.activations == OFFLOAD and not any(each.copies for block in options.blocks for each in block.policies):
        raise ValueError(
            "activations: expected a device whose hardware file has a host_bandwidth, and two blocks or more with "
            f"large activations, for 'offload', found {config.device or 'the device of the graph'}"
        )
    by_name = [{policy.name: policy for policy in block.policies} for block in options.blocks]
    policies = tuple(of_block.get(config.activations) for of_block in by_name)
    if config.activations == "auto":  # Note [When the joint plan is wrong]
        with suppress(PlanError):
            return choose(options, config.budget and int((1 - _TOO_LOW) * config.budget))
        policies = least_of(options)
    step = workload_of(options, policies)
    budget = budget_of_step(step, config.budget)
    if config.activations == "auto" and budget is not None and budget < smallest_budget(step):
        return choose(options, budget)  # raises: the least is too much
    return planned(options, policies, budget)


# --- which nodes are a block's ----------------------------------------------------------------------------------------


class NextBlock(NamedTuple):
    """The last node of the next block's forward, and the first tensor of its backward."""

    last: fx.Node
    first: fx.Node


@dataclass(frozen=True)
class Recomputed:
    """What backward recomputes of a block: `nodes`, in order, from `saved` and what enters the block.

    Nodes in `copied` are copied to the host by the end of the `next` block's forward, and back from the beginning of
    that block's backward on.
    """

    nodes: list[fx.Node]
    saved: list[fx.Node]
    copied: list[fx.Node] = field(default_factory=list)
    next: NextBlock | None = None


@dataclass(frozen=True)
class Blocks:
    """The blocks of a joint graph.

    Attributes:
        graph: the graph.
        prices: None if only the structure is known.
        info: the graph, analyzed.
        position: where each node computes.
        split: the first position of backward.
        stored: what enters and leaves blocks.
        blocks: by name of the block and of the policy, what would be recomputed.
    """

    graph: fx.Graph
    prices: Prices | None
    info: GraphInfo
    position: Mapping[fx.Node, int]
    split: int
    stored: Set[fx.Node]
    blocks: Mapping[str, Mapping[str, Recomputed]]

    def tag(self, policies: Sequence[str | None]) -> None:
        """Tell the partitioner what to recompute. See Note [What is computed again]."""
        chosen = [of_block[name] for of_block, name in zip(self.blocks.values(), policies, strict=True) if name]
        for each in chosen:
            set_policy(each.saved, CheckpointPolicy.MUST_SAVE)
            in_backward = self._copy_to_host(each, each.next) if each.copied and each.next else ()
            set_policy([node for node in each.nodes if node not in in_backward], CheckpointPolicy.MUST_RECOMPUTE)
        if chosen:
            set_policy(self.stored, CheckpointPolicy.MUST_SAVE)

    def _copy_to_host(self, block: Recomputed, beside: NextBlock) -> set[fx.Node]:
        """Insert copies to the host and back; return the nodes of `block` that are recomputed from these.

        Their copies are nodes of backward already and need no tags.
        """
        graph = self.graph
        back: dict[fx.Node, fx.Node] = {}  # what backward reads instead
        users = [user for node in (*block.nodes, *block.copied) for user in node.users if self.is_backward(user)]
        first = min(users)

        def call(target: Any, *args: fx.Node) -> fx.Node:
            return add_call(graph, target, args, mode=args[0].meta["val"].fake_mode)

        for node in block.copied:
            tag = Tag("host", -1, module_path(node), False)
            with graph.inserting_after(node):
                copy = call(TO_HOST, node)
            with graph.inserting_after(beside.last):
                host = call(WAIT_COPY, copy, node)
            set_tag(copy, tag)
            set_tag(host, tag)
            host.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            with graph.inserting_after(beside.first):
                returned = call(FROM_HOST, host, beside.first)
            with graph.inserting_before(first):
                back[node] = call(WAIT_COPY, returned, host)
        for node in block.nodes:
            if not back.keys().isdisjoint(node.all_input_nodes):
                with graph.inserting_before(first):
                    back[node] = graph.node_copy(node, lambda each: back.get(each, each))
        for user in users:
            for node in user.all_input_nodes:
                if node in back:
                    user.replace_input_with(node, back[node])
        return back.keys() - set(block.copied)

    def is_backward(self, node: fx.Node) -> bool:
        """Whether the node computes in backward."""
        return self.position.get(node, 0) >= self.split

    def options(self, config: CompileConfig) -> Options:
        """Return the planner's input: workloads, live bytes, and what each policy means for each block."""
        update = update_cost(self.info, self.prices, config)
        if not self.blocks or self.prices is None:
            return Options(self.info.workload, self.info.workload, (), (), (), (), update)
        stored = self.prices.read(self.graph, "joint", self.stored)
        starts = list(accumulate(map(len, stored.tasks[:-1]), initial=0))
        fresh = dict.fromkeys(starts, 0)
        for each in stored.alive:
            if each.begin in fresh:
                fresh[each.begin] += each.size
        of_policies = _Policies(self, stored, starts)
        blocks = tuple(
            Block(name, tuple(filter(None, (of_policies.policy(*each) for each in policies.items()))))
            for name, policies in self.blocks.items()
        )
        live = live_bytes(stored.alive, len(of_policies.position))
        return Options(
            self.info.workload, stored.workload, tuple(live), tuple(fresh.values()), tuple(starts), blocks, update
        )


def _positions(info: GraphInfo) -> dict[fx.Node, int]:
    return {node: index for index, node in enumerate(chain.from_iterable(info.tasks))}


def read_blocks(graph: fx.Graph, prices: Prices | None) -> Blocks:
    """Find the blocks of `graph`, a joint graph."""
    info = prices.read(graph, "joint") if prices else analyze(graph, joint=True)
    split = sum(map(len, info.tasks[: info.workload.backward]))
    position = _positions(info)
    spans = _block_nodes(list(position)[:split] if split < len(position) else [])
    block_of = {node: name for name, nodes in spans.items() for node in nodes}
    blocks: dict[str, dict[str, Recomputed]] = {}
    found = Blocks(graph, prices, info, position, split, _values_crossing(graph, block_of, position, split), blocks)
    begins: dict[str, fx.Node] = {}  # by block, the first tensor of its backward
    for node in sorted(backward_nodes(graph)):
        path = block_path(node)
        if path and found.is_backward(node) and isinstance(node.meta.get("val"), Tensor):
            begins.setdefault(path, node)
    neighbors = {name: NextBlock(spans[other][-1], begins[other]) for name, other in pairwise(spans) if other in begins}
    has_host = prices is not None and prices.device.host_bandwidth
    for name, nodes in spans.items():
        saved = [node for node in nodes if not is_pure(node) and not is_scalar(node)]
        products = [node for node in nodes if flop_formula(node) is not None]
        for policy, left_out in ((RECOMPUTE, saved), (PRODUCTS, [*saved, *products])):
            again = _needed_nodes(found, nodes, found.stored | {*left_out})
            if again:
                blocks.setdefault(name, {})[policy] = Recomputed(again, left_out)
            if policy == PRODUCTS and again and has_host and name in neighbors:
                needed = {*again}
                copied = [
                    node
                    for node in nodes
                    if node not in needed | found.stored and size_of(node) >= LARGE and node.meta["val"].is_contiguous()
                    if any(user in needed or found.is_backward(user) for user in node.users)
                ]
                blocks[name][OFFLOAD] = Recomputed(again, left_out, copied, neighbors[name])
    return found


def _block_nodes(forward: Sequence[fx.Node]) -> dict[str, list[fx.Node]]:
    """By name, the nodes of each block that may be recomputed, from its first to its last one."""
    positions: dict[str, list[int]] = {}
    for index, node in enumerate(forward):
        if path := block_path(node):
            positions.setdefault(path, []).append(index)
    spans = sorted((each[0], each[-1], name) for name, each in positions.items())
    mixed = {name for one, other in pairwise(spans) if other[0] <= one[1] for _, _, name in (one, other)}
    blocks = {name: list(forward[first : last + 1]) for first, last, name in spans if name not in mixed}
    return {name: nodes for name, nodes in blocks.items() if not any("recompute" in node.meta for node in nodes)}


def _values_crossing(
    graph: fx.Graph, block_of: Mapping[fx.Node, str], position: Mapping[fx.Node, int], split: int
) -> set[fx.Node]:
    """Find what forward computes in one block, or outside of all, and reads in another, or returns."""
    constants: set[fx.Node] = set()
    crossing: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "placeholder" and constants.issuperset(node.all_input_nodes):
            constants.add(node)
        if node.op != "output" and position.get(node, split) >= split:
            continue
        for each in node.all_input_nodes:
            source = source_of(each)
            is_computed = position.get(source, split) < split and source not in constants
            if is_computed and block_of.get(source) != block_of.get(node) and not is_scalar(source):
                crossing.add(source)
    return crossing


def _needed_nodes(of: Blocks, nodes: Sequence[fx.Node], stored: Set[fx.Node]) -> list[fx.Node]:
    """Choose the `nodes` of a block that backward needs, directly or to compute these, up to what is `stored`."""
    needed: set[fx.Node] = set()
    for node in reversed(nodes):
        is_read = any(user in needed or of.is_backward(user) for user in node.users)
        is_element = node.target is operator.getitem and node.args[0] in stored
        if is_read and not is_element and not is_scalar(node) and node not in stored:
            needed.add(node)
    return [node for node in nodes if node in needed]


# --- what recomputing a block costs -----------------------------------------------------------------------------------


class _Policies:
    """From what is recomputed to a `Policy`: positions, bytes and seconds."""

    def __init__(self, blocks: Blocks, stored: GraphInfo, starts: Sequence[int]) -> None:
        assert blocks.prices is not None
        self.prices, self.info, self.starts, self.position = blocks.prices, stored, starts, _positions(stored)
        self.split = starts[stored.workload.backward]
        forward = {node: at for node, at in self.position.items() if at < self.split}
        self.last_in_forward = last_uses_of(blocks.graph, forward, inlined(blocks.graph, True) - blocks.stored)
        self.alive: dict[fx.Node, Lifetime] = {each.node: each for each in stored.alive if each.node is not None}

    def policy(self, name: str, block: Recomputed) -> Policy | None:
        """Return what recomputing `block` costs and saves; None if it saves nothing."""
        reads = [self.position.get(user, 0) for node in (*block.nodes, *block.copied) for user in node.users]
        first = min((at for at in reads if at >= self.split), default=None)
        if first is None:
            return None
        at = self._task_at(first)
        back = self.starts[at]
        changes: list[tuple[int, int]] = []
        returns = held = 0
        for node in block.nodes:
            each = self.alive.get(node)
            if each is not None and each.last >= self.split:
                changes += [(max(each.begin, self.last_in_forward[node]) + 1, -each.size), (back, each.size)]
                returns += each.size
        sources = {source_of(each) for node in block.nodes for each in node.all_input_nodes}
        for source in sources - {*block.nodes, *block.copied}:
            each = self.alive.get(source)
            if each is not None and each.last < back:  # it stays until the block has been recomputed
                changes += [(each.last + 1, each.size), (back, -each.size)]
                held += each.size
        copies = []
        if block.next is not None and self.prices.device.host_bandwidth is not None:
            for node in block.copied:
                made, left, returned = (self._task_at(self.position[each]) for each in (node, *block.next))
                size = self.alive[node].size
                copies.append(Copy(made, left, returned, at, size, size / self.prices.device.host_bandwidth))
                freed = max(self.position[block.next.last], self.last_in_forward[node]) + 1
                changes += [(freed, -size), (self.position[block.next.first], size)]
        if not returns or any(copy.back >= at for copy in copies) or (name == OFFLOAD and not copies):
            return None
        return Policy(name, at, tuple(changes), tuple(self._repeated_tasks(block.nodes, held)), returns, tuple(copies))

    def _task_at(self, position: int) -> int:
        return bisect_right(self.starts, position) - 1

    def _repeated_tasks(self, nodes: Sequence[fx.Node], held: int) -> Iterator[Repeat]:
        """The tasks of forward to which `nodes` belong, beside `held` bytes."""
        begin, end = self.position[nodes[0]], self.position[nodes[-1]]
        moved = [
            replace(each, begin=each.begin - begin, last=min(end, each.last) - begin)
            for node in nodes
            if (each := self.alive.get(node)) is not None
        ]
        live = live_bytes(moved, end - begin + 1)
        by_task: dict[int, list[fx.Node]] = {}
        for node in nodes:
            by_task.setdefault(self._task_at(self.position[node]), []).append(node)
        for task, members in by_task.items():
            seconds = sum(map(self.prices.node, self.info.tasks[task]))
            part = sum(map(self.prices.node, members)) / seconds if seconds else 0.0
            first, last = self.starts[task], self.starts[task] + len(self.info.tasks[task])
            yield Repeat(task, part, held + max(live[max(0, first - begin) : last - begin]))


# --- lowering ---------------------------------------------------------------------------------------------------------


@register_lowering(WAIT_COPY, type_promotion_kind=None)
def _lower_wait_copy(copy: Any, source: Any) -> Any:
    """Keep the source alive until the wait: see Note [What keeps a copied tensor alive]."""
    WaitKernel.create_wait(WAIT_COPY, copy)
    if source.get_name() in V.graph.name_to_buffer:
        V.graph.additional_star_deps[V.graph.operations[-1].get_operation_name()].add(source.get_name())
    return copy
