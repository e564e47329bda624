"""Streams and events behind one interface, so that the same code runs, and is tested, without an accelerator; and the
memory of unsharded parameters, which is filled in one stream and read in another.

compute         the stream that is current where module code runs
unshard         casts of shards, memory of unsharded parameters, all-gathers
post-backward   reduces and what follows them, also all-reduces over replicas: so these need no third stream, and
                all-gathers need no higher priority (E-STREAM-2)
"""

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from fsdp_compile.comm import collectives, hops
from fsdp_compile.core._torch import set_version_counters
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.ops import alias
from fsdp_compile.core.unit import Unit, VersionCounters

# Note [Streams]
# Collectives have a stream of their own in NCCL: they start after what the current stream has queued, and `wait_tensor`
# lets the current stream wait for them. So they are started and waited for in a side stream, and compute is ordered
# after them by one wait of a stream for a stream. Memory is allocated in the stream that first writes it; where another
# stream reads it, `record_stream` makes the allocator wait for that stream before the memory is used again. The host
# runs ahead of the device: it frees unsharded parameters long before the device has read them, and the next all-gather
# would take new memory each time. So it waits before it gathers while `GATHERS_IN_FLIGHT` freed units may still be read
# (E-RATE-1).

_CURRENT: AbstractContextManager[Any] = collectives.NO_RANGE
GATHERS_IN_FLIGHT = 2
WHILE_FREED = 1_000_000_000  # what version counters of unsharded parameters have in addition (docs/debugging.md)


class Device:
    """Streams and events of a device, by its torch module such as `torch.cuda`; the CPU's are None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)

    @property
    def has_streams(self) -> bool:
        """Whether a wait holds back a stream, and not the host."""
        return self.module is not None

    def new_stream(self) -> Any:
        """A stream beside the current one."""
        return self.module.Stream(device=self.device) if self.module else None

    def current_stream(self) -> Any:
        """The stream that work is queued to now."""
        return self.module.current_stream(self.device) if self.module else None

    def run_in(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue the work of the block to `stream`."""
        return self.module.stream(stream) if self.module else _CURRENT

    def order(self, first: Any, then: Any) -> None:
        """Work queued to `then` from now on waits for what is queued to `first` already."""
        if self.module:
            then.wait_stream(first)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Do not reuse the memory of `tensor` before `stream` has done what it has queued when it is freed."""
        if self.module:
            tensor.record_stream(stream)

    def record(self, stream: Any) -> Any:
        """An event behind what is queued to `stream`; None if nothing is ever queued."""
        return stream.record_event() if self.module else None

    def await_event(self, event: Any, stream: Any) -> None:
        """Work queued to `stream` from now on waits for `event`."""
        if self.module:
            stream.wait_event(event)

    def block(self, event: Any) -> None:
        """Let the host wait for `event`."""
        if self.module:
            event.synchronize()


class Streams:
    """The streams of one root on one device, and how they are ordered (Note [Streams], E-STREAM-1, E-STREAM-3).

    With `limit_gathers` the host waits before a gather while memory of `GATHERS_IN_FLIGHT` freed units may be read.
    """

    def __init__(self, device: Device, limit_gathers: bool) -> None:
        self.device, self.limit_gathers = device, limit_gathers
        self.unshard, self.post_backward = device.new_stream(), device.new_stream()
        self._freed: deque[Any] = deque()

    def begin_iteration(self, event: Any = None) -> None:
        """Order all-gathers after the optimizer's step: after what compute has queued, or only after `event`."""
        if event is not None:
            self.device.await_event(event, self.unshard)
        else:
            self.device.order(self.device.current_stream(), self.unshard)

    def unsharding(self) -> AbstractContextManager[Any]:
        """Run the block in the unshard stream."""
        return self.device.run_in(self.unshard)

    def await_unshard(self, *filled: Tensor) -> None:
        """Compute may read `filled`, made in the unshard stream, from here on."""
        compute = self.device.current_stream()
        self.device.order(self.unshard, compute)
        for tensor in filled:
            self.device.keep(tensor, compute)

    def note_free(self) -> None:
        """Note that a unit's memory was freed while compute may have reads of it in its queue (E-RATE-2)."""
        event = self.device.record(self.device.current_stream()) if self.limit_gathers else None
        if event is not None:
            self._freed.append(event)

    def limit(self) -> None:
        """Before a gather, hold the host back if it has run far ahead of the device (E-RATE-1, E-RATE-3)."""
        if len(self._freed) >= GATHERS_IN_FLIGHT:
            with record_function("fsdp_compile.limit_all_gathers"):
                self.device.block(self._freed.popleft())

    def reducing(self) -> AbstractContextManager[Any]:
        """Run the block in the post-backward stream, after the gradients that compute has made so far."""
        self.device.order(self.device.current_stream(), self.post_backward)
        return self.device.run_in(self.post_backward)

    def finishing(self) -> AbstractContextManager[Any]:
        """Run the block in the post-backward stream, after the reduces that were started there, without compute."""
        return self.device.run_in(self.post_backward)

    def use_in_post_backward(self, *gradients: Tensor) -> None:
        """Keep the memory of `gradients` until the post-backward stream has read them (`record_stream`)."""
        for tensor in gradients:
            self.device.keep(tensor, self.post_backward)

    def await_reduce(self, *reduced: Tensor) -> None:
        """Compute may read `reduced`, made in the post-backward stream, from here on."""
        compute = self.device.current_stream()
        self.device.order(self.post_backward, compute)
        for tensor in reduced:
            self.device.keep(tensor, compute)

    def reduce_event(self) -> Any:
        """An event behind what the post-backward stream has been given; None if nothing is ever queued."""
        return self.device.record(self.post_backward)

    def block_on_unshard(self) -> None:
        """Let the host wait for copies that gathers make of shards in host memory, before it changes these."""
        event = self.device.record(self.unshard)
        if event is not None:
            self.device.block(event)


NO_STREAMS = Streams(Device(torch.device("cpu")), limit_gathers=False)
"""Everything in the current stream: for all-gathers outside of an iteration (E-STREAM-4)."""


# --- memory of unsharded parameters: filled by an all-gather, read, freed, and filled again ---------------------------


class UnshardedBuffer:
    """An unsharded flat parameter, `[layout.numel]`, in the dtype and on the device that its unit computes in.

    If the shard is that already (NO_SHARD in the parameters' own dtype) it is the shard's memory, never freed. Where
    the all-gather goes through two groups, `slice` is what the first has gathered: the next fill starts there. Memory
    belongs to the stream that is current in `start`. Saved views of it can be unpacked while the memory is filled, see
    Note [Freeing buffers that autograd has saved].
    """

    def __init__(self, unit: Unit, flat: FlatParam, full_precision: bool) -> None:
        self.unit, self.flat = unit, flat
        dtype = unit.compute_dtype(flat, full_precision)
        self._hops, _ = hops.hops_of(flat.wire, unit.stages, full_precision=full_precision)
        self.is_sharded = unit.is_sharded
        self.is_shard = not self.is_sharded and dtype == flat.shard.dtype and unit.device == flat.shard.device
        self.full = (
            alias(flat.shard) if self.is_shard else torch.empty(flat.layout.numel, dtype=dtype, device=unit.device)
        )
        self.storage = self.full.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.slice: Tensor | None = None
        self.filling = self.is_free = False  # the latter: whether the memory was freed
        self._shared: Tensor | None = None  # the tensor whose version counter plain views share, once there are any
        self._others: list[weakref.ref[Tensor]] = []  # views with counters of their own
        self._refuses_reads = False
        self._gather: hops.Gathering | None = None

    def start(self) -> None:
        """Begin to fill it from the shards."""
        if self.is_shard:
            return
        if self.is_free:
            self.storage.resize_(self.nbytes)
            self.is_free = False
        if not self.is_sharded:
            self.full.copy_(self._cast_shard())
            self.filling = True
            return
        *first, last = self._hops
        for group in self._hops if first and self.slice is None else (last,):
            full, sent = self.full, self._cast_shard() if self.slice is None else self.slice
            if group is not last:
                full = self.slice = self.full.new_empty(self.full.numel() // last.size)
            if group.gather:
                self._gather = hops.start_gather(full, sent, group)
            else:
                self._gather = collectives.start_all_gather(full, sent, group.name)
            if full is not self.full:
                with collectives.waiting_for("all-gather", self.unit.path):
                    self._wait_for_gather()
        self.filling = True

    def _cast_shard(self) -> Tensor:
        return self.flat.shard.to(device=self.full.device, dtype=self.full.dtype, non_blocking=True)

    def _wait_for_gather(self) -> None:
        if self._gather is None:  # copied
            return
        try:
            self._gather.wait()
        except RuntimeError:  # it has failed; what else interrupts the wait leaves it under way, as for `free`
            self._gather = None
            raise
        self._gather = None

    def finish(self) -> None:
        """Order the current stream after the fill."""
        self._wait_for_gather()
        self.filling = False
        self.allow_reads()

    def views(self) -> list[Tensor]:
        """The unsharded parameters (Note [Freeing buffers that autograd has saved])."""
        return self.flat.views(self.flat_view())

    def flat_view(self) -> Tensor:
        """The unsharded flat parameter, 1-D: all that this returns and all views of it share one version counter."""
        if self._shared is None:
            self._shared = alias(self.full)
        return self._shared.detach()

    def count(self, *views: Tensor) -> None:
        """Let autograd refuse `views`, with version counters of their own, while the memory is not there."""
        self._others += map(weakref.ref, views)

    def allow_reads(self) -> None:
        """Let autograd unpack views that it has saved: the memory is filled, or who reads it waits for the fill."""
        if self._refuses_reads:
            self._move_counters(-WHILE_FREED)
            self._refuses_reads = False

    def free(self) -> None:
        """Free the memory, which is not being filled."""
        if self.is_shard:
            return
        if not self._refuses_reads:
            self._move_counters(WHILE_FREED)
            self._refuses_reads = True
        self.storage.resize_(0)
        self.is_free = self.nbytes > 0

    def _move_counters(self, by: int) -> None:
        shared = self._shared
        if shared is None or shared.is_inference():  # of which autograd saves nothing
            return
        counted = [shared]
        if self._others:
            self._others = [each for each in self._others if each() is not None]
            counted += [view for each in self._others if (view := each()) is not None]
        set_version_counters(tuple(counted), tuple([each._version + by for each in counted]))


def finish_filling(buffers: Sequence[UnshardedBuffer], streams: Streams) -> None:
    """Order compute after the all-gathers that fill `buffers`, of one unit."""
    filling = [buffer for buffer in buffers if buffer.filling]
    if filling:
        with streams.unsharding(), collectives.waiting_for("all-gather", filling[0].unit.path):
            for buffer in filling:
                buffer.finish()
        streams.await_unshard(*[buffer.full for buffer in filling])


class Values(NamedTuple):
    """What unsharded parameters were gathered from."""

    params: tuple[nn.Parameter, ...]
    versions: VersionCounters
    full_precision: bool  # whether mixed precision is ignored


class KeptUnsharded(NamedTuple):
    """Filled buffers that a backward pass under no_sync left for the unit's next forward (E-ACC-5)."""

    buffers: list[UnshardedBuffer]
    values: Values
