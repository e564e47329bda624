"""Private torch functions that the eager runtime needs. Checked on torch 2.11 and 2.13."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as allowed_in_regions
from torch.utils._pytree import tree_leaves

from fsdp_compile.engine import call_after_backward, current_backward

__all__ = ["allowed_in_regions", "call_after_backward", "current_backward", "norms", "tree_leaves"]


def norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The vector norm of each of `tensors`, all of one dtype and device; scalars of `dtype`."""
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))
