"""Manual prefetching: `FSDPModule.unshard` starts an all-gather, whose result the next eager forward uses.

Parameters may change in between, and on some ranks only: an optimizer skips parameters without a gradient. So before a
forward uses what was gathered outside of it, the ranks agree that it is up to date, by an all-reduce of one number.
Within one forward of the root no parameter may change, and nothing is asked.
"""

from collections.abc import Callable, Sequence

import torch

from fsdp_compile.comm import collectives
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.streams import Streams
from fsdp_compile.eager.unsharded import UnshardedUnit
from fsdp_compile.eager.writeback import refresh


class UnshardHandle:
    """All-gathers that `FSDPModule.unshard(async_op=True)` has started."""

    def __init__(self, gathers: Sequence[UnshardedUnit]) -> None:
        self._gathers = gathers

    def wait(self) -> None:
        """Order what follows on the current stream after the all-gathers; without streams, wait for them."""
        for gathered in self._gathers:
            gathered.wait()
        self._gathers = ()


def unshard(
    units: Sequence[Unit],
    full_precision: bool,
    iteration: object | None,
    streams_for: Callable[[torch.device], Streams],
) -> UnshardHandle:
    """Begin to gather those of `units` that are sharded. AssertionError if one is summoned.

    Args:
        units: the units to gather.
        full_precision: whether the next forward computes in the stored dtype.
        iteration: the root's forward within which this happens, or None.
        streams_for: gives the streams of a device.
    """
    for unit in units:
        unit.check_not_summoned("unshard")
    started = []
    with torch.inference_mode(False):
        for unit in units:
            if not unit.is_unsharded and unit.prefetched is None:
                streams = streams_for(unit.device)
                if iteration is None:
                    streams.begin_iteration()
                unit.prefetched = UnshardedUnit(unit, full_precision, streams, iteration)
            if unit.prefetched is not None:
                started.append(unit.prefetched)
    return UnshardHandle(started)


def reshard(unit: Unit) -> None:
    """Free all unsharded parameters of an idle unit.

    These are what `unshard` gathered, what a backward pass left unsharded, and what past forwards hold for their
    backward, which gathers again then. ValueError if a forward or backward of the unit is under way.
    """
    if unit.is_unsharded:
        raise ValueError(f"reshard: expected an idle unit, found {unit} in its forward or backward")
    free_prefetched(unit)
    free_kept(unit)
    for gathered in unit.awaiting_backward:
        if gathered.can_free:
            gathered.free()


def free_prefetched(unit: Unit) -> None:
    """Free what `unshard` gathered, if no forward has used it yet."""
    if unit.prefetched is not None:
        unit.prefetched.free()
        unit.prefetched = None


def free_kept(unit: Unit) -> None:
    """Free what a backward pass under no_sync left unsharded for the next forward."""
    if unit.kept is not None:
        unit.kept.free()
        unit.kept = None


def take_prefetched(unit: Unit, full_precision: bool, iteration: object | None) -> UnshardedUnit | None:
    """What `unshard` gathered, for a forward that begins; None if there is nothing or it is out of date on some rank.

    Args:
        unit: the unit whose forward begins.
        full_precision: whether the forward computes in the stored dtype.
        iteration: the forward of the root that is running, or None.
    """
    if unit.prefetched is None:
        return None
    gathered = unit.prefetched
    unit.prefetched = None
    refresh(unit)
    current = gathered.full_precision == full_precision and gathered.is_current()
    in_this_forward = iteration is not None and gathered.iteration is iteration
    if unit.is_sharded and not in_this_forward:
        current = collectives.holds_on_all_ranks(current, unit.group_name, unit.device)
    if current:
        return gathered
    gathered.free()
    return None
