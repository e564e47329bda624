"""What a unit is doing, and the errors of calls that come at a wrong time.

idle        between steps; also between a forward and its backward
open        a forward or backward under way reads the full views
summoned    full parameters stand in the place of the sharded ones (summon.py)
"""

from collections.abc import Iterable

from fsdp_compile.core.unit import Unit
from fsdp_compile.eager._torch import current_backward


def is_open(unit: Unit) -> bool:
    """Whether the unit's views are good to use: set by a forward under way, or by the backward pass now running.

    Views left behind by a backward pass that failed belong to none of these, and are gathered anew.
    """
    found = unit.unsharded_params is not None or unit.unsharded_flats is not None
    return found and unit.views_backward in (-1, current_backward())


def doing(unit: Unit) -> str:
    """What the unit is doing, for messages."""
    if unit.summoned is not None:
        return f"inside {unit.summoned.by}"
    return "in its forward or backward" if is_open(unit) else "idle"


def check_idle(units: Iterable[Unit], what: str, error: type[Exception] = ValueError) -> None:
    """Raise `error` if a unit is open or summoned, or a backward pass is running (E-STATE-3, E-STATE-4)."""
    for unit in units:
        if unit.summoned is not None or is_open(unit):
            raise error(f"{what}: expected idle units, found {unit} {doing(unit)}; call {what} between steps")
    if current_backward() != -1:
        raise error(f"{what}: expected to be called between steps, found a backward pass under way")


def check_no_forward_runs(unit: Unit) -> None:
    """Raise ValueError if a forward of the unit is under way, whose views a backward would close (E-BWD-3)."""
    if is_open(unit) and unit.views_backward == -1:
        raise ValueError(
            f"backward: expected {unit} to be idle, found it in a forward, within which an earlier forward of it was "
            f"run backward; end the forward first"
        )


def check_not_summoned(unit: Unit, what: str) -> None:
    """Raise AssertionError if the unit's parameters are summoned: `what` cannot run then (E-FWD-12)."""
    if unit.summoned is not None:
        raise AssertionError(f"{what}: expected sharded parameters, found {unit} {doing(unit)}; leave that first")
