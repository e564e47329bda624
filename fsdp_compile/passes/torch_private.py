"""Private compiler state that passes read. Checked on torch 2.11 and 2.13."""

from typing import Any

from torch import fx
from torch._functorch.aot_autograd import get_graph_being_compiled
from torch._guards import TracingContext


def saved_for_backward(graph: fx.Graph) -> list[fx.Node]:
    """The outputs of a forward graph that only its backward reads; empty for every other graph."""
    context: Any = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or not _is_forward():
        return []
    outputs = graph.output_node().args[0]
    return [out for out in outputs[metadata.num_forward_returns :] if isinstance(out, fx.Node)]  # type: ignore[index,union-attr]  # fx


def _is_forward() -> bool:
    """Graph names read `model__<id>_<joint|forward|backward|inference>_<n>`."""
    return "_forward_" in get_graph_being_compiled()
