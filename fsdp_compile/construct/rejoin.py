"""From units to plain parameters again: what an earlier call divided becomes one unit."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp_compile.construct.blocks import Ignored
from fsdp_compile.construct.prepare import prepare_units
from fsdp_compile.construct.units import ATTRIBUTES, make_unit
from fsdp_compile.core._torch import swap_wrapper
from fsdp_compile.core.inner_params import put_back
from fsdp_compile.core.sharding import original_class, sharding_of, units_gathered_below
from fsdp_compile.core.unit import check_idle


def join_divided(model: nn.Module, mixin: type) -> None:
    """Make one unit of each module below that an earlier call divided by "auto"; all ranks take part.

    `fully_shard(block)` cannot know whether the block is a model of its own, which "auto" divides into units, or will
    lie in a model that is sharded later. That later call undoes the division and makes one unit, as FSDP2 does. Raises
    ValueError, before anything is changed, if a unit is not idle or has gradients.
    """
    sharded: list[Any] = list(filter(sharding_of, model.modules()))
    divided = [each for each in sharded if each._fsdp.is_root and each._fsdp_runtime.is_divided]
    for module in divided:
        units = units_gathered_below(module)
        check_idle(units, "fully_shard")
        for unit in units:
            for name, param in zip(unit.names, unit.params, strict=True):
                if param.grad is not None:
                    raise ValueError(f"parameter {name} has a gradient; call zero_grad() before fully_shard is called "
                                     "on the module around it")  # fmt: skip
    for module in divided:
        settings = module._fsdp_runtime.settings
        ignored = Ignored(module._fsdp.ignored_modules, module._fsdp.ignored_params)
        _unshard_below(module)
        settings = replace(settings, param_init_fn=None, sync_module_states=False, shard_placement_fn=None)
        for prepared in prepare_units(module, {module: settings}, ignored):
            make_unit(module, prepared, ignored, mixin)


def _unshard_below(module: nn.Module) -> None:
    """Give `module` and all below full parameters and their own classes."""
    for unit in units_gathered_below(module):
        full = [_full_parameter(param) for param in unit.params]
        for flat in unit.flats:
            flat.release()
        for param, values in zip(unit.params, full, strict=True):
            swap_wrapper(param, values)
            for name in ATTRIBUTES:
                vars(param).pop(name, None)
    for each in module.modules():
        each.__class__ = original_class(each)
        for name in ("_fsdp", "_fsdp_units", "_fsdp_runtime"):
            vars(each).pop(name, None)
        gathering: Any = each._compiled_call_impl
        if gathering is not None and hasattr(gathering, "args"):  # made by gather_around_compiled (fsdp_module.py)
            each._compiled_call_impl = gathering.args[1]
    put_back(module)


def _full_parameter(param: nn.Parameter) -> nn.Parameter:
    """A parameter of its own memory with all elements of `param`, or of the local tensor where it was a DTensor."""
    spec = param.spec  # type: ignore[attr-defined]  # of a unit
    values = (
        torch.empty(spec.split_shape, dtype=param.dtype, device="meta")
        if param.is_meta
        else spec.gather_split(param.local)  # type: ignore[attr-defined]  # of a unit
    )
    return nn.Parameter(values, param.requires_grad)
