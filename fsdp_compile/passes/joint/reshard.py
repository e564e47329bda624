"""Decide which units reshard after forward, tell the partitioner, and check that it happened."""

from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.passes._torch import size_hint
from fsdp_compile.passes.graph import nodes
from fsdp_compile.passes.graph.analyze import analyze, keep_unsharded, set_policy
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.schedule import keep_by_rule

_SMALL = 16  # a tensor that is this many times smaller than a parameter may live until backward


def choose_reshard(context: GraphContext) -> None:
    """Decide the units whose tags leave `reshard` open: what an eager step keeps stays unsharded.

    A block that is compiled alone is not the last one: if each kept its own, nothing would be free before backward.
    """
    tags = [nodes.tag_of(gather) for gather in nodes.tagged(context.graph, "gather")]
    if any(tag.reshard is None for tag in tags):
        info = analyze(context.graph, joint=True)
        step = info.workload
        is_block = len({tag.path for tag in tags}) == 1 and not any(each.of_root for each in context.specs.values())
        kept = step.must_keep if is_block else keep_by_rule(step)
        keep_unsharded(context.graph, info, tuple(step.units[unit].name for unit in sorted(kept)))


# Note [Why gathers are tagged for recomputation]
# AOTAutograd's partitioner decides what forward saves for backward. Left alone it saves a view of the gathered buffer,
# so that the full parameters of every unit live from forward to backward. A second collective in the joint graph does
# not help: the partitioner merges equal collectives. What works is the tag of activation checkpoints, `MUST_RECOMPUTE`,
# on the gather, its wait, and all views and casts of that: the partitioner copies them into backward, where they read
# the shard, which is alive anyway. The nodes must carry no `ac_graph_id`: with one, a gather inside a checkpoint region
# would be saved if a later region uses its result.
#
# The same holds for what is computed from gathered parameters: a scaled weight is as large as the weight. It is
# recomputed if that needs only gathered parameters, inputs of the graph, which live anyway, and much smaller tensors,
# such as a maximum or a scale, which the partitioner may save in its place.


def reshard(context: GraphContext) -> None:
    """Tag what backward recomputes (Note [Why gathers are tagged for recomputation]); torch saves other collectives."""
    for node in nodes.tagged(context.graph, "local", "gather", "wait", "view"):
        if nodes.tag_of(node).reshard:
            set_policy((node, *nodes.derived(node)), CheckpointPolicy.MUST_RECOMPUTE)
    set_policy(_computed_from_parameters(context.graph), CheckpointPolicy.MUST_RECOMPUTE)


def _computed_from_parameters(graph: fx.Graph) -> list[fx.Node]:
    """Find nodes as large as parameters that backward can recompute from those of units that reshard."""
    numels: dict[fx.Node, int] = {}  # of the largest parameter that a node is computed from
    for node in graph.nodes:
        value, tag, needed = node.meta.get("val"), nodes.get_tag(node), node.all_input_nodes
        if tag is not None and tag.kind == "wait" and tag.reshard:
            numels[node] = 0
        elif isinstance(value, Tensor | tuple | list) and nodes.is_pure(node) and not numels.keys().isdisjoint(needed):
            # of a view of the buffer: of a parameter
            largest = max(numels[each] for each in needed if each in numels) or _numel(node)
            is_cheap = nodes.is_pointwise(node) and _numel(node) <= largest
            at_hand = [each for each in needed if each.op == "placeholder" or _numel(each) * _SMALL <= largest]
            if all(each in numels or (is_cheap and each in at_hand) for each in needed):
                numels[node] = largest
    return [node for node, largest in numels.items() if _numel(node) * _SMALL >= largest]


def _numel(node: fx.Node) -> int:
    """Elements of a tensor; 0 of a number, which costs nothing to keep."""
    value = node.meta.get("val")
    return size_hint(value.numel()) if isinstance(value, Tensor) else 0
