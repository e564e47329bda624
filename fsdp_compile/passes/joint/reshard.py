"""Reshard after forward in a joint graph: which units do, how the partitioner is told, and a check that it happened.

choose_reshard   joint       units that leave it open (`reshard_after_forward="auto"`) are decided
reshard          joint       each gather is tagged: computed again in backward, or saved by the forward
check_saved      post_grad   the forward saves nothing that was to be freed
"""

from collections.abc import Iterable
from dataclasses import replace

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.core.ops import UNSHARD
from fsdp_compile.passes._torch import saved_for_backward
from fsdp_compile.passes.cost.profile import step_with_profile
from fsdp_compile.passes.graph.node_kinds import derived, is_view_or_cast
from fsdp_compile.passes.graph.reading import read, stretches_of
from fsdp_compile.passes.graph.tags import get_tag, set_tag, tag_of, tagged
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.search import search_plan
from fsdp_compile.passes.plan.workload import Workload
from fsdp_compile.passes.post_grad.plan_pass import costs_of


def choose_reshard(context: GraphContext) -> None:
    """Decide which units reshard after forward, of those whose tags leave it open.

    With a link, by cost: a unit is kept unsharded if its second gather would make the step longer, as far as the
    budget allows. The budget applies to forward and backward together: a unit that is kept unsharded occupies memory
    in both graphs. Without a link, the unit that backward reads first is kept unsharded: no computation could hide its
    second all-gather.

    Raises:
        PlanError: no plan fits into `config.budget`, or the profile is of another model.
    """
    graph, config = context.graph, context.config
    if all(tag_of(gather).reshard is not None for gather in tagged(graph, "gather")):
        return
    costs = costs_of(graph, config)
    reading = read(graph, costs, joint=True)
    if costs:
        step = reading.workload
        if config.profile is not None:
            step = step_with_profile(step, stretches_of(reading.tasks), config.profile)
        names = search_plan(step, config.budget).keep_unsharded
    else:
        names = _first_in_backward(reading.workload)
    unsharded = {tag_of(reading.gathers[name].start[-1]).unit for name in names}
    for node in graph.nodes:
        tag = get_tag(node)
        if tag is not None and tag.reshard is None:
            set_tag(node, replace(tag, reshard=tag.unit not in unsharded))


def _first_in_backward(workload: Workload) -> tuple[str, ...]:
    """The unit that backward reads first: it has just been read."""
    by_first_read = sorted(workload.may_keep, key=lambda unit: workload.reads_in_backward[unit])
    return tuple(workload.units[unit].name for unit in by_first_read[:1])


# Note [Why gathers are tagged for recomputation]
# AOTAutograd's partitioner decides what the forward saves for backward. Left alone it saves a view of the gathered
# buffer, so that the full parameters of every unit are alive from forward to backward. A second collective in the joint
# graph does not help: the partitioner merges equal collectives and saves the result. What works is the tag that
# activation checkpointing uses. `MUST_RECOMPUTE` on the gather, its wait, and all views and casts of that makes the
# partitioner copy them into the backward graph, where they read the shard, which is alive anyway. The nodes must carry
# no `ac_graph_id`. With one, a gather inside a checkpoint region whose result a later region uses would be saved.


def reshard(context: GraphContext) -> None:
    """Tag every gather: computed again in backward if its unit reshards after forward, else saved.

    See Note [Why gathers are tagged for recomputation].
    """
    for node in tagged(context.graph, "gather", "wait", "view"):
        tag = tag_of(node)
        if tag.reshard:
            _set_policy((node, *derived(node)), CheckpointPolicy.MUST_RECOMPUTE)
        elif tag.kind != "view":
            _set_policy((node,), CheckpointPolicy.MUST_SAVE)


def _set_policy(nodes: Iterable[fx.Node], policy: CheckpointPolicy) -> None:
    for node in nodes:
        node.meta.pop("ac_graph_id", None)
        node.meta["recompute"] = policy


def check_saved(context: GraphContext) -> None:
    """Raise if the forward saves a gathered buffer, or a view of one, that its unit frees after forward (I4).

    Raises:
        RuntimeError: naming the unit, the node and its size; or the joint passes have not seen the graph.
    """
    graph, config = context.graph, context.config
    if "insert_collectives" not in config.disable and graph.find_nodes(op="call_function", target=UNSHARD):
        raise RuntimeError(
            "torch._inductor.config.joint_custom_post_pass: expected the pipeline that fully_shard registered, found "
            "another pass; register yours before fully_shard (ours runs after it)"
        )
    for node in saved_for_backward(graph):
        origin = node
        while is_view_or_cast(origin) and not _is_gathered(origin):  # under autocast, a cast of a gathered buffer
            origin = origin.args[0]  # type: ignore[assignment]  # fx arguments are untyped
        if _is_gathered(origin) and tag_of(origin).reshard:
            raise RuntimeError(
                f"unit {tag_of(origin).path or 'root'}: {node.name}, a view of its gathered parameters of shape "
                f"{tuple(node.meta['val'].shape)}, would be kept from forward to backward, but the unit reshards after "
                f"forward. This is a defect of the passes; until it is mended, shard that module with SHARD_GRAD_OP"
            )


def _is_gathered(node: fx.Node) -> bool:
    tag = get_tag(node)
    return tag is not None and tag.kind in ("gather", "wait")
