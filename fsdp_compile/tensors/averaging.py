"""Gradients of parameters that are used outside of their unit's forward: the mean over ranks of what each computes.

Note [Gradients of what is computed from sharded parameters] in sharded_rules.py has why a hook does it.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.core._torch import FakeTensor, never_compile
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.tensors.sharded_tensor import ShardedTensor


def average_gradients(args: Iterable[Any]) -> None:
    """Average the plain gradients that parameters among `args` get, by a hook on each parameter.

    Raises:
        NotImplementedError: Dynamo traces this with gradients, and breaks the graph. Where collectives of its backward
            go depends on what a rank stores.
    """
    for arg in args:  # also without grad mode: the forward of a torch.autograd.Function has none
        if isinstance(arg, ShardedTensor):
            if isinstance(arg.local, FakeTensor):
                if arg.requires_grad and torch.is_grad_enabled():
                    raise NotImplementedError(
                        "a sharded parameter is used outside of its unit's forward, as from parameters(): the graph "
                        "breaks there; read module.name, which is gathered in the graph"
                    )
            elif arg.requires_grad and arg.is_leaf and "_averages" not in vars(arg):
                vars(arg)["_averages"] = arg.register_hook(partial(_average_gradient, weakref.ref(arg)))
        elif isinstance(arg, (list, tuple)):
            average_gradients(arg)


def has_hooks(param: Any) -> bool:
    """Whether users registered hooks on `param`; that of `average_gradients` does not count."""
    own = "_averages" in vars(param)
    return param._post_accumulate_grad_hooks is not None or len(param._backward_hooks or ()) > own


@never_compile
def _average_gradient(param_ref: Callable[[], Any], gradient: Tensor | None) -> Tensor | None:
    """Hook: turn a plain gradient into the mean over ranks, sharded as the parameter is."""
    if gradient is None or type(gradient) is ShardedTensor:  # None: under no_sync nothing is reduced
        return None
    if gradient.requires_grad:
        raise RuntimeError(
            "create_graph=True is not supported for a parameter that is used outside of its unit's forward: "
            "derivatives of second order are not averaged over ranks"
        )
    param: Any = param_ref()
    if not getattr(param.grad, "is_reduced", True):
        return None  # is added to what this rank has accumulated under no_sync, and reduced with it
    if type(param) is not ShardedTensor and param.is_alone:
        raise RuntimeError(
            "a backward within summon_full_params(rank0_only=True): other ranks, which store a part of the gradient, "
            "run none; compute under torch.no_grad(), or summon on all ranks"
        )
    full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    mean = param.spec.ranks.average(full)
    if type(param) is not ShardedTensor:  # within summon_full_params
        return mean.clone()
    if "_warned" not in vars(param):
        vars(param)["_warned"] = True
        warn_caller(
            f"parameter {param.spec.named()} is used outside of the forward of its unit, as where a module of the unit "
            f"runs alone: each operator gathers it anew, and its whole gradient is averaged; if that takes long, run "
            f"the sharded module, or call fully_shard on the module that runs alone"
        )
    return ShardedTensor(param.spec.local_of(mean).clone(), param.spec)
