"""Reduce-scatters that gloo runs become exchanges of slices, as in eager steps (collectives.py says why).

reduce_scatter(packed)  ->  wait                                     this rank's slice of the mean
all_to_all(packed)      ->  wait  ->  rows [ranks, part]  ->  mean   the same; in float16 the sum
"""

from dataclasses import replace

import torch
from torch import fx

from fsdp_compile.comm.collectives import ALL_TO_ALL, GROUP_ARGUMENT, REDUCE_SCATTER, WAIT, copies
from fsdp_compile.passes.graph.tags import set_tag, tag_of, tagged
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.post_grad.direct import wait_directly

aten = torch.ops.aten
_OVER_ROWS = {"avg": aten.mean.dim, "sum": aten.sum.dim_IntList}


def reduce_scatter_by_all_to_all(context: GraphContext) -> None:
    """Exchange and reduce rows in place of each of our reduce-scatters that runs in gloo."""
    graph = context.graph
    for reduce in tagged(graph, "reduce"):
        group: str = reduce.args[GROUP_ARGUMENT[reduce.target]]  # type: ignore[assignment,index]  # fx arguments are untyped
        if reduce.target is REDUCE_SCATTER and copies(reduce.meta["val"], group):
            _exchange(graph, reduce)


def _exchange(graph: fx.Graph, reduce: fx.Node) -> None:
    packed, op, ranks, group = reduce.args
    (wait,) = (user for user in reduce.users if user.target is WAIT)
    part = reduce.meta["val"].numel()
    received = reduce.meta["val"].new_empty(part * ranks)
    unit = wait.name.removeprefix("wait_reduce_")
    with graph.inserting_before(wait.next):
        rows = graph.create_node("call_function", aten.view.default, (wait, [ranks, part]), name=f"rows_{unit}")
        mean = graph.create_node("call_function", _OVER_ROWS[op], (rows, [0]), name=f"mean_{unit}")  # type: ignore[index]  # fx arguments are untyped
    wait.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not rows)
    mean.meta = dict(wait.meta)
    set_tag(mean, replace(tag_of(reduce), kind="mean"))
    rows.meta = {"val": received.view(ranks, part)}
    reduce.target, reduce.args = ALL_TO_ALL, (packed, [part] * ranks, [part] * ranks, group)  # type: ignore[operator]  # likewise
    reduce.meta["val"] = wait.meta["val"] = received
    wait_directly(reduce)
