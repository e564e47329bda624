"""Forwards that change parameters of their own unit through `.data`, as by clamping a weight in each training forward.

Module code reads a gathered copy, so such a change would be lost, and autograd does not see it. The first two forwards
of a root, of each kind, note which operators write to gathered memory; a change that changes nothing counts too. A unit
whose forward writes is looked at after each forward from then on: where all ranks made the same change, each writes its
part to its shard, and the change stays, as without sharding. Where ranks differ, all raise.

Whoever writes nothing in the first two forwards is looked at in the 4th, the 8th, the 16th and so on: one that begins
then has lost changes, and raises. What autograd counts is refused before (`UnshardedUnit.check_unwritten`).
"""

import weakref
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.comm import collectives
from fsdp_compile.core._torch import dynamo_is_active
from fsdp_compile.core.ops import inner_tensors
from fsdp_compile.core.sharding import changed_in_forward
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager._torch import OperatorMode
from fsdp_compile.eager.checks import checksum
from fsdp_compile.eager.forward_pass import ForwardPass, Listener
from fsdp_compile.eager.streams import UnshardedBuffer
from fsdp_compile.eager.unsharded import UnshardedUnit, free_for_next_forward

FORWARDS = 2
"""In which forwards of a kind a unit may begin to write."""


class _Watch(OperatorMode):
    """Notes the operators that write to the memory of open units."""

    def __init__(self) -> None:
        super().__init__()
        self.open: dict[int, UnshardedUnit] = {}  # by address of the memory
        self.written: set[UnshardedUnit] = set()

    def note(self, written: list[Tensor]) -> None:
        """An operator has written to these tensors."""
        for tensor in written:
            if type(tensor) is Tensor and tensor.layout is torch.strided:
                gathered = self.open.get(tensor.untyped_storage().data_ptr())
                if gathered is not None:
                    self.written.add(gathered)


class OwnWrites(Listener):
    """Keeps what forwards write to gathered parameters, where ranks agree."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._watched: dict[Any, int] = {}  # by kind, how many forwards have begun
        self._watch: _Watch | None = None
        self._writing: weakref.WeakSet[Unit] = weakref.WeakSet()

    def begin_forward(self, forward: ForwardPass, module: nn.Module) -> None:
        """Watch the first forwards of each kind, unless Dynamo would then not compile what is compiled below."""
        self.end_forward()
        count = self._watched[forward.kind] = self._watched.get(forward.kind, 0) + 1
        if count & (count - 1) or dynamo_is_active():
            return
        if all(each._compiled_call_impl is None for each in module.modules()):
            self._watch = _Watch()
            self._watch.__enter__()

    def in_forward(self, gathered: UnshardedUnit) -> None:
        """Watch the memory of `gathered`."""
        if self._watch is not None and gathered.reader is None:
            gathered_here = [buffer for buffer in gathered.buffers if not buffer.is_shard]
            self._watch.open.update((buffer.storage.data_ptr(), gathered) for buffer in gathered_here)

    def after_forward(self, gathered: UnshardedUnit, module: nn.Module) -> None:
        """Keep what forward has written. RuntimeError on all ranks if it is not the same on all."""
        unit = gathered.unit
        watch = self._watch
        if watch is not None and unit not in self._writing and (gathered in watch.written or _has_replaced(gathered)):
            watch.written.discard(gathered)
            self.root.running.written[unit] = _Written(gathered)
        elif unit in self._writing and gathered.reader is None:
            _Written(gathered).keep_if_equal()

    def complete_forward(self, forward: ForwardPass) -> None:
        """Let ranks compare which units have written what, and keep it. RuntimeError on all ranks if that differs."""
        if self._watch is None:
            return
        self.end_forward()
        if forward.has_communicated:  # else under NO_SHARD, perhaps on one rank alone
            self.root.forward_order.compare([f"{unit.path} writes {each}" for unit, each in forward.written.items()])
        for unit, written in forward.written.items():
            if self._watched[forward.kind] > FORWARDS:
                raise RuntimeError(
                    f"{unit.path}: forward has begun to write to parameter {' or '.join(written.names or unit.names)} "
                    f"of its own unit through .data after its first two forwards, and changes were lost since; write "
                    f"to it in these too, if only the values that it has"
                )
            if written.names and not forward.has_communicated:
                raise RuntimeError(changed_in_forward(written.names))
            self._writing.add(unit)
            written.keep()

    def end_forward(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.__exit__(None, None, None)


class _Written:
    """What the buffers of a unit hold after a forward that may have written to them."""

    def __init__(self, gathered: UnshardedUnit) -> None:
        self.unit = gathered.unit
        _restore(gathered)
        self.names = gathered.find_changed()
        buffers = [buffer for buffer in gathered.buffers if not buffer.is_shard]
        self.checksum = checksum(buffer.full for buffer in buffers)
        self.parts = [(buffer.flat, _part(buffer).clone()) for buffer in buffers] if self.names else []

    def __str__(self) -> str:
        return f"parameters with checksum {self.checksum}"

    def keep(self) -> None:
        """Write what has changed to the shards, without a version: backward gathers it again, as it was saved."""
        for flat, part in self.parts:
            shard = flat.shard.data
            before, now = shard.to(part.dtype), part.to(shard.device)
            changed = ~(now.eq(before) | (now.ne(now) & before.ne(before)))
            shard.copy_(torch.where(changed, now.to(shard.dtype), shard))
        free_for_next_forward(self.unit)  # what was gathered before is out of date

    def keep_if_equal(self) -> None:
        """As `keep`. RuntimeError on all ranks if they have written different values."""
        limits = torch.tensor([self.checksum, -self.checksum], dtype=torch.int64, device=self.unit.device)
        for group in filter(None, (self.unit.group, self.unit.replicas)):
            collectives.start_all_reduce(limits, group.group_name, "max").wait()
        if limits[0] != -limits[1]:
            raise RuntimeError(
                f"{changed_in_forward(self.names or self.unit.names)}; a change that is the same on all ranks stays, "
                f"and this one is not"
            )
        self.keep()


def _restore(gathered: UnshardedUnit) -> None:
    """Write what has replaced the data of unsharded parameters into their memory; RuntimeError if it does not fit."""
    if gathered.unit.tensor_parallel and _has_replaced(gathered):
        raise RuntimeError(changed_in_forward(gathered.unit.names))
    memory = {buffer.storage.data_ptr() for buffer in gathered.buffers}
    rest = iter(gathered.views)
    for buffer in gathered.buffers:
        of_flat = islice(rest, len(buffer.flat.params))
        for name, view, stored in zip(buffer.flat.names, of_flat, buffer.views(), strict=True):
            if not view.numel() or view.untyped_storage().data_ptr() in memory:
                continue
            if view.shape != stored.shape or view.dtype != stored.dtype:
                raise RuntimeError(changed_in_forward([name]))
            stored.data.copy_(view.detach())


def _has_replaced(gathered: UnshardedUnit) -> bool:
    """Whether the data of an unsharded parameter was replaced, instead of written to."""
    memory = {buffer.storage.data_ptr() for buffer in gathered.buffers}
    inner = (part for view in gathered.views for part in inner_tensors(view) if part.numel())
    return any(part.untyped_storage().data_ptr() not in memory for part in inner)


def _part(buffer: UnshardedBuffer) -> Tensor:
    """What this rank stores of an unsharded flat parameter, 1-D `[shard_numel]`."""
    numel = buffer.flat.layout.shard_numel
    return buffer.full.narrow(0, buffer.flat.rank * numel if buffer.is_sharded else 0, numel)
