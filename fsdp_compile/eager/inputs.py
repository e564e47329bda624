"""What a sharded module's inputs and buffers become under mixed precision."""

import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.utils._pytree import tree_map_only

FULL_PRECISION_IN_EVAL = "FSDP_COMPILE_FULL_PREC_IN_EVAL"


def computes_in_full_precision(module: Any) -> bool:
    """Whether mixed precision is left aside: in eval mode, with the switch on at `fully_shard` (E-MP-7)."""
    return module._fsdp_full_precision_in_eval and not module.training


def full_precision_in_eval() -> bool:
    """The switch `FSDP_COMPILE_FULL_PREC_IN_EVAL`: on if it is exactly "1" (E-ENV-3)."""
    return os.environ.get(FULL_PRECISION_IN_EVAL) == "1"


def cast_inputs(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Cast floating tensors among the arguments to `param_dtype`, where the settings ask for it (E-MP-13, E-MP-14)."""
    policy = module._fsdp_precision
    if policy is None or policy.param_dtype is None or computes_in_full_precision(module):
        return args, kwargs
    if not (policy.cast_forward_inputs or (policy.cast_root_forward_inputs and module._fsdp_is_root)):
        return args, kwargs

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(policy.param_dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, (args, kwargs))


def cast_buffers(modules: Iterable[nn.Module], policy: MixedPrecision | None) -> None:
    """Cast the floating buffers that `modules` own to the policy's `buffer_dtype` (E-MP-16)."""
    if policy is None or policy.buffer_dtype is None:
        return
    for owner in modules:
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                owner._buffers[name] = buffer.to(policy.buffer_dtype)
