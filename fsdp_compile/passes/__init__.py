"""All that sees a graph: `PASSES` lists the passes in order, and `backend` compiles with passes of your own.

inductor.py    `PASSES`; Inductor's hooks for plain `torch.compile`, and `backend="fsdp_compile"`
hooks.py       the story's passes, and the pipelines that run passes in Inductor's hooks
pipeline.py    Pass, GraphContext
graph_checks.py  what is checked of graphs while passes run
printed.py     graphs as text
agreement.py   what ranks follow together: figures of links, plans
measure.py     the link between ranks, and how fast they compute
graph/         reading a graph: tags, kinds of nodes, costs, lifetimes, tasks and units
joint/         passes on forward and backward in one graph, which the partitioner then splits
post_grad/     passes on each graph alone
cost/          seconds of collectives and of computing: hardware, roofline
plan/          plans as data, without torch: rules, search, simulation, verification
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_compile.passes.graph.nodes import Tag as Tag
    from fsdp_compile.passes.graph.nodes import get_tag as get_tag
    from fsdp_compile.passes.graph.nodes import tagged as tagged
    from fsdp_compile.passes.inductor import PASSES as PASSES
    from fsdp_compile.passes.inductor import backend as backend
    from fsdp_compile.passes.pipeline import GraphContext as GraphContext
    from fsdp_compile.passes.pipeline import Pass as Pass
    from fsdp_compile.passes.plan.plan import Plan as Plan
    from fsdp_compile.passes.plan.plan import Step as Step
    from fsdp_compile.passes.printed import format_graph as format_graph

_PUBLIC = {
    "PASSES": "inductor",
    "backend": "inductor",
    "GraphContext": "pipeline",
    "Pass": "pipeline",
    "format_graph": "printed",
    "Plan": "plan.plan",
    "Step": "plan.plan",
    "Tag": "graph.nodes",
    "get_tag": "graph.nodes",
    "tagged": "graph.nodes",
}

if not TYPE_CHECKING:
    __all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)  # Inductor takes seconds to import
