"""All that sees a graph: `PASSES` lists the passes in order.

inductor.py    `PASSES`; Inductor's hooks for plain `torch.compile`, and `backend="fsdp_compile"`
pipeline.py    Pass, GraphContext, and graphs as text
artifacts.py   compiled code in a folder or on the way to other ranks
graph/         reading a graph: tags, kinds of nodes, costs, lifetimes, tasks and units
joint/         passes on forward and backward in one graph, which the partitioner then splits
post_grad/     passes on each graph alone
cost/          seconds of collectives and of computing: hardware, roofline, recorded profiles
plan/          plans as data, without torch: rules, search, simulation, verification
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "PASSES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fsdp_compile.passes.inductor import PASSES  # imports Inductor, seconds that plans and costs do not need

    return PASSES
