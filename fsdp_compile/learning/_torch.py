"""Private names of torch that learning uses. Checked on torch 2.13, and written for
torch 2.11, 2.13 and 2.14.

What to look for when torch moves:

enable_autograd_cache, fx_graph_cache whether graphs are found in the compiler's caches
TracingContext, tracing               what Dynamo leaves to its backends: the fake mode, and which input is a parameter
_TorchCompileInductorWrapper          what plain `torch.compile` calls with a traced graph
TorchDispatchMode                     sees what generated code calls on torch; one that a hook of autograd enters, too
GraphModule.__deepcopy__              keeps `meta` of nodes, in which inputs are described
_param_name_to_source, _dynamo_source what Dynamo writes on a graph and its inputs, and copies lack: without it
                                      AOTAutograd takes parameters for inputs that lie elsewhere at each call
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch import config as autograd_config
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["InductorWrapper", "Surroundings", "TorchDispatchMode", "caches_graphs", "copied", "fake_inputs"]

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
    def restored(self) -> Iterator[None]:
        """Everything as it was."""
        with ExitStack() as stack:
            stack.enter_context(tracing(copy.copy(self._context)))
            stack.enter_context(torch.enable_grad())
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self._caches))
            yield


_KEPT = ("_param_name_to_source",)  # which Dynamo sets on its graphs, and a copy lacks


def copied(traced: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that Dynamo has traced; compiling changes a graph."""
    found = copy.deepcopy(traced)
    vars(found).update((name, vars(traced)[name]) for name in _KEPT if name in vars(traced))
    for one, other in zip(*(each.graph.find_nodes(op="placeholder") for each in (traced, found)), strict=True):
        if hasattr(one, "_dynamo_source"):
            other._dynamo_source = one._dynamo_source
    return found


def caches_graphs() -> bool:
    """Whether what one process compiles is found by another one that compiles the same."""
    is_on = not inductor_config.force_disable_caches and inductor_config.fx_graph_cache
    return bool(is_on and autograd_config.enable_autograd_cache)


def fake_inputs(traced: fx.GraphModule) -> list[Any]:
    """Fake tensors like the inputs of a graph that Dynamo has traced."""
    return [node.meta["example_value"] for node in traced.graph.find_nodes(op="placeholder")]
