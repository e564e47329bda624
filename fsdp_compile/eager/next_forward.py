"""The first all-gathers of the next step's forward, started in this step behind updates that are still to come.

    next_forward.start(unit)         as soon as the update of the unit's parameters has ended
    with next_forward.offered():     around the forward of the next step, which takes them
        ...

Between the two anything may happen to parameters: edits, evaluation, loading. A unit's version counters say whether its
values are still those that were sent.
"""

# Note [All ranks use what was prefetched, or none does]
# A rank that gathers anew waits for the others to do so. Version counters change alike on all ranks that run the same
# code, but code may edit this rank's elements alone, on some ranks. So before the forward the ranks compare what they
# know, by an all-reduce of one number for each process group, on the host. It starts when the forward is called, and is
# waited for when the forward is about to take the first buffer: Dynamo's guards and what comes before the first unit
# run beside it. It cannot start earlier, as what this rank knows may change until the forward is called. It cannot be
# left to a later time: a forward that went on without the answer would have to be undone when a rank denies, as all
# ranks' buffers are out of date then. Where tensors on the CPU cannot be sent, in a group of NCCL alone, this would
# wait for the device too: there the ranks compare in a group of gloo beside it, which `compile_step` makes.
#
# What is started is the same on all ranks without a comparison: it follows from what the last forward gathered, in
# which all of them took part.

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fsdp_compile.comm import collectives, direct
from fsdp_compile.comm.direct import PrefetchedGather
from fsdp_compile.comm.groups import host_group
from fsdp_compile.comm.hops import hops_of
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.unit import Unit, VersionCounters

_HOST = torch.device("cpu")


class _Started(NamedTuple):
    """An all-gather in flight, and what has to be unchanged when a forward takes it."""

    unit: Unit
    versions: VersionCounters
    gather: PrefetchedGather

    def is_current(self) -> bool:
        """Whether parameters are those of the start."""
        return self.unit.is_current() and self.unit.version_counters() == self.versions


class NextForward:
    """What is in flight for the next forward of `units`: what the last forward has gathered, in the same dtype.

    A forward that gathers something else, such as scaled values, has nothing started for it.

    Args:
        units: those of the model, on all ranks the same.
        first: how many of them are prefetched after a forward without a plan of its own. 0: none is after any forward.

    Attributes:
        units: in the order in which the last forward gathered them; behind them those that it did not gather.
    """

    def __init__(self, units: Sequence[Unit], first: int) -> None:
        self.units, self._first = tuple(units), first
        for unit in self.units:
            if first and unit.is_sharded:
                host_group(unit.group.find(), may_make=True)
        self._asked: list[direct.Key] = []  # what the last forward gathered, in its order
        self._gathered: dict[FlatParam, torch.dtype] = {}  # by the last forward, in which dtype
        self._started: list[_Started] = []

    def expects(self, unit: Unit) -> bool:
        """Whether the last forward gathered some of `unit` that `start` begins to gather."""
        return any(flat in self._gathered for flat in unit.flats)

    def start(self, unit: Unit) -> None:
        """Begin to gather `unit`, whose parameters have the values of the next forward, if the last one gathered it."""
        for flat in unit.flats:
            dtype = self._gathered.get(flat)
            if dtype is None or host_group(unit.group.find(), may_make=False) is None:
                continue
            if unit.is_sharded and unit.device == flat.shard.device:
                gather = PrefetchedGather(flat.shard, dtype, hops_of(flat.wire, unit.stages)[0])
                self._started.append(_Started(unit, unit.version_counters(), gather))

    def start_next_stages(self) -> None:
        """Begin with second stages, when no update is left that could run beside the first ones."""
        for each in self._started:
            each.gather.start_next_stage()

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Offer what was started to the forward in this block, if it is up to date on all ranks."""
        started, self._started = self._started, []
        by_group: dict[str, list[_Started]] = {}
        for each in started:
            if (group := host_group(each.unit.group.find(), may_make=False)) is not None:
                by_group.setdefault(group.group_name, []).append(each)
        answers: list[Callable[[], bool]] = []
        gathers: dict[PrefetchedGather, Callable[[], bool]] = {}
        for name, of_group in by_group.items():
            are_current = all(each.is_current() for each in of_group)
            answers.append(collectives.start_asking_ranks(are_current, name, _HOST))
            gathers.update((each.gather, answers[-1]) for each in of_group)
        try:
            with direct.offered(gathers) as offer:
                yield
            self._note_gathers(offer)
        finally:
            for answer in answers:
                answer()  # where the forward took nothing, it has not waited for it
            for each in started:
                each.gather.drop()

    def _note_gathers(self, offer: direct.Offer) -> None:
        """What the next forward will gather, if it is like the one that has ended."""
        self._gathered.clear()
        asked = list(offer.asked)
        if asked != self._asked:  # the units in the order in which the forward gathered the first of their shards
            self._asked = asked
            positions = {key: position for position, key in enumerate(asked)}

            def first_of(unit: Unit) -> int:
                return min((positions.get(_key_of(unit, flat), len(asked)) for flat in unit.flats), default=len(asked))

            self.units = tuple(sorted(self.units, key=first_of))
        if not self._first:
            return
        planned = offer.planned
        for unit in self.units[: self._first] if planned is None else self.units:
            if planned is not None and len(self._gathered) == len(planned):
                return
            for flat in unit.flats:
                dtype = offer.asked.get(_key_of(unit, flat))
                if dtype is not None and flat.shard.numel() and (planned is None or flat.shard.data_ptr() in planned):
                    self._gathered[flat] = dtype

    def drop(self) -> None:
        """Forget what was started, after a step that failed."""
        started, self._started = self._started, []
        for each in started:
            each.gather.drop()


def _key_of(unit: Unit, flat: FlatParam) -> direct.Key:
    """What the first all-gather of `flat`, a flat parameter of `unit`, is looked up by."""
    return direct.key_of(flat.shard, unit.stages[0].name)


@torch.library.impl("fsdp_flat::prefetch_next", "default")
def _prefetch_next(shards: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    direct.plan_next(shards)
    return torch.empty(0, device=device)
