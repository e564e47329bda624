"""The argument `wire` of `fully_shard`: in which formats each parameter is sent, checked before anything changes."""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile.comm.formats import SENDABLE
from fsdp_compile.comm.hops import Wire, set_wire
from fsdp_compile.construct.prepare import PreparedUnit

Choice = str | Wire | None
WireArgument = Choice | Mapping[str, Choice] | Callable[[str], Choice]


def chosen_wires(wire: WireArgument, units: Iterable[PreparedUnit]) -> list[tuple[nn.Parameter, Wire | None]]:
    """The wire of each parameter of `units`.

    Args:
        wire: as `fully_shard` takes it.
        units: with their parameters, which stay as they are.

    Raises:
        TypeError: the argument or what it returns has another type.
        ValueError: a format is unknown, a parameter cannot be sent in its format, a pattern names no parameter, or the
            other options of the unit do not go with the wire.
    """
    if wire is None:  # of an earlier call they stay, as the units do that it divided
        return []
    units = list(units)
    named = [(unit, f"{unit.path}.{name}".lstrip("."), param) for unit in units for name, param in unit.params]
    choose = _choice_by_name(wire, [name for _, name, _ in named])
    found = [(unit, name, param, _checked_choice(choose(name))) for unit, name, param in named]
    for unit, name, param, chosen in found:
        if chosen is not None:
            _check_sendable(unit, name, param, chosen)
    return [(param, chosen) for _, _, param, chosen in found]


def set_wires(wires: Iterable[tuple[nn.Parameter, Wire | None]]) -> None:
    """Note the wires on the parameters, for the units that will be made of them."""
    for param, wire in wires:
        set_wire(param, wire)


def _choice_by_name(wire: WireArgument, names: list[str]) -> Callable[[str], Choice]:
    if isinstance(wire, Mapping):
        patterns = dict(wire)
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise TypeError(f"wire: expected patterns of parameter names as keys, found a {type(pattern).__name__}")
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(names[:3])
                raise ValueError(f"wire: {pattern!r} names no parameter; names are such as {some}")
        return lambda name: next((choice for pattern, choice in patterns.items() if fnmatchcase(name, pattern)), None)
    if callable(wire):
        return wire
    return lambda _: wire


def _checked_choice(choice: Any) -> Wire | None:
    if choice is None or isinstance(choice, Wire):
        return choice
    if isinstance(choice, str):
        return Wire(choice, choice)
    raise TypeError(f"wire: expected a format, a Wire or None, found a {type(choice).__name__}")


def _check_sendable(unit: PreparedUnit, name: str, param: nn.Parameter, wire: Wire) -> None:
    """Raise ValueError if `param`, called `name`, cannot be sent as `wire` says."""
    settings, precision = unit.settings, unit.settings.precision
    computed = precision.param_dtype or param.dtype
    dtypes = [param.dtype, computed, precision.reduce_dtype or computed]
    for dtype in dtypes:
        if dtype not in SENDABLE:
            known = ", ".join(str(each).removeprefix("torch.") for each in SENDABLE)
            raise ValueError(
                f"wire: parameter {name} is {str(dtype).removeprefix('torch.')}, and formats are of {known}; leave it "
                f"out: wire=lambda name: None if name == {name!r} else ..."
            )
    if settings.same_bits and (wire.reduce is not None or wire.gather != "bf16"):
        raise ValueError(
            f"wire: parameter {name}: reduction_order='tree' gives the same bits on any number of ranks, and what is "
            f"rounded by blocks or before a sum depends on it; only Wire(gather='bf16') goes with it"
        )
    placement = settings.placement
    if wire.between_nodes_only and placement.replicate is None and len(placement.stages or ()) < 2:
        raise ValueError(
            f"wire: between_nodes_only, and the unit of parameter {name} is sharded over one group; pass a 2-D mesh of "
            f"(nodes, ranks of a node), or the ranks of a node as reshard_after_forward"
        )
    if wire.error_feedback and (settings.strategy is ShardingStrategy.NO_SHARD or len(placement.stages or ()) > 1):
        raise ValueError(
            f"wire: error_feedback is of reduces over one group, and the unit of parameter {name} has none or two; "
            f"shard it with reshard_after_forward True or False"
        )
    if "fp8" in (wire.gather, wire.reduce):
        _check_device(name, unit.device)


def _check_device(name: str, device: torch.device) -> None:
    if device.type == "cuda" and torch.version.cuda is not None:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise ValueError(
                f"wire: parameter {name} is on {device}, whose compute capability "
                f"{'.'.join(map(str, capability))} has no float8_e4m3fn (8.9 and later have); use int8"
            )
