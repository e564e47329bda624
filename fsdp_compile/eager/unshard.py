"""Gathering ahead by hand: `FSDPModule.unshard` starts it, the next eager forward takes what it gathered.

Parameters may change in between, and on some ranks only: an optimizer skips what has no gradient. So a forward asks all
ranks, by an all-reduce of one number, before it reads what was gathered outside of forward; within one forward of the
root nothing may change and nothing is asked.
"""

from collections.abc import Callable, Sequence

import torch

from fsdp_compile.core.unit import Unit, check_not_summoned, is_open
from fsdp_compile.eager.streams import Streams
from fsdp_compile.eager.unsharded import UnshardedUnit, holds_on_all_ranks
from fsdp_compile.eager.writeback import refresh


class UnshardHandle:
    """A gather that `FSDPModule.unshard(async_op=True)` has started."""

    def __init__(self, gathers: Sequence[UnshardedUnit]) -> None:
        self._gathers = gathers

    def wait(self) -> None:
        """Order what follows on this stream after the gather; without a stream, wait for it."""
        for gathered in self._gathers:
            gathered.wait()
        self._gathers = ()


def unshard(
    units: Sequence[Unit],
    full_precision: bool,
    iteration: object | None,
    streams_for: Callable[[torch.device], Streams],
) -> UnshardHandle:
    """Begin to gather those of `units` that are not gathered. AssertionError if one is summoned.

    Args:
        units: what to gather.
        full_precision: whether the next forward computes in the stored dtype.
        iteration: the root's forward within which this happens, or None.
        streams_for: the streams of a device.
    """
    for unit in units:
        check_not_summoned(unit, "unshard")
    with torch.inference_mode(False):
        for unit in units:
            if not is_open(unit) and unit.unsharded is None:
                streams = streams_for(unit.device)
                if iteration is None:
                    streams.begin_iteration()
                unit.unsharded = UnshardedUnit(unit, full_precision, streams)
                unit.unsharded.iteration = iteration
    return UnshardHandle([unit.unsharded for unit in units if unit.unsharded is not None])


def reshard(unit: Unit) -> None:
    """Free what `unshard` gathered, what past forwards kept for their backward, which will gather again, and what
    backward kept for the next forward.

    ValueError if a forward or backward of the unit is under way.
    """
    if is_open(unit):
        raise ValueError(f"reshard: expected an idle unit, found {unit} in its forward or backward")
    discard_unsharded(unit)
    drop_kept_unsharded(unit)
    for gathered in unit.awaiting_backward:
        if gathered.may_free:
            gathered.free()


def drop_kept_unsharded(unit: Unit) -> None:
    """Free what a backward pass under no_sync left to the next forward."""
    if unit.kept_unsharded is not None:
        for buffer in unit.kept_unsharded.buffers:
            buffer.free()
        unit.kept_unsharded = None


def discard_unsharded(unit: Unit) -> None:
    """Free what `unshard` gathered, if no forward has taken it."""
    if unit.unsharded is not None:
        unit.unsharded.free()
        unit.unsharded = None


def take_unsharded(unit: Unit, full_precision: bool, same_forward: bool) -> UnshardedUnit | None:
    """What `unshard` gathered, for a forward that begins; None if there is nothing or it is out of date on some rank.

    Args:
        full_precision: whether the forward computes in the stored dtype.
        same_forward: whether `unshard` was called within the forward of the root that is running.
    """
    gathered: UnshardedUnit | None = unit.unsharded
    if gathered is None:
        return None
    unit.unsharded = None
    refresh(unit)
    current = gathered.full_precision == full_precision and gathered.is_current()
    if current if same_forward else holds_on_all_ranks(unit, current):
        return gathered
    gathered.free()
    return None
