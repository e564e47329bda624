"""`HasShardedParameters`: a module, itself sharded or inside a sharded one, that owns parameters of a unit.

Its state dict has their sharded or full values, a loader may assign to them, and `.to()` and the like leave them to the
sharded module around it.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from fsdp_compile.core._torch import never_trace, set_version_counters
from fsdp_compile.core.sharding import (
    by_original_class,
    get_parameter,
    original_class,
    stored_for,
    stored_parameters,
)
from fsdp_compile.edits.writeback import refresh
from fsdp_compile.state_dict import model as model_state
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.tensor_parallel import is_dtensor


class HasShardedParameters(nn.Module):
    """Mixin: state-dict support for sharded parameters."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`, with values of the kind that `set_state_dict_type` chose.

        All ranks of the process group must call it if parameters are gathered (FULL), and get copies. SHARDED values
        share memory with the shards, as an unsharded model's values share memory with its parameters. With
        `keep_vars=True` the values are the parameters and buffers themselves, whichever kind is set.
        """
        return model_state.collect(self, super().state_dict, *args, **kwargs)

    get_parameter = get_parameter

    def __setattr__(self, name: str, value: Any) -> None:
        if is_dtensor(value) and _took_values(self, name, value):
            return
        super().__setattr__(name, value)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """As `nn.Module.register_buffer`, but where a parametrization that ends within a forward gives the unsharded
        parameter, which is no `nn.Parameter`, back: its place has the parameter again.
        """
        if stored_for(self, name, tensor) is not tensor:
            self._parameters[name] = tensor  # type: ignore[assignment]
        else:
            super().register_buffer(name, tensor, persistent)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        _refresh_own_units(self)
        own: Any = OrderedDict()
        own._metadata = getattr(destination, "_metadata", None)

        def store(module: nn.Module) -> None:
            original_class(module)._save_to_state_dict(module, own, prefix, keep_vars)

        in_forward = self._parameters is not stored_parameters(self)  # then parameters are read as they are stored
        (by_original_class(store) if in_forward else store)(self)
        if not keep_vars:
            model_state.save(self, own, prefix)
        destination.update(own)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Convert buffers and parameters that are not sharded. RuntimeError if `fn` would change a sharded one."""
        stored = stored_parameters(self)
        sharded = {name: param for name, param in stored.items() if isinstance(param, ShardedTensor)}
        for name in sharded:
            seen = getattr(self, name)  # in a forward the unsharded parameter
            plain = seen.local if isinstance(seen, ShardedTensor) else seen
            if fn(plain) is not plain:
                raise RuntimeError(
                    f"parameter {name} of {original_class(self).__name__} is part of a unit, whose parameters are "
                    f"converted together: between steps, convert the sharded module around it; within a forward, "
                    f"convert what the module computes with"
                )
        stored.update(dict.fromkeys(sharded))  # `nn.Module` does not see them
        try:
            return super()._apply(fn, recurse)
        finally:
            stored.update(sharded)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _refresh_own_units(self)

        def take(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *others: Any) -> None:
            model_state.load(self, state, prefix, metadata.get("assign_to_params_buffers", False), errors=others[-1])

        with self.register_load_state_dict_pre_hook(take):  # which runs behind the module's own hooks
            super()._load_from_state_dict(state_dict, prefix, *rest)


@never_trace
def _uncount_parametrization(module: nn.Module, name: str, tensor: Any) -> None:
    """Where `register_parametrization` stores an unsharded parameter, which is no `nn.Parameter`: it has called
    `tensor.set_(tensor)` before, which autograd is to count no more as a change of values.
    """
    if isinstance(module, ParametrizationList):
        _uncount_change(module, tensor)


@torch.compiler.disable
def _uncount_change(made: ParametrizationList, tensor: Tensor) -> None:
    may_change = not made.is_tensor or any(hasattr(each, "right_inverse") for each in made)
    if not may_change and type(tensor) is Tensor and tensor._is_view() and not tensor.is_inference():
        set_version_counters((tensor,), (tensor._version - 1,))


register_module_buffer_registration_hook(_uncount_parametrization)


def _took_values(module: nn.Module, name: str, value: Tensor) -> bool:
    """Whether `module` has a sharded parameter of that name and shape, which stays and has the values of `value`.

    Loaders put a DTensor into the place of each parameter. All ranks gather it, and each keeps what it stores.
    """
    own: Any = stored_parameters(module).get(name)
    if type(own) is not ShardedTensor or own.shape != value.shape:
        return False
    own.data = value.detach()
    vars(own).update(vars(value))
    own.requires_grad_(value.requires_grad)
    return True


def _refresh_own_units(module: Any) -> None:
    """Take over what users did to the parameters of `module`."""
    for unit in module.__dict__.get("_fsdp_units", ()):
        if unit.summoned is None:
            refresh(unit)
