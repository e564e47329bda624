"""All-gathers write into a buffer that the graph allocates.

torch 2.13 runs the allocating form as a coalesced collective. Gloo's worker threads note the name of the collective
that they finished last in one string without a lock, and only the coalesced all-gather's name is too long to be kept
inside that string: two threads that finish together free its memory twice. Eager code never calls that form.

Inductor keeps the input of an allocating collective alive until its wait, but not that of one with an `out`. Where the
input is computed in the graph (the shard in a lower precision, what a first stage brought), our own form of the wait
says so.
"""

from functools import cache
from typing import Any

import torch
from torch import fx

from fsdp_compile.collectives import ALL_GATHER, ALL_GATHER_INTO, WAIT
from fsdp_compile.config import CompileConfig
from fsdp_compile.ops import CAST_SHARD, WAIT_GATHER
from fsdp_compile.passes.tags import tagged
from fsdp_compile.passes.views import CAST


def gather_into(graph: fx.Graph, config: CompileConfig) -> None:
    """Give each of our gathers an `out`. After autograd only: the graph is no longer free of mutation."""
    for gather in tagged(graph, "gather"):
        if gather.target is ALL_GATHER:
            _allocate(graph, gather)
            _keep_input(gather)


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


def _keep_input(gather: fx.Node) -> None:
    shard: fx.Node = gather.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    if shard.op == "placeholder":
        return
    register_lowerings()
    if shard.target is CAST:
        shard.target = CAST_SHARD
    for wait in [user for user in gather.users if user.target is WAIT]:
        wait.target, wait.args = WAIT_GATHER, (gather, shard)


@cache
def register_lowerings() -> None:
    """Teach Inductor to lower our cast and wait; once per process, when first needed."""
    from torch._inductor.lowering import register_lowering

    register_lowering(CAST_SHARD, type_promotion_kind=None)(_lower_cast)
    register_lowering(WAIT_GATHER, type_promotion_kind=None)(_lower_wait)


def _lower_cast(shard: Any, dtype: torch.dtype) -> Any:  # Inductor IR in and out; checked on torch 2.11 and 2.13
    """Inductor would compute an unrealized cast anew for each reader; the gather and its wait must mean one buffer."""
    from torch._inductor.lowering import lowerings

    low = lowerings[CAST](shard, dtype)
    low.realize()
    return low


def _lower_wait(full: Any, shard: Any) -> Any:
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    before = len(V.graph.operations)
    filled = lowerings[WAIT](full)
    for operation in V.graph.operations[before:]:
        V.graph.additional_star_deps[operation.get_operation_name()].add(shard.get_name())
    return filled
