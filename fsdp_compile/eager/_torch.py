"""Private torch functions that the eager runtime needs. Checked on torch 2.11 and 2.13."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as allowed_in_regions
from torch.utils._pytree import tree_leaves

from fsdp_compile.core._torch import call_after_backward, current_backward

__all__ = [
    "allowed_in_regions",
    "call_after_backward",
    "current_backward",
    "dynamo_runs",
    "never_trace",
    "norms",
    "tree_leaves",
]

FunctionT = TypeVar("FunctionT", bound=Callable)


def never_trace(function: FunctionT) -> FunctionT:
    """Let Dynamo run calls of `function` as they are where it would compile them; it still traces what calls it.

    `torch.compiler.disable` would break the graph of a caller.
    """
    skip_code(function.__code__)
    return function


@never_trace
def dynamo_runs() -> bool:
    """Whether calls made from here are compiled by Dynamo; asked from code that is not."""
    return get_eval_frame_callback() not in (None, False)


def norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The vector norm of each of `tensors`, all of one dtype and device; scalars of `dtype`."""
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))
