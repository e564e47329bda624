"""Private torch functions about the autograd engine and the gradients that it keeps. Checked on torch 2.11 and 2.13."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes  # an active fake mode too

__all__ = [
    "call_after_backward",
    "carries_optimizers",
    "current_backward",
    "replace_data",
    "set_grad",
    "step_carried_optimizers",
    "without_dispatch_modes",
]


def current_backward() -> int:
    """Number of the backward pass that this thread runs; -1 outside of any."""
    return torch._C._current_graph_task_id()


def call_after_backward(callback: Callable[[], Any], if_failed: Callable[[], Any] | None = None) -> None:
    """Call `callback` when the running backward pass has ended without error, else `if_failed`."""
    last = callback if if_failed is None else _Last(callback, if_failed)
    torch.autograd.Variable._execution_engine.queue_callback(last)


class _Last:
    """What the engine calls after a backward pass; it drops it uncalled when the pass has failed."""

    def __init__(self, callback: Callable[[], Any], if_failed: Callable[[], Any]) -> None:
        self.callback = callback
        self.if_failed: Callable[[], Any] | None = if_failed

    def __call__(self) -> None:
        self.if_failed = None
        self.callback()

    def __del__(self) -> None:
        if self.if_failed is not None:
            self.if_failed()


def set_grad(param: nn.Parameter, grad: Tensor) -> Tensor:
    """Let `param.grad` share memory with `grad`, whatever its shape, dtype and device; return that tensor (E-GRAD-2).

    Autograd itself refuses a gradient that does not fit its parameter; it does not look again when data is swapped.
    """
    placeholder = torch.empty_like(param)
    param.grad = placeholder
    placeholder.data = grad
    return placeholder


def carries_optimizers(param: nn.Parameter) -> bool:
    """Whether `torch.distributed.optim._apply_optimizer_in_backward` was called for `param`."""
    return hasattr(param, "_in_backward_optimizers")


def step_carried_optimizers(params: Sequence[nn.Parameter]) -> None:
    """Step the optimizers that parameters with a gradient carry, then clear it: also what their hooks would do."""
    for param in params:
        if param.grad is not None and carries_optimizers(param):
            for optimizer in vars(param)["_in_backward_optimizers"]:
                optimizer.step()
            param.grad = None


def replace_data(param: nn.Parameter, data: Tensor) -> None:
    """Let `param` be `data`, of another shape, and forget what autograd knows of the old shape.

    The node that accumulates into `param` may be alive, in a graph or in a hook, and insists on its first shape. A
    change of dtype is what makes torch drop it.
    """
    if param.shape != data.shape:
        param.data = data.new_empty(0, dtype=torch.float16 if data.dtype != torch.float16 else torch.float32)
    param.data = data
