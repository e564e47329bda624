"""Memory of unsharded parameters: filled by an all-gather, read, freed, and filled again.

UnshardedBuffer    of one flat parameter
KeptUnsharded      buffers that a backward pass has left for the unit's next forward
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_compile.comm import collectives
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.ops import NamedGroup, alias, view_parameters
from fsdp_compile.core.unit import Unit
from fsdp_compile.core.unit_state import VersionCounters


class UnshardedBuffer:
    """A flat parameter, unsharded, `[layout.numel]`, in the dtype and on the device that its unit computes in.

    Where the shard is that already (NO_SHARD in the parameters' own dtype) it is the shard's memory, never freed.
    Where the all-gather goes through two groups, `slice` is what the first has gathered: the next fill starts there.
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
        self.slice: Tensor | None = None
        self.filling = False

    @property
    def is_free(self) -> bool:
        """Whether the memory was freed."""
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
            self._start_all_gather()
        self.filling = True

    def _shard(self) -> Tensor:
        return self.flat.shard.to(device=self.full.device, dtype=self.full.dtype, non_blocking=True)

    def _start_all_gather(self) -> None:
        def start(full: Tensor, shard: Tensor, group: NamedGroup) -> None:
            collectives.start_all_gather(full, shard, group.size, group.name, self.flat.unit_path)

        *first, last = self.unit.stages
        if first and self.slice is None:
            self.slice = self.full.new_empty(self.full.numel() // last.size)
            start(self.slice, self._shard(), first[0])
            collectives.wait(self.slice)
        start(self.full, self._shard() if self.slice is None else self.slice, last)

    def finish(self) -> None:
        """Order the current stream after the fill."""
        collectives.wait(self.full)
        self.filling = False

    def views(self) -> list[Tensor]:
        """The unsharded parameters (Note [Freeing buffers that autograd has saved])."""
        return view_parameters(alias(self.full), self.flat.layout.text)

    def free(self) -> None:
        """Free the memory, which is not being filled."""
        if not self.is_shard:
            self.storage.resize_(0)


class KeptUnsharded(NamedTuple):
    """Filled buffers that a backward pass under no_sync left for the unit's next forward (E-ACC-5)."""

    buffers: list[UnshardedBuffer]
    versions: VersionCounters
    full_precision: bool

    def free(self) -> None:
        """Free the buffers."""
        for buffer in self.buffers:
            buffer.free()
