"""The memory of one flat parameter in full: filled, read, given back, filled again."""

from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_compile.comm import collectives
from fsdp_compile.comm.stages import Stage
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.ops import alias, view_parameters
from fsdp_compile.core.unit import Unit, VersionCounters


class UnshardedBuffer:
    """A flat parameter in full, `[layout.numel]`, in the dtype and on the device that its unit computes in.

    Where the shard is that already (NO_SHARD in the parameters' own dtype) it is the shard's memory, never freed.
    Freeing resizes the storage to zero bytes: views stay valid objects and may be read again after the next fill.
    Where gathers go through two stages, `part` is what the first has brought: the next fill begins there.
    Memory belongs to the stream that is current in `start`, here and in the allocator.
    """

    def __init__(self, unit: Unit, flat: FlatParam, dtype: torch.dtype) -> None:
        self.unit, self.flat = unit, flat
        self.is_shard = not unit.is_sharded and dtype == flat.shard.dtype and unit.device == flat.shard.device
        self.full = (
            alias(flat.shard) if self.is_shard else torch.empty(flat.layout.numel, dtype=dtype, device=unit.device)
        )
        self.storage = self.full.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.part: Tensor | None = None
        self.filling = False

    @property
    def is_free(self) -> bool:
        """Whether the memory was given back."""
        return self.storage.nbytes() == 0 < self.nbytes

    def start(self) -> None:
        """Begin to fill it from the shards."""
        if self.is_shard:
            return
        if self.is_free:
            self.storage.resize_(self.nbytes)
        if not self.unit.is_sharded:
            self.full.copy_(self._shard())
        elif not self.unit.switches.fake_all_gather:
            self._gather()
        self.filling = True

    def _shard(self) -> Tensor:
        return self.flat.shard.to(device=self.full.device, dtype=self.full.dtype, non_blocking=True)

    def _gather(self) -> None:
        *peers, last = self.unit.stages
        if peers and self.part is None:
            self.part = self.full.new_empty(self.full.numel() // last.size)
            _start(self.part, self._shard(), peers[0])
            collectives.wait(self.part)
        _start(self.full, self._shard() if self.part is None else self.part, last)

    def finish(self) -> None:
        """Order the current stream after the fill."""
        collectives.wait(self.full)
        self.filling = False

    def views(self) -> list[Tensor]:
        """The parameters' full views. Their version counter is not this buffer's: filling it again is no change."""
        return view_parameters(alias(self.full), self.flat.layout.text)

    def free(self) -> None:
        """Give the memory back; it is not being filled."""
        if not self.is_shard:
            self.storage.resize_(0)


def _start(full: Tensor, shard: Tensor, stage: Stage) -> None:
    collectives.start_all_gather(full, shard, stage.size, stage.name, stage.rank)


class KeptUnsharded(NamedTuple):
    """Filled buffers that a backward pass which synchronised nothing left to the unit's next forward."""

    buffers: list[UnshardedBuffer]
    versions: VersionCounters
    full_precision: bool
