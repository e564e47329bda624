"""All-gathers write into a buffer that the graph allocates.

torch 2.13 runs the allocating form as a coalesced collective. Gloo's worker threads note the name of the collective
that they finished last in one string without a lock, and only the coalesced all-gather's name is too long to be kept
inside that string: two threads that finish together free its memory twice. Eager code never calls that form.

Inductor keeps the input of an allocating collective alive until its wait, but not that of one with an `out`. Where the
input is computed in the graph (the shard in a lower precision, what a first stage brought), our own form of the wait
(direct.py) says so.
"""

from functools import cache
from typing import Any

import torch
from torch import fx

from fsdp_compile.comm.collectives import ALL_GATHER, ALL_GATHER_INTO
from fsdp_compile.core.ops import CAST_SHARD
from fsdp_compile.passes.graph.node_kinds import CAST
from fsdp_compile.passes.graph.tags import tagged
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.post_grad.direct import wait_directly


def all_gather_into_buffer(context: GraphContext) -> None:
    """Give each of our gathers an `out`. After autograd only: the graph is no longer free of mutation."""
    graph = context.graph
    for gather in tagged(graph, "gather"):
        if gather.target is ALL_GATHER:
            _allocate(graph, gather)
            _realize_input(gather)
            wait_directly(gather)


def _allocate(graph: fx.Graph, gather: fx.Node) -> None:
    full = gather.meta["val"]
    with graph.inserting_before(gather):
        buffer = graph.create_node(
            "call_function",
            torch.ops.aten.empty.memory_format,
            (list(full.shape),),
            {"dtype": full.dtype, "device": full.device, "pin_memory": False},
            name=f"full_{gather.name.removeprefix('gather_')}",
        )
    buffer.meta["val"] = full
    gather.target = ALL_GATHER_INTO
    gather.kwargs = {"out": buffer}


def _realize_input(gather: fx.Node) -> None:
    shard: fx.Node = gather.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    if shard.target is CAST:
        register_cast_lowering()
        shard.target = CAST_SHARD


@cache
def register_cast_lowering() -> None:
    """Teach Inductor to lower our cast; once per process, when first needed."""
    from torch._inductor.lowering import register_lowering

    register_lowering(CAST_SHARD, type_promotion_kind=None)(_lower_cast)


def _lower_cast(shard: Any, dtype: torch.dtype) -> Any:  # Inductor IR in and out; checked on torch 2.11 and 2.13
    """Inductor would compute an unrealized cast anew for each reader; the gather and its wait must mean one buffer."""
    from torch._inductor.lowering import lowerings

    low = lowerings[CAST](shard, dtype)
    low.realize()
    return low
