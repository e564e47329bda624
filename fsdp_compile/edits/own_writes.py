"""Forwards that change parameters of their own unit through `.data`, as by clamping a weight in each training forward.

Module code reads a gathered copy, so such a change would be lost, and autograd does not see it. After the first two
forwards of a root, of each kind, gathered values are compared with stored ones. A unit whose forward has changed some
is looked at after each forward from then on: where all ranks made the same change, each writes its part to its shard,
and the change stays, as without sharding. Where ranks differ, all raise.

Units that have changed nothing by then are looked at after the 4th forward, the 8th, the 16th and so on: one that has
begun to has lost changes, and raises, unless its user has said that it writes. What autograd counts is refused before
(`UnshardedUnit.check_unwritten`).

A graph shows what it is going to write when it is traced (core/traced_writes.py). Then the unit's forward runs eagerly,
and the unit is looked at after each forward, whenever that begins.
"""

import weakref
from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.comm import collectives
from fsdp_compile.comm.comparison import checksums
from fsdp_compile.core.ops import inner_tensors
from fsdp_compile.core.sharding import changed_in_forward
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.forward_pass import ForwardPass, Listener
from fsdp_compile.eager.runtime import free_for_next_forward
from fsdp_compile.eager.streams import UnshardedBuffer
from fsdp_compile.eager.unsharded import UnshardedUnit

FORWARDS = 2
"""In which forwards of a kind a unit may begin to write."""

_Sums = dict[str, int]  # checksums by parameter


class OwnWrites(Listener):
    """Keeps what forwards write to gathered parameters, where ranks agree."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._begun: dict[Any, int] = {}  # by kind, how many forwards
        self._writing: weakref.WeakSet[Unit] = weakref.WeakSet()
        self._before: weakref.WeakKeyDictionary[UnshardedUnit, _Sums] = weakref.WeakKeyDictionary()

    def expect(self, units: Iterable[Unit], writes: bool) -> None:
        """Look at `units` after each forward, or no more than at others."""
        if writes:
            self._writing.update(units)
        else:
            self._writing.difference_update(units)

    def begin_forward(self, forward: ForwardPass, module: nn.Module) -> None:
        """Count the forwards of each kind."""
        self._begun[forward.kind] = self._begun.get(forward.kind, 0) + 1

    def in_forward(self, gathered: UnshardedUnit) -> None:
        """Note the values of units that are looked at."""
        count = self._begun.get(gathered.forward.kind, 0)
        if gathered.forward.of_root and not count & (count - 1):
            gathered.wait()  # which the graph of a block may do later
            self._before[gathered] = _checksums(gathered)

    def after_forward(self, gathered: UnshardedUnit, module: nn.Module) -> None:
        """Keep what forward has written. RuntimeError on all ranks if it is not the same on all."""
        unit, forward, before = gathered.unit, gathered.forward, self._before.pop(gathered, None)
        if unit in self._writing or unit.written is not None:
            written = _Written(gathered)
            if forward.has_communicated:
                written.check_equal()
            elif written.names:
                raise RuntimeError(changed_in_forward(written.names))
            written.keep()
        elif before is not None:
            _restore_replaced(gathered)
            after = _checksums(gathered)
            changed = [name for name, value in after.items() if value != before[name]]
            if changed:
                forward.written[unit] = _Written(gathered, changed)
                forward.lines += [f"{unit.path} writes to parameter {name} of its own unit through .data, whose values "
                                  f"then have checksum {after[name]}" for name in changed]  # fmt: skip

    @torch.compiler.disable
    def after_split(self, units: Iterable[Unit]) -> None:
        """Write what has replaced the data of parameters that were split from flat ones into these."""
        for unit in units:
            with torch.no_grad():
                flats, params = unit.unsharded_flats or (), unit.unsharded_params or ()
                _write_replaced(unit.names, params, unit.split_flats(flats), {f.data_ptr() for f in flats})

    def complete_forward(self, forward: ForwardPass) -> None:
        """Keep what units have written that were looked at; ranks have compared it. RuntimeError if it is too late."""
        for unit, written in forward.written.items():
            if not forward.has_communicated:  # under NO_SHARD, perhaps on one rank alone
                raise RuntimeError(changed_in_forward(written.names))
            if self._begun[forward.kind] > FORWARDS:
                raise RuntimeError(
                    f"{unit.path}: forward has begun to write to parameter {' or '.join(written.names)} "
                    f"of its own unit through .data after its first two forwards, and changes were lost since; call "
                    f"model.set_writes_own_parameters(True) before training"
                )
            self._writing.add(unit)
            written.keep()


class _Written:
    """What the buffers of a unit hold after a forward that may have written to them.

    Args:
        gathered: the unit.
        changed: the names of parameters that forward has written to; None: those that this rank stores something of.
    """

    def __init__(self, gathered: UnshardedUnit, changed: Sequence[str] | None = None) -> None:
        _restore_replaced(gathered)
        self.unit, self.checksums = gathered.unit, _checksums(gathered)
        self.names = gathered.find_changed() if changed is None else changed
        buffers = [buffer for buffer in gathered.buffers if not buffer.is_shard]
        self.parts = [(buffer.flat, _stored_part(buffer).clone()) for buffer in buffers] if self.names else []

    def check_equal(self) -> None:
        """RuntimeError on all ranks if they hold different values."""
        mine = torch.tensor([*self.checksums.values()], dtype=torch.int64, device=self.unit.device)
        limits = torch.stack([mine, -mine])
        for group in filter(None, (self.unit.group, self.unit.replicas)):
            collectives.start_all_reduce(limits, group.name, "max").wait()
        apart = (limits[0] != -limits[1]).tolist()
        if any(apart):
            names = [name for name, differs in zip(self.checksums, apart, strict=True) if differs]
            raise RuntimeError(
                f"{changed_in_forward(names)}; a change that is the same on all ranks stays, and this one is not"
            )

    def keep(self) -> None:
        """Write what has changed to the shards, without a version: backward gathers it again, as it was saved."""
        for flat, part in self.parts:
            shard = flat.shard.data
            before, now = shard.to(part.dtype), part.to(shard.device)
            changed = ~(now.eq(before) | (now.ne(now) & before.ne(before)))
            shard.copy_(torch.where(changed, now.to(shard.dtype), shard))
        free_for_next_forward(self.unit)  # what was gathered before is out of date


def _checksums(gathered: UnshardedUnit) -> _Sums:
    """Of all that was gathered, by parameter."""
    buffers = [buffer for buffer in gathered.buffers if not buffer.is_shard]
    names = list(chain.from_iterable(buffer.flat.names for buffer in buffers))
    views = list(chain.from_iterable(buffer.views() for buffer in buffers))
    return dict(zip(names, checksums([next(inner_tensors(view)) for view in views]), strict=True))


def _restore_replaced(gathered: UnshardedUnit) -> None:
    """Write what has replaced the data of unsharded parameters into their memory; RuntimeError if it does not fit."""
    if not _has_replaced(gathered):
        return
    if gathered.unit.tensor_parallel:
        raise RuntimeError(changed_in_forward(gathered.unit.names))
    memory = {buffer.storage.data_ptr() for buffer in gathered.buffers}
    stored = list(chain.from_iterable(buffer.views() for buffer in gathered.buffers))
    _write_replaced(gathered.unit.names, gathered.views, stored, memory)


def _write_replaced(
    names: Sequence[str], views: Sequence[Tensor], stored: Sequence[Tensor], memory: Container[int]
) -> None:
    """Write `views` that do not lie in `memory`, by addresses, into `stored`; RuntimeError if one does not fit."""
    for name, view, place in zip(names, views, stored, strict=True):
        if not view.numel() or view.untyped_storage().data_ptr() in memory:
            continue
        if view.shape != place.shape or view.dtype != place.dtype:
            raise RuntimeError(changed_in_forward([name]))
        place.data.copy_(view.detach())


def _has_replaced(gathered: UnshardedUnit) -> bool:
    """Whether the data of an unsharded parameter was replaced, instead of written to."""
    memory = {buffer.storage.data_ptr() for buffer in gathered.buffers}
    inner = (part for view in gathered.views for part in inner_tensors(view) if part.numel())
    return any(part.untyped_storage().data_ptr() not in memory for part in inner)


def _stored_part(buffer: UnshardedBuffer) -> Tensor:
    """What this rank stores of an unsharded flat parameter, 1-D `[shard_numel]`."""
    numel = buffer.flat.layout.shard_numel
    return buffer.full.narrow(0, buffer.flat.rank * numel if buffer.is_sharded else 0, numel)
