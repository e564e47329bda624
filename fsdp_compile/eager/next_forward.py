"""The first all-gathers of the next step's forward, started in this step behind updates that are still to come.

    next_forward.start(unit)         as soon as the update of the unit's parameters has ended
    with next_forward.offered():     around the forward of the next step, which takes them
        ...

Between the two anything may happen to parameters: edits, evaluation, loading. A unit's version counters say whether its
values are still those that were sent.
"""

# Note [All ranks use what was prefetched, or none does]
# A rank that gathers anew waits for the others to do so. Version counters change alike on all ranks when all run the
# same code, but code may edit this rank's elements alone, on some ranks. So before the forward the ranks compare what
# they know, by an all-reduce of one number for each process group, which the host waits for. Where tensors on the CPU
# cannot be sent (a group of NCCL alone) this would wait for the device too: nothing is prefetched there.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fsdp_compile.comm import collectives, prefetched
from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.prefetched import PrefetchedGather
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.unit import Unit
from fsdp_compile.core.unit_state import VersionCounters

_HOST = torch.device("cpu")


class _Started(NamedTuple):
    """An all-gather in flight, and what has to be unchanged when a forward takes it."""

    unit: Unit
    flat: FlatParam
    group: str
    versions: VersionCounters
    gather: PrefetchedGather

    def is_current(self) -> bool:
        """Whether parameters and process group are those of the start."""
        unit = self.unit
        return self.has_group() and unit.is_current() and unit.version_counters() == self.versions

    def has_group(self) -> bool:
        """Whether the unit is still sharded over that group; if not, the group may have failed."""
        return self.unit.stages[0].name == self.group

    def drop(self) -> None:
        """Free what no forward has taken."""
        if self.has_group():
            self.gather.drop()


class NextForward:
    """What is in flight for the next forward of `units`, in the order in which it gathers them.

    Args:
        units: those that are prefetched, on all ranks the same.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        self._unused: set[FlatParam] = set()  # that a forward has gathered in another way, as its graph says
        self._started: list[_Started] = []

    def start(self, unit: Unit) -> None:
        """Begin to gather `unit`, one of `units`, whose parameters have the values of the next forward.

        That is left out where the forward gathers something else than the shard as it is stored: a cast, a shard that
        is stored elsewhere, one that is gathered in two stages.
        """
        if unit not in self.units or not unit.is_sharded or len(unit.stages) > 1:
            return
        if "cpu" not in collectives.backends(group_named(unit.group_name)):
            return
        for flat in unit.flats:
            stored = flat.shard
            if not stored.numel() or flat in self._unused:
                continue
            if unit.compute_dtype(flat) != stored.dtype or unit.device != stored.device:
                continue
            group = unit.stages[0].name
            gather = PrefetchedGather(stored, unit.group_size, group, flat.shown_unit)
            self._started.append(_Started(unit, flat, group, unit.version_counters(), gather))

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Let the forward in this block take what was started, if it is up to date on all ranks."""
        started, self._started = self._started, []
        by_group: dict[str, list[_Started]] = {}
        for each in started:
            by_group.setdefault(each.unit.group_name, []).append(each)
        usable: list[_Started] = []
        for name, of_group in by_group.items():
            if collectives.holds_on_all_ranks(all(each.is_current() for each in of_group), name, _HOST):
                usable += of_group
        try:
            with prefetched.offered([each.gather for each in usable]):
                yield
            self._unused.update(each.flat for each in usable if not each.gather.is_taken)
        finally:
            for each in started:
                each.drop()

    def drop(self) -> None:
        """Forget what was started, after a step that failed."""
        started, self._started = self._started, []
        for each in started:
            each.drop()
