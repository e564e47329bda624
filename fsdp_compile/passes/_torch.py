"""Private compiler state that passes read. Checked on torch 2.11 and 2.13."""

import re
from typing import Any

import sympy
from torch import fx
from torch._functorch.aot_autograd import get_graph_being_compiled
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort

__all__ = ["CustomGraphPass", "inductor_config"]


def saved_for_backward(graph: fx.Graph) -> list[fx.Node]:
    """The outputs of a forward graph that only its backward reads; empty for every other graph."""
    context: Any = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or direction() != "forward":
        return []
    outputs = graph.output_node().args[0]
    return [out for out in outputs[metadata.num_forward_returns :] if isinstance(out, fx.Node)]  # type: ignore[index,union-attr]  # fx


def sort(graph: fx.Graph) -> None:
    """Put each node behind those that it reads: Inductor's patterns leave some before, for a later pass to sort."""
    stable_topological_sort(graph)


def direction() -> str:
    """What is being compiled: "joint", "forward", "backward" or "inference"."""
    name = get_graph_being_compiled()  # model__<id>_<joint|forward|backward|inference>_<n>
    return next((word for word in ("joint", "forward", "backward") if f"_{word}_" in name), "inference")


def graph_number() -> int:
    """The number of the graph that is being compiled; its joint graph, forward and backward have the same."""
    found = re.search(r"__(\d+)_", get_graph_being_compiled())
    return int(found[1]) if found else 0


def is_caller_owned(placeholder: fx.Node) -> bool:
    """Whether an input of a graph is one of the model's too: in backward AOTAutograd names all others otherwise."""
    return direction() != "backward" or placeholder.name.startswith("primals_")


def is_tangent(node: fx.Node) -> bool:
    """Whether an input of a joint graph is the gradient of an output: what backward begins with."""
    return node.op == "placeholder" and node.name.startswith("tangents_")  # as AOTAutograd names them


def size_hint(size: Any) -> int:
    """The number that a size has, or had when it was traced."""
    return size if isinstance(size, int) else int(hint_of(size.node.expr))


def hint_of(expression: sympy.Expr) -> sympy.Expr:
    """`expression` with the sizes put in that its symbols had when they were traced."""
    context = TracingContext.try_get()
    shapes: Any = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
    return expression.xreplace({symbol: shapes.backed_var_to_val[symbol] for symbol in expression.free_symbols})
