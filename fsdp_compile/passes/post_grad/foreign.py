"""Collectives of another sharding, such as SimpleFSDP's DTensors or a functional all-reduce: tagged as ours are.

A tag is all that the planner needs: it then places these launches and waits as it places those of sharded units. Where
a collective's part in the graph is not clear, it has no tag and stays where it is.
"""

import sys
from collections import Counter

import torch.distributed as dist
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.comm.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, STARTS, WAIT
from fsdp_compile.passes._torch import direction
from fsdp_compile.passes.graph.analyze import set_policy, with_ancestors
from fsdp_compile.passes.graph.nodes import Tag, block_path, derived, is_product, is_pure, set_tag


def tag_collectives(graph: fx.Graph) -> int | None:
    """Tag the gathers of parameters and the reduces of gradients in a graph that another sharding has made.

    A gather of parameters sends what is computed from inputs of the graph alone, such as a cast of one. After a reduce
    of gradients comes no matrix product and no other reduce but that over replicas. Rank 0 prints what was found.

    Returns:
        How many reduces may be in flight so that those of two blocks are; None: nothing was tagged.
    """
    starts = [node for node in graph.nodes if node.target in STARTS]
    gathers = [start for start in starts if start.target is ALL_GATHER and _sends_an_input(start)]
    reduces = [start for start in starts if start.target in (REDUCE_SCATTER, ALL_REDUCE) and _ends_in_outputs(start)]
    outputs = set(graph.output_node().all_input_nodes)
    of_blocks = Counter[str]()
    for unit, start in enumerate((*gathers, *reduces)):
        (wait,) = start.users
        near = [start, *wait.users] if start in gathers else [start, *start.all_input_nodes]
        path = next((path for node in near if (path := block_path(node))), "")
        kinds: tuple[str, str] = ("gather", "wait") if start in gathers else ("reduce", "wait_reduce")
        of_blocks[path] += start in reduces
        reshard = outputs.isdisjoint((wait, *derived(wait)))
        for node, kind in zip((start, wait), kinds, strict=True):
            set_tag(node, Tag(kind, unit, path, reshard))  # type: ignore[arg-type]  # a literal
    if starts and (not dist.is_initialized() or dist.get_rank() == 0):
        others = len(starts) - len(gathers) - len(reduces)
        found = f"{len(gathers)} all-gathers of parameters, {len(reduces)} reduces of gradients"
        print(f"fsdp_compile: {direction()} graph of another sharding: {found}: ordered; {others} other collectives: "
              f"left in place", file=sys.stderr)  # fmt: skip
    return max(1, 2 * max(of_blocks.values())) if of_blocks else None


def reshard_after_forward(graph: fx.Graph) -> None:
    """In a joint graph, gather parameters again in backward, with casts and views of them, instead of saving them."""
    for start in graph.find_nodes(op="call_function", target=ALL_GATHER):
        if _sends_an_input(start):
            (wait,) = start.users
            set_policy([*with_ancestors([start]), wait, *derived(wait)], CheckpointPolicy.MUST_RECOMPUTE)


def _has_one_wait(start: fx.Node) -> bool:
    return [user.target for user in start.users] == [WAIT]


def _sends_an_input(start: fx.Node) -> bool:
    """Whether a plan may move `start` together with all that it is computed from."""
    moved = set(with_ancestors([start]))
    computed = moved - {start}
    return _has_one_wait(start) and all(
        is_pure(node) and not is_product(node) and moved.issuperset(node.users) for node in computed
    )


def _ends_in_outputs(start: fx.Node) -> bool:
    """Whether what follows from `start` is a gradient: a sum or mean that no product reads before the graph ends."""
    if start.args[1] not in ("sum", "avg") or not _has_one_wait(start) or start.all_input_nodes[0].target is WAIT:
        return False
    work, following = [next(iter(start.users))], set[fx.Node]()
    while work:
        users = {user for user in work.pop().users if user.op != "output"} - following
        following |= users
        work += users
    stages = [node for node in following if node.target in STARTS]
    return not any(map(is_product, following)) and len(stages) <= 1 and all(map(_has_one_wait, stages))
