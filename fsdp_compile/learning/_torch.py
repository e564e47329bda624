"""Private names of torch that learning uses. Checked on torch 2.13, and written for
torch 2.11, 2.13 and 2.14.

What to look for when torch moves:

enable_autograd_cache, fx_graph_cache whether graphs are found in the compiler's caches
TracingContext, tracing               what Dynamo leaves to its backends: the fake mode, and which input is a parameter
_TorchCompileInductorWrapper          what plain `torch.compile` calls with a traced graph
TorchDispatchMode                     sees what generated code calls on torch; one that a hook of autograd enters, too
GraphModule.__deepcopy__              keeps `meta` of nodes, in which inputs are described
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch import config as autograd_config
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["InductorWrapper", "Surroundings", "TorchDispatchMode", "caches_graphs", "fake_inputs"]

InductorWrapper: Any = torch._TorchCompileInductorWrapper


class Surroundings:
    """What a graph is compiled in, to compile it again later, in any thread: made where it is compiled first."""

    def __init__(self) -> None:
        context: Any = TracingContext.try_get()
        self._context = copy.copy(context)
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self) -> Iterator[Callable[[fx.GraphModule], fx.GraphModule]]:
        """Everything as it was; what copies a graph, which compiling changes."""
        with ExitStack() as stack:
            stack.enter_context(tracing(copy.copy(self._context)))
            stack.enter_context(torch.enable_grad())
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self._caches))
            yield copy.deepcopy


def caches_graphs() -> bool:
    """Whether what one process compiles is found by another one that compiles the same."""
    is_on = not inductor_config.force_disable_caches and inductor_config.fx_graph_cache
    return bool(is_on and autograd_config.enable_autograd_cache)


def fake_inputs(traced: fx.GraphModule) -> list[Any]:
    """Fake tensors like the inputs of a graph that Dynamo has traced."""
    return [node.meta["example_value"] for node in traced.graph.find_nodes(op="placeholder")]
