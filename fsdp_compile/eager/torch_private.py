"""Private torch functions that the eager runtime needs. Checked on torch 2.11 and 2.13."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["call_after_backward", "current_backward", "tree_leaves"]


def current_backward() -> int:
    """Number of the backward pass that this thread runs; -1 outside of any."""
    return torch._C._current_graph_task_id()


def call_after_backward(callback: Callable[[], Any]) -> None:
    """Call `callback` when the running backward pass has ended without error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
