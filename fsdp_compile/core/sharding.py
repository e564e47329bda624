"""What a sharded module knows about itself, and walks over a tree of modules.

    module._fsdp          ModuleSharding: a module that `fully_shard` was called on or that it chose as a unit
    module._fsdp_units    the units that hold the parameters which a module owns itself; generated look-up code reads it

Both lie in `module.__dict__`. What changes while a step runs lies in the units and in the runtime of the root.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_compile.core.unit import Unit


@dataclass(eq=False)  # not frozen: Dynamo reads every field of a frozen dataclass, and would guard on each of them
class ModuleSharding:
    """How one module is sharded. `fully_shard` writes it; a call around the module may change it.

    Attributes:
        strategy: the sharding strategy of the module's unit.
        device: where the module computes.
        precision: its mixed precision, or None.
        output_dtype: the dtype that floating outputs are cast to, or None.
        buffer_dtypes: the dtypes that its floating buffers had, by their names in the module.
        full_precision_in_eval: whether the module computes without mixed precision in eval mode.
        limit_all_gathers: the argument of `fully_shard`.
        units: the units that are gathered around the module's forward: its own one, unless that has no data or an
            enclosing module gathers it, and those that modules below share.
        shared_units: those of `units` that modules of one list share; of a root all such units below.
        traced_units: the units that a compiled forward of the module gathers: `units`, and of a root all shared ones.
            The passes place their all-gathers where they are needed.
        units_below: `units`, and those of all sharded modules below.
        is_root: whether no sharded module is around this one.
        is_called: whether a call of the module runs that gathered around its hooks. Changes while steps run.
        ignored_modules: the modules that the call of `fully_shard` on this module left alone.
        ignored_params: likewise the parameters.
    """

    strategy: ShardingStrategy
    device: torch.device
    precision: MixedPrecision | None
    output_dtype: torch.dtype | None
    buffer_dtypes: dict[str, torch.dtype]
    full_precision_in_eval: bool
    limit_all_gathers: bool
    units: tuple[Unit, ...] = ()
    shared_units: frozenset[Unit] = frozenset()
    traced_units: tuple[Unit, ...] = ()
    units_below: tuple[Unit, ...] = ()
    is_root: bool = True
    is_called: bool = False
    ignored_modules: frozenset[nn.Module] = frozenset()
    ignored_params: frozenset[nn.Parameter] = frozenset()


def sharding_of(module: nn.Module) -> ModuleSharding | None:
    """How `module` is sharded; None if it is no sharded module itself."""
    return module.__dict__.get("_fsdp")


def units_gathered_below(module: nn.Module) -> list[Unit]:
    """The units that `module` and all modules below gather, each once, in the order of `module.modules()`."""
    shardings: Iterable[Any] = filter(None, map(sharding_of, module.modules()))
    return list(dict.fromkeys(unit for sharding in shardings for unit in sharding.units))


def units_used_below(module: nn.Module) -> list[Unit]:
    """The units with a parameter in `module` or below, each once, in the order of `module.modules()`."""
    return _units_of(module.modules())


def own_units(module: nn.Module) -> list[Unit]:
    """The units with a parameter in `module` or below, but not only below another sharded module (E-MOD-1)."""
    return _units_of(own_modules(module))


def own_modules(module: nn.Module) -> list[nn.Module]:
    """`module` and all below it, except other sharded modules and what is below these."""
    owned = [module]
    for child in module.children():
        if sharding_of(child) is None:
            owned += own_modules(child)
    return owned


def _units_of(modules: Iterable[nn.Module]) -> list[Unit]:
    units: dict[Unit, None] = {}
    for module in modules:
        sharding = sharding_of(module)
        units |= dict.fromkeys(sharding.units if sharding else ())
        units |= dict.fromkeys(module.__dict__.get("_fsdp_units", ()))
    return list(units)
