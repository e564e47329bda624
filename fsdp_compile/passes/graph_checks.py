"""What is checked of graphs while passes run: settings of Inductor, what forward saves, the order that was planned."""

from itertools import zip_longest

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile.comm.collectives import STARTS
from fsdp_compile.core.ops import UNSHARD
from fsdp_compile.passes._torch import inductor_config, saved_for_backward, tree_leaves
from fsdp_compile.passes.graph import nodes
from fsdp_compile.passes.hooks import Pipeline, as_tuple
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.plan import PlanError

# Note [Collectives and CUDA graphs]
# A CUDA graph replays kernels without Python. torch captures what lies between operators tagged `cudagraph_unsafe`; its
# collectives are not, so they would be captured too. A replay would ignore what `compile_step` has prefetched, and read
# the buffer of the capture, which is another unit's memory by then. Where one of our operators divides the graph
# (accumulated gradients, deferred reduces), a reduce would start in one capture and be waited for in another, which
# CUDA refuses. And torch takes shards for inputs, which each replay would copy. So graphs with collectives on an
# accelerator are refused. Graphs without any (blocks compiled one by one, models on one rank) may be captured.


def check_settings(context: GraphContext, *_: object) -> None:
    """RuntimeError if Inductor's configuration cannot be used with our passes or with collectives.

    Looked at before the first pass, and after each: a joint graph gets its collectives from one.
    With only the joint half of the pipeline, steps would silently be slow; `check_saved` looks for the other half.
    torch 2.13 refuses to call collectives from C++, and torch 2.11 crashes. For CUDA graphs see
    Note [Collectives and CUDA graphs].
    """
    if not any(isinstance(each, Pipeline) for each in as_tuple(inductor_config.post_grad_custom_post_pass)):
        raise RuntimeError(
            "torch._inductor.config.post_grad_custom_post_pass: expected the pipeline that fully_shard registered, "
            "found another pass; register yours before fully_shard (ours runs after it)"
        )
    starts = [node for node in context.graph.nodes if node.target in STARTS]
    devices = {leaf.device.type for node in starts for leaf in tree_leaves(node.meta["val"])}
    if inductor_config.triton.cudagraphs and devices - {"cpu"}:
        raise RuntimeError(
            "torch._inductor.config.triton.cudagraphs: expected False for a graph with collectives, found True, and a "
            "CUDA graph would replay them with the buffers of an earlier step; compile with "
            'mode="max-autotune-no-cudagraphs" or without a mode, where "reduce-overhead" and "max-autotune" set it'
        )
    if inductor_config.cpp_wrapper and starts:
        raise RuntimeError(
            "torch._inductor.config.cpp_wrapper: expected False for a graph with collectives, found True, and torch's "
            "C++ wrapper cannot call them; set it to False, and leave TORCHINDUCTOR_CPP_WRAPPER unset"
        )


def check_saved(context: GraphContext) -> None:
    """Raise if the forward saves gathered parameters, or what is computed from them, of a unit that reshards (I4).

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
        while nodes.is_view_or_cast(origin) and not _is_gathered(origin):  # under autocast, a cast of a gathered buffer
            origin = origin.args[0]  # type: ignore[assignment]  # fx arguments are untyped
        is_gathered = _is_gathered(origin) and nodes.tag_of(origin).reshard
        # tagged by `reshard`; checkpoints do so too, and add a region
        was_tagged = node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE and "ac_graph_id" not in node.meta
        if is_gathered or was_tagged:
            path = nodes.tag_of(origin).path if is_gathered else nodes.module_path(node)
            raise RuntimeError(
                f"unit {path or 'root'}: {node.name}, {'a view of' if is_gathered else 'computed from'} its gathered "
                f"parameters of shape {tuple(node.meta['val'].shape)}, would be kept from forward to backward, but the "
                f"unit reshards after forward. This is a bug in the passes; until it is fixed, shard that module "
                f"with SHARD_GRAD_OP"
            )


def _is_gathered(node: fx.Node) -> bool:
    tag = nodes.get_tag(node)
    return tag is not None and tag.kind in ("gather", "wait", "view")


def check_order(context: GraphContext) -> None:
    """Raise PlanError unless the order of the graph is that of its plan."""
    info, plan = context.info, context.plan
    steps: dict[fx.Node, tuple[str, str]] = {}
    for name, gather in info.gathers.items():
        steps |= {gather.start[-1]: ("gather", name), gather.wait[0]: ("wait", name)}
    for name, reduce in info.reduces.items():
        steps |= {reduce.start[-1]: ("reduce", name), reduce.wait[0]: ("wait_reduce", name)}
    tasks = {node: index for index, nodes in enumerate(info.tasks) for node in nodes}
    at, actual = 0, []
    for node in context.graph.nodes:
        at = max(at, tasks.get(node, -1) + 1)
        if node in steps:
            actual.append((*steps[node], at))
    planned = [(step.kind, name, step.at) for step in plan.steps if step.kind != "free" for name in step.units]
    if actual != planned:
        expected, seen = next((a, b) for a, b in zip_longest(planned, actual) if a != b)
        raise PlanError(f"order of the graph: expected {expected}, found {seen}; this is a defect of the pass")
