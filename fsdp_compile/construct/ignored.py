"""What `fully_shard` leaves alone: modules and parameters that the caller names, or that another API has sharded."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed.fsdp
from torch import nn

from fsdp_compile.core.environment import warn_caller
from fsdp_compile.core.sharding import sharding_of

_FOREIGN = (torch.distributed.fsdp.FSDPModule, torch.distributed.fsdp.FullyShardedDataParallel)

IsUnit = Callable[[nn.Module], bool]


@dataclass(frozen=True)
class Ignored:
    """Modules that become no units and have none inside, and parameters that are not sharded, moved or broadcast."""

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()


def collect_ignored(
    model: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    is_unit: IsUnit,
) -> Ignored:
    """All that is ignored in `model`, whole subtrees included (E-INIT-7 to 10).

    Nested units and what is below them are not ignored with the module around them; what was ignored when they were
    made stays so (E-INIT-9).

    Raises:
        TypeError: an argument is not iterable.
        ValueError: both are given, or one holds anything but modules, or anything but parameters, or a unit; or another
            sharding API has `model` itself.
    """
    if isinstance(model, _FOREIGN):
        raise ValueError(f"module: expected a module that is not sharded, found {type(model).__name__}; shard it once")
    modules, params = _given(ignored_modules, ignored_states)
    for module in modules:
        if is_unit(module):
            raise ValueError(
                f"ignored modules: expected modules that are not sharded, found the unit {type(module).__name__}; "
                f"ignore it before it is sharded"
            )
    if model in modules:
        warn_caller(f"ignored modules: found the model itself, {type(model).__name__}; all of it is ignored")
    roots = [*modules, *(module for module in model.modules() if isinstance(module, _FOREIGN))]
    inside = [module for root in roots for module in _subtree(root, is_unit)]
    owned = [param for module in inside for param in module._parameters.values() if param is not None]
    nested = [sharding for sharding in map(sharding_of, model.modules()) if sharding]
    return Ignored(
        frozenset(inside).union(*(sharding.ignored_modules for sharding in nested)),
        frozenset([*params, *owned]).union(*(sharding.ignored_params for sharding in nested)),
    )


def _given(ignored_modules: Any, ignored_states: Any) -> tuple[list[nn.Module], list[nn.Parameter]]:
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("ignored_modules and ignored_states: expected at most one, found both; use ignored_states")
    if ignored_modules is not None:
        modules = _as_list("ignored_modules", ignored_modules)
        _check_all("ignored_modules", modules, nn.Module)
        return modules, []
    states = _as_list("ignored_states", () if ignored_states is None else ignored_states)
    if any(isinstance(state, nn.Parameter) for state in states):
        _check_all("ignored_states", states, nn.Parameter)
        return [], states
    _check_all("ignored_states", states, nn.Module)
    return states, []


def _as_list(what: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise TypeError(f"{what}: expected an iterable, found {type(values).__name__}; pass a list") from None


def _check_all(what: str, values: list[Any], kind: type) -> None:
    if not all(isinstance(each, kind) for each in values):
        types = ", ".join(sorted({type(each).__name__ for each in values}))
        kinds = "modules" if what == "ignored_modules" else "modules only or parameters only"
        raise ValueError(f"{what}: expected {kinds}, found {types}; leave the others out")


def _subtree(root: nn.Module, is_unit: IsUnit) -> list[nn.Module]:
    """`root` and the modules below it, without nested units and what is below these."""
    subtree: dict[nn.Module, None] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in subtree and not is_unit(module):
            subtree[module] = None
            waiting.extend(module.children())
    return list(subtree)
