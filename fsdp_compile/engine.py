"""Private torch functions about the autograd engine and the gradients that it keeps. Checked on torch 2.11 and 2.13."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def current_backward() -> int:
    """Number of the backward pass that this thread runs; -1 outside of any."""
    return torch._C._current_graph_task_id()


def call_after_backward(callback: Callable[[], Any]) -> None:
    """Call `callback` when the running backward pass has ended without error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def set_grad(param: nn.Parameter, grad: Tensor) -> Tensor:
    """Let `param.grad` share memory with `grad`, whatever its shape, dtype and device; return that tensor (E-GRAD-2).

    Autograd itself refuses a gradient that does not fit its parameter; it does not look again when data is swapped.
    """
    placeholder = torch.empty_like(param)
    param.grad = placeholder
    placeholder.data = grad
    return placeholder
