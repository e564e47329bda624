"""What becomes of activations between forward and backward, per block: read from the joint graph, chosen, and tagged.

    choose_activations    the pass: blocks are read, the planner chooses (plan/memory.py), the partitioner is told
      read_blocks         which nodes belong to which block, and what of that backward needs
      Blocks.options      what each policy means for a block: what is freed, when it is back, what it costs
      Blocks.tag          nodes are tagged as by activation checkpoints; copies to the host are inserted (offload.py)

A block is a module of a list of modules, such as `layers.3`, of the outermost such list. Its nodes are those of its
forward, by the module stack that Dynamo notes.

Note [What is computed again]
Of a block, all that backward needs is computed again from what enters it: tensors of other blocks or of the model
around it, which are stored. What leaves the block is stored too, as the next one starts there; so are the results of
random operators, which would have other values the second time. The nodes get the tags of activation checkpoints,
`MUST_RECOMPUTE` and `MUST_SAVE`, so that the partitioner has no choice left in a block that is computed again, and what
was planned is what happens. In the policy "products", results of matrix products and of attention are stored as well.

A block in which the user has put a checkpoint is left as it is, and so is one that computes twice in a step, or whose
nodes are interleaved with another one's.

Note [When the joint plan was too optimistic]
The joint graph is planned before the partitioner splits it, with an upper bound of what will be alive. The plans of
forward and backward, which are made later from the real graphs, check the same budget. Should one of them need more,
nothing can be chosen anew, because the forward is compiled by then: the compilation of that graph ends with a PlanError
that says how much is needed, and the graph does not run.
"""

import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.config import CompileConfig
from fsdp_compile.passes.graph.analyze import GraphInfo, analyze, keep_unsharded, note_arrivals, set_policy, update_cost
from fsdp_compile.passes.graph.costs import Costs, costs_of
from fsdp_compile.passes.graph.lifetimes import Lifetime, inlined, last_uses_of, live_bytes
from fsdp_compile.passes.graph.nodes import block_path, flop_formula, is_pure, is_scalar, source_of
from fsdp_compile.passes.joint.offload import Again, Next, copy_to_host, following, to_copy
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.memory import Block, Copy, Options, Policy, Repeat, Result, choose, planned

RECOMPUTE, PRODUCTS, OFFLOAD = "recompute", "recompute but products", "offload"  # policies for a block


def choose_activations(context: GraphContext) -> None:
    """Decide what becomes of each block's activations, if `config.activations` leaves it open, and tag the nodes.

    With a link, which units stay unsharded is decided with it.

    Raises:
        PlanError: no plan fits into `config.budget`.
    """
    graph, config = context.graph, context.config
    if config.activations == "keep":
        return
    blocks = read_blocks(graph, costs_of(graph, config))
    if config.link is None:
        blocks.tag((RECOMPUTE,) * len(blocks.blocks))
    else:
        options = blocks.options(config)
        chosen = choose_policies(options, config)
        blocks.tag(tuple(policy.name if policy else None for policy in chosen.policies))
        keep_unsharded(graph, blocks.info, chosen.planned.keep_unsharded)
        note_arrivals(blocks.info, chosen.workload, chosen.planned.plan)


def choose_policies(options: Options, config: CompileConfig) -> Result:
    """The policies that `config.activations` names, or the best ones. PlanError if none fits into `config.budget`."""
    if config.activations == OFFLOAD and not any(each.copies for block in options.blocks for each in block.policies):
        raise ValueError(
            "activations: expected a device whose hardware file has a host_bandwidth, and two blocks or more with "
            f"large activations, for 'offload', found {config.device or 'the device of the graph'}"
        )
    if config.activations == "auto":
        return choose(options, config.budget)
    by_name = [{policy.name: policy for policy in block.policies} for block in options.blocks]
    return planned(options, tuple(policies.get(config.activations) for policies in by_name), config.budget)


# --- which nodes are a block's ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """The blocks of a joint graph.

    Attributes:
        graph: the graph.
        costs: None: only the structure is known.
        info: the graph, analyzed.
        stored: what enters and leaves blocks.
        blocks: by name, what would be computed again, by the name of the policy.
        split: the first position of backward.
    """

    graph: fx.Graph
    costs: Costs | None
    info: GraphInfo
    stored: Set[fx.Node]
    blocks: Mapping[str, Mapping[str, Again]]
    split: int

    def tag(self, policies: Sequence[str | None]) -> None:
        """Tell the partitioner what to compute again. See Note [What is computed again]."""
        chosen = [of_block[name] for of_block, name in zip(self.blocks.values(), policies, strict=True) if name]
        for again in chosen:
            set_policy(again.saved, CheckpointPolicy.MUST_SAVE)
            repeated = copy_to_host(self.graph, again, _positions(self.info), self.split) if again.copied else ()
            set_policy([node for node in again.nodes if node not in repeated], CheckpointPolicy.MUST_RECOMPUTE)
        if chosen:
            set_policy(self.stored, CheckpointPolicy.MUST_SAVE)

    def options(self, config: CompileConfig) -> Options:
        """All that as numbers, for the planner."""
        update = update_cost(self.info, self.costs, config)
        if not self.blocks or self.costs is None:
            return Options(self.info.workload, self.info.workload, (), (), (), (), update)
        stored = analyze(self.graph, self.costs, joint=True, stored=self.stored)
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
        live = live_bytes(stored.alive, len(_positions(stored)))
        return Options(
            self.info.workload, stored.workload, tuple(live), tuple(fresh.values()), tuple(starts), blocks, update
        )


def _positions(info: GraphInfo) -> dict[fx.Node, int]:
    """Where each node computes."""
    return {node: index for index, node in enumerate(chain.from_iterable(info.tasks))}


def read_blocks(graph: fx.Graph, costs: Costs | None) -> Blocks:
    """Find the blocks of `graph`, a joint graph."""
    info = analyze(graph, costs, joint=True)
    split = sum(map(len, info.tasks[: info.workload.backward]))
    position = _positions(info)
    spans = _spans([node for nodes in info.tasks for node in nodes][:split] if split < len(position) else [])
    block_of = {node: name for name, nodes in spans.items() for node in nodes}
    stored = _crossing(graph, block_of, position, split)
    blocks: dict[str, dict[str, Again]] = {}
    neighbors = following(graph, spans, position, split)
    for name, nodes in spans.items():
        saved = [node for node in nodes if not is_pure(node) and not is_scalar(node)]
        products = [node for node in nodes if flop_formula(node) is not None]
        for policy, left_out in ((RECOMPUTE, saved), (PRODUCTS, [*saved, *products])):
            again = _needed(nodes, stored.union(left_out), position, split)
            if again:
                blocks.setdefault(name, {})[policy] = Again(again, left_out)
            if policy == PRODUCTS and again and costs is not None and costs.host_bandwidth and name in neighbors:
                copied = to_copy(nodes, {*again}, stored, position, split)
                blocks[name][OFFLOAD] = Again(again, left_out, copied, neighbors[name])
    return Blocks(graph, costs, info, stored, blocks, split)


def _spans(forward: Sequence[fx.Node]) -> dict[str, list[fx.Node]]:
    """The nodes of each block that may be computed again, from its first to its last one, by its name."""
    positions: dict[str, list[int]] = {}
    for index, node in enumerate(forward):
        if path := block_path(node):
            positions.setdefault(path, []).append(index)
    spans = sorted((min(each), max(each), name) for name, each in positions.items())
    mixed = {name for one, other in pairwise(spans) if other[0] <= one[1] for _, _, name in (one, other)}
    blocks = {name: list(forward[first : last + 1]) for first, last, name in spans if name not in mixed}
    return {name: nodes for name, nodes in blocks.items() if not any("recompute" in node.meta for node in nodes)}


def _crossing(
    graph: fx.Graph, block_of: Mapping[fx.Node, str], position: Mapping[fx.Node, int], split: int
) -> set[fx.Node]:
    """What forward computes in one block, or outside of all, and reads in another one, or returns."""
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


def _needed(
    nodes: Sequence[fx.Node], stored: Set[fx.Node], position: Mapping[fx.Node, int], split: int
) -> list[fx.Node]:
    """Those of a block's `nodes` that backward reads, or computes that from, up to what is stored."""
    needed: set[fx.Node] = set()
    for node in reversed(nodes):
        is_read = any(user in needed or position.get(user, 0) >= split for user in node.users)
        is_element = node.target is operator.getitem and node.args[0] in stored
        if is_read and not is_element and not is_scalar(node) and node not in stored:
            needed.add(node)
    return [node for node in nodes if node in needed]


# --- what computing a block again means -------------------------------------------------------------------------------


class _Policies:
    """From what is computed again to a `Policy`: positions, bytes and seconds."""

    def __init__(self, blocks: Blocks, stored: GraphInfo, starts: Sequence[int]) -> None:
        assert blocks.costs is not None
        self.costs, self.info, self.starts, self.position = blocks.costs, stored, starts, _positions(stored)
        self.split = starts[stored.workload.backward]
        forward = {node: at for node, at in self.position.items() if at < self.split}
        self.last_in_forward = last_uses_of(blocks.graph, forward, inlined(blocks.graph, True) - blocks.stored)
        self.alive: dict[fx.Node, Lifetime] = {each.node: each for each in stored.alive if each.node is not None}

    def policy(self, name: str, again: Again) -> Policy | None:
        """What it means to compute `again`; None if it saves nothing."""
        nodes = set(again.nodes)
        reads = [self.position.get(user, 0) for node in (*again.nodes, *again.copied) for user in node.users]
        first = min((at for at in reads if at >= self.split), default=None)
        if first is None:
            return None
        at = bisect_right(self.starts, first) - 1
        back = self.starts[at]
        changes: list[tuple[int, int]] = []
        returns = held = 0
        for node in again.nodes:
            each = self.alive.get(node)
            if each is not None and each.last >= self.split:
                changes += [(max(each.begin, self.last_in_forward[node]) + 1, -each.size), (back, each.size)]
                returns += each.size
        sources = {source_of(each) for node in again.nodes for each in node.all_input_nodes}
        for source in sources - nodes - {*again.copied}:
            each = self.alive.get(source)
            if each is not None and each.last < back:  # it stays until the block has been computed again
                changes += [(each.last + 1, each.size), (back, -each.size)]
                held += each.size
        copies = tuple(self._copy(node, again.next, at) for node in again.copied) if again.next is not None else ()
        for node, copy in zip(again.copied, copies, strict=True):
            left = max(self.position[again.next.last], self.last_in_forward[node])  # type: ignore[union-attr]  # copied
            changes += [(left + 1, -copy.size), (self.position[again.next.first], copy.size)]  # type: ignore[union-attr]  # likewise
        if not returns or any(copy.back >= at for copy in copies) or (name == OFFLOAD and not copies):
            return None
        return Policy(name, at, tuple(changes), tuple(self._repeats(again.nodes, held)), returns, copies)

    def _copy(self, node: fx.Node, beside: Next, read: int) -> Copy:
        """How `node` is copied."""
        assert self.costs.host_bandwidth is not None
        made, left, back = (bisect_right(self.starts, self.position[each]) - 1 for each in (node, *beside))
        size = self.alive[node].size
        return Copy(made, left, back, read, size, size / self.costs.host_bandwidth)

    def _repeats(self, nodes: Sequence[fx.Node], held: int) -> Iterator[Repeat]:
        """The tasks of forward to which `nodes` belong, beside `held` bytes."""
        begin, end = self.position[nodes[0]], self.position[nodes[-1]]
        alive = [self.alive[node] for node in nodes if node in self.alive]
        lasts = [end if each.last >= self.split else min(end, each.last) for each in alive]
        moved = [
            replace(each, begin=each.begin - begin, last=last - begin) for each, last in zip(alive, lasts, strict=True)
        ]
        live = live_bytes(moved, end - begin + 1)
        by_task: dict[int, list[fx.Node]] = {}
        for node in nodes:
            by_task.setdefault(bisect_right(self.starts, self.position[node]) - 1, []).append(node)
        for task, members in by_task.items():
            seconds = sum(map(self.costs.node, self.info.tasks[task]))
            part = sum(map(self.costs.node, members)) / seconds if seconds else 0.0
            first, last = self.starts[task], self.starts[task] + len(self.info.tasks[task])
            yield Repeat(task, part, held + max(live[max(0, first - begin) : last - begin], default=0))
