"""What becomes of a sharded module's inputs, and of its buffers under mixed precision."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.utils._pytree import tree_map_only


def exempt_classes(policy: MixedPrecision | None) -> tuple[type[nn.Module], ...]:
    """Classes that auto-wrapping leaves out of mixed precision (E-INIT-6); none if the settings change no dtype."""
    dtypes = (policy.param_dtype, policy.reduce_dtype, policy.buffer_dtype) if policy else ()
    return tuple(policy._module_classes_to_ignore) if policy and any(dtypes) else ()


def computes_in_full_precision(module: Any) -> bool:
    """Whether mixed precision is left aside: in eval mode, with the switch on at `fully_shard` (E-MP-7)."""
    return module._fsdp_full_precision_in_eval and not module.training


def prepare_inputs(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Cast and move the tensors among the arguments.

    Floating ones are cast to `param_dtype`, where the settings ask for it (E-MP-13, E-MP-14). At the root, all go to
    the accelerator that it computes on, if it does (E-FWD-2).
    """
    dtype = _input_dtype(module)
    device = module._fsdp_device if module._fsdp_is_root and module._fsdp_device.type != "cpu" else None
    if dtype is None and device is None:
        return args, kwargs

    def prepare(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return tree_map_only(Tensor, prepare, (args, kwargs))


def _input_dtype(module: Any) -> torch.dtype | None:
    policy = module._fsdp_precision
    if policy is None or computes_in_full_precision(module):
        return None
    own = policy.cast_forward_inputs and module._fsdp_scope
    return policy.param_dtype if own or (policy.cast_root_forward_inputs and module._fsdp_is_root) else None


def buffer_dtypes(module: nn.Module, own: Collection[nn.Module]) -> dict[str, torch.dtype]:
    """The dtypes of the floating buffers that the modules `own`, at or below `module`, have; by name in `module`."""
    return {
        f"{path}.{name}" if path else name: buffer.dtype
        for path, owner in module.named_modules()
        if owner in own
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    }


def cast_buffers(module: Any) -> None:
    """Give the module's buffers the dtype that it computes in now: `buffer_dtype`, or their own (E-MP-16, E-MP-17).

    Buffers are found by name, whatever was put in their place since (E-MP-18); one that has two names stays one.
    """
    policy = module._fsdp_precision
    if policy is None or policy.buffer_dtype is None:
        return
    full_precision = computes_in_full_precision(module)
    cast: dict[Tensor, Tensor] = {}
    for name, dtype in module._fsdp_buffer_dtypes.items():
        path, _, attribute = name.rpartition(".")
        buffers = module.get_submodule(path)._buffers
        buffer = buffers.get(attribute)
        if buffer is not None:
            buffers[attribute] = cast.setdefault(buffer, buffer.to(dtype if full_precision else policy.buffer_dtype))
