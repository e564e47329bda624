"""All-gathers write into a buffer that the graph allocates.

torch 2.13 runs the allocating form as a coalesced collective. Gloo's worker threads note the name of the collective
that they finished last in one string without a lock, and only the coalesced all-gather's name is too long to be kept
inside that string: two threads that finish together free its memory twice. Eager code uses the same form.
"""

import torch
from torch import fx

from fsdp_compile.collectives import ALL_GATHER, ALL_GATHER_INTO
from fsdp_compile.config import CompileConfig
from fsdp_compile.passes.tags import tagged


def gather_into(graph: fx.Graph, config: CompileConfig) -> None:
    """Give each of our gathers an `out`. After autograd only: the graph is no longer free of mutation."""
    for gather in tagged(graph, "gather"):
        if gather.target is ALL_GATHER:
            _allocate(graph, gather)


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
