"""Collectives of another sharding, such as SimpleFSDP's DTensors or a functional all-reduce: tagged as ours are.

A tag is all that the planner needs: it then places these launches and waits as it places those of sharded units. Where
a collective's part in the graph is not clear, it has no tag and stays where it is. Graphs that send from one rank to
another stay as they are: ranks have different ones on purpose, and would plan them differently.
"""

import sys
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.comm._torch import OPERATORS, group_named
from fsdp_compile.comm.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, STARTS, WAIT
from fsdp_compile.comm.groups import shared_name
from fsdp_compile.config import CompileConfig
from fsdp_compile.passes._torch import direction, size_hint, tree_leaves
from fsdp_compile.passes.graph.analyze import set_policy, with_ancestors
from fsdp_compile.passes.graph.nodes import Tag, block_path, derived, is_product, is_pure, set_tag
from fsdp_compile.passes.hooks import Pipeline


def tag_collectives(graph: fx.Graph, link: str | None = None) -> bool:
    """Tag the gathers of parameters and the reduces of gradients in a graph that another sharding has made.

    A gather of parameters sends what is computed from inputs of the graph alone, such as a cast of one. After a reduce
    of gradients comes no matrix product and no other reduce but that over replicas. Rank 0 prints what was found, and
    for which `link` it is ordered; each text once.

    Returns:
        Whether anything was tagged.
    """
    starts = [node for node in graph.nodes if getattr(node.target, "namespace", "") == OPERATORS.name]
    starts = [node for node in starts if node.target is not WAIT]
    if unknown := [str(node.target).split(".")[1] for node in starts if node.target not in STARTS]:
        _print_once(f"{direction()} graph of another sharding: it has {unknown[0]}, so it is left as it is")
        return False
    if not starts:
        _print_once(f"{direction()} graph without collectives: there is nothing to order")
        return False
    gathers = [start for start in starts if start.target is ALL_GATHER and _sends_an_input(start)]
    reduces = [start for start in starts if start.target in (REDUCE_SCATTER, ALL_REDUCE) and _ends_in_outputs(start)]
    outputs = set(graph.output_node().all_input_nodes)
    for unit, start in enumerate((*gathers, *reduces)):
        (wait,) = start.users
        near = [start, *wait.users] if start in gathers else [start, *start.all_input_nodes]
        path = next((path for node in near if (path := block_path(node))), "")
        kinds: tuple[str, str] = ("gather", "wait") if start in gathers else ("reduce", "wait_reduce")
        reshard = outputs.isdisjoint((wait, *derived(wait)))
        for node, kind in zip((start, wait), kinds, strict=True):
            set_tag(node, Tag(kind, unit, path, reshard))  # type: ignore[arg-type]  # a literal
    found = f"{len(gathers)} all-gathers of parameters, {len(reduces)} reduces of gradients"
    how = f"ordered for {link.partition(';=')[0]}" if link else "ordered by blocks"
    how = how if gathers or reduces else "nothing to order"
    _print_once(f"{direction()} graph of another sharding: {found}: {how}; "
                f"{len(starts) - len(gathers) - len(reduces)} other collectives: left in place")  # fmt: skip
    return bool(gathers or reduces)


@cache
def _print_once(text: str) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 0:
        print(f"fsdp_compile: {text}", file=sys.stderr)


class Sent(NamedTuple):
    """What a graph communicates: the shared name of the group, where the tensor is, and bytes of the whole tensor."""

    group: str
    device: torch.device
    nbytes: int


def communicated(graph: fx.Graph) -> Iterator[Sent]:
    """What a graph of Dynamo's communicates, as far as it can be told there.

    A DTensor communicates in the dimensions of its mesh that shard it; and, where it is trained, in those that
    replicate it. Graphs within the graph count too.
    """
    within = graph.owning_module.modules() if graph.owning_module is not None else ()
    for node in (node for each in within if isinstance(each, fx.GraphModule) for node in each.graph.nodes):
        value = node.meta.get("example_value")
        if isinstance(value, DTensor):
            mesh, is_trained = value.device_mesh, value.requires_grad and torch.is_grad_enabled()
            for dim, placement in enumerate(value.placements):
                if mesh.size(dim) > 1 and (is_trained or not isinstance(placement, Replicate)):
                    yield Sent(shared_name(mesh.get_group(dim)), value.device, _nbytes(value))
        elif str(node.target).startswith(OPERATORS.name) and node.args and isinstance(node.args[-1], str):
            values = tree_leaves([each.meta.get("example_value") for each in (node, *node.all_input_nodes)])
            tensors = [leaf for leaf in values if isinstance(leaf, Tensor)]
            if tensors:
                group = group_named(node.args[-1])
                yield Sent(shared_name(group), tensors[0].device, max(map(_nbytes, tensors)))


def _nbytes(tensor: Tensor) -> int:
    return size_hint(tensor.numel()) * tensor.element_size()


def reshard_after_forward(graph: fx.Graph) -> None:
    """In a joint graph, gather parameters again in backward, with casts and views of them, instead of saving them."""
    for start in graph.find_nodes(op="call_function", target=ALL_GATHER):
        if _sends_an_input(start):
            (wait,) = start.users
            set_policy([*with_ancestors([start]), wait, *derived(wait)], CheckpointPolicy.MUST_RECOMPUTE)


def _has_one_wait(start: fx.Node) -> bool:
    return [user.target for user in start.users] == [WAIT]


def _sends_an_input(start: fx.Node) -> bool:
    """Whether a plan may move `start` together with all that it is computed from: inputs that nothing writes to."""
    moved = set(with_ancestors([start]))
    computed = moved - {start}
    inputs = {each for node in moved for each in node.all_input_nodes} - moved
    return (
        _has_one_wait(start)
        and all(is_pure(node) and not is_product(node) and moved.issuperset(node.users) for node in computed)
        and not any(_is_mutable(user) for each in inputs for user in each.users)
    )


def _is_mutable(node: fx.Node) -> bool:
    return getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable  # type: ignore[union-attr]  # an operator


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


class PipelineOfOthers(Pipeline):
    """Also orders the collectives of graphs that somebody else has sharded."""

    def config_for(self, graph: fx.Graph) -> CompileConfig | None:
        """As for our graphs; in others, collectives are tagged, or parameters gathered again in backward."""
        config = super().config_for(graph)
        if config is not None:
            return config
        if self.stage == "joint":
            if self.config.reshard_after_forward:
                reshard_after_forward(graph)
            return None
        return self.config if tag_collectives(graph, self.config.link) else None
