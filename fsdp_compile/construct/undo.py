"""Undo `fully_shard` of a module: its parameters are plain tensors again, the same objects, and its classes its own.

`fully_shard(block)` cannot know whether the block is a model of its own, which "auto" divides into units, or will lie
in a model that is sharded by a later call. Only that call tells, so it undoes the division and makes one unit of the
block, as FSDP2 does.
"""

from typing import Any

import torch
from torch import nn

from fsdp_compile.core._torch import swap_wrapper
from fsdp_compile.core.lookup import original_class
from fsdp_compile.core.sharded_tensor import ShardedTensor
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.core.unit_state import check_idle


def undo(module: nn.Module) -> None:
    """Give `module` and all below full parameters and their own classes; all ranks take part.

    Raises:
        ValueError: a unit is not idle, or has gradients.
    """
    units = units_gathered_below(module)
    check_idle(units, "fully_shard")
    for unit in units:
        for name, param in zip(unit.names, unit.params, strict=True):
            if param.grad is not None:
                raise ValueError(
                    f"parameter {name}: expected no gradient before the module around it is sharded, found one; call "
                    f"zero_grad() first"
                )
    for unit in units:
        full = [_full(param) for param in unit.params]
        for flat in unit.flats:
            flat.release()
        for param, values in zip(unit.params, full, strict=True):
            _become_plain(param, values)
    for each in module.modules():
        _restore_class(each)


def _full(param: nn.Parameter) -> nn.Parameter:
    """A parameter of its own memory with all elements of `param`, or of the local tensor where it was a DTensor."""
    if not isinstance(param, ShardedTensor):
        return nn.Parameter(param.detach().clone(), param.requires_grad)
    shape = param.spec.split_shape
    values = (
        torch.empty(shape, dtype=param.dtype, device="meta") if param.is_meta else param.spec.gather_split(param.local)
    )
    return nn.Parameter(values, param.requires_grad)


def _become_plain(param: nn.Parameter, values: nn.Parameter) -> None:
    swap_wrapper(param, values)
    for name in ("_fsdp_unit", "local", "spec", "_is_param"):
        vars(param).pop(name, None)


def _restore_class(module: Any) -> None:
    module.__class__ = original_class(module)
    for name in ("_fsdp", "_fsdp_units", "_fsdp_runtime"):
        vars(module).pop(name, None)
    gathering = module._compiled_call_impl
    if gathering is not None and hasattr(gathering, "args"):  # what gathers around a compiled forward (fsdp_module.py)
        module._compiled_call_impl = gathering.args[1]
