"""Reshard after forward in a joint graph, and proof that it happened.

The partitioner decides what the forward saves. A gather that is tagged for recomputation is issued again in backward,
and nothing that is only a view of it can be saved, so that what stays is the shard, alive anyway.
"""

from collections.abc import Iterable, Iterator

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.config import CompileConfig
from fsdp_compile.core.ops import UNSHARD
from fsdp_compile.passes._torch import saved_for_backward
from fsdp_compile.passes.graph.node_kinds import derived, is_view_or_cast
from fsdp_compile.passes.graph.tags import Tag, get_tag, tagged
from fsdp_compile.passes.pipeline import GraphContext


def reshard(context: GraphContext) -> None:
    """Tag every gather: recomputed in backward if its unit reshards after forward, else saved.

    No `ac_graph_id`: with one, a gather inside a checkpoint region and used by a later one would be saved after all.
    """
    graph = context.graph
    for node in tagged(graph, "gather", "wait", "view"):
        tag = get_tag(node)
        assert tag is not None
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
        RuntimeError: naming the unit, the node and its size; or a gather was never seen by the joint passes.
    """
    graph, config = context.graph, context.config
    _check_expanded(graph, config)
    for node in saved_for_backward(graph):
        tag = _gathered_beneath(node)
        if tag is not None and tag.reshard:
            value = node.meta["val"]
            raise RuntimeError(
                f"unit {tag.path or 'root'}: {node.name}, a view of its gathered parameters of shape "
                f"{tuple(value.shape)}, would be kept from forward to backward, but the unit reshards after forward. "
                f"This is a defect of the passes; until it is mended, shard that module with SHARD_GRAD_OP"
            )


def _check_expanded(graph: fx.Graph, config: CompileConfig) -> None:
    """A marker in a post-grad graph means that somebody replaced our joint pipeline: nothing was resharded."""
    if "insert_collectives" not in config.disable and graph.find_nodes(op="call_function", target=UNSHARD):
        raise RuntimeError(
            "torch._inductor.config.joint_custom_post_pass: expected the pipeline that fully_shard registered, found "
            "another pass; register yours before fully_shard (ours runs after it)"
        )


def _gathered_beneath(node: fx.Node) -> Tag | None:
    for origin in _origins(node):
        tag = get_tag(origin)
        if tag is not None and tag.kind in ("gather", "wait"):
            return tag
    return None


def _origins(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and what it is a view or a cast of: under autocast the cast of a gathered buffer is one too."""
    while True:
        yield node
        if not is_view_or_cast(node):
            return
        node = node.args[0]  # type: ignore[assignment]  # fx arguments are untyped
