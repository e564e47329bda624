"""What a block that is compiled by itself reads: unsharded flat parameters, which its graph waits for one by one."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.comm import collectives
from fsdp_compile.core._torch import executes_node, never_trace
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.reduce import reduce_packed
from fsdp_compile.eager.streams import Streams, UnshardedBuffer, finish_filling

# Note [Graphs that wait for gathers]
# A block that is compiled by itself reads unsharded flat parameters, which are inputs of its graph. The pass
# `await_gathers` puts a wait for each of them before its first reader, so that the others are gathered meanwhile. Not
# all graphs have such waits (another backend, CUDA graphs). So at the first call of a compiled forward all is waited
# for before; a graph that waits says so when it runs, and from then on the runtime leaves the waits to that forward.
# Where Dynamo gives up, the code that runs instead waits for all, and leaves no waits to backward.
# Likewise the pass `start_reduces` lets backward start each reduce where the last gradient is packed. What has not been
# started is reduced when the graph has ended. Nothing is if autograd is not asked for gradients of the parameters,
# which the graph computes all the same. What a graph calls finds the reader by the storage of the flat parameter.


class BlockReader:
    """The graph, of forward and then of backward, that reads the flat parameters of one forward of `unit`.

    Args:
        compiled: the compiled forward.
        buffers: the flat parameters.
        may_wait: whether its graphs may wait for each by itself, and start each reduce: it alone reads the unit.
        full_precision: whether mixed precision is ignored.

    Attributes:
        awaits: whether the graph of forward has waited for flat parameters, as that of backward does then.
        reduced: gradients of shards, being reduced, that the graph of backward has started.
    """

    def __init__(
        self,
        unit: Unit,
        compiled: Callable[..., Any],
        buffers: Sequence[UnshardedBuffer],
        streams: Streams,
        may_wait: bool,
        full_precision: bool,
    ) -> None:
        self.unit, self.compiled, self.buffers, self.streams = unit, compiled, buffers, streams
        self.may_wait, self.full_precision = may_wait and len(buffers) > 1, full_precision
        self.awaits = False
        self.reduced: dict[FlatParam, Tensor | None] = {}
        self._nodes: list[Any] = []
        self._is_whole: weakref.WeakMethod[Callable[[], bool]] | None = None

    @property
    def has_waited(self) -> bool:
        """Whether the graph has waited for flat parameters before: so it does now."""
        return self.may_wait and self.unit.awaited_by is self.compiled

    def offer(self, views: Sequence[Tensor], is_whole: Callable[[], bool]) -> None:
        """Let graphs find this by the flat parameters that they read (Note [Graphs that wait for gathers]).

        `is_whole`, a bound method: whether the gradients that a graph packs are all that the unit gets in that pass.
        """
        if self.may_wait:
            self._nodes, self._is_whole = [view.grad_fn for view in views], weakref.WeakMethod(is_whole)
            for buffer in self.buffers:
                vars(buffer.full.untyped_storage())["reader"] = weakref.ref(self)

    def await_in(self, full: Tensor) -> None:
        """The graph is about to read the flat parameter `full`."""
        if self.may_wait:
            self.awaits, self.unit.awaited_by = True, self.compiled
        if not self.unit.is_sharded:  # copied, in the unshard stream
            finish_filling(self.buffers, self.streams)
        device, memory = self.streams.device, full.untyped_storage()
        for buffer in self.buffers:
            if buffer.filling and buffer.full.untyped_storage() is memory:
                with collectives.waiting_for("all-gather", self.unit.path):
                    buffer.finish()  # compute waits for this collective alone, and not for all of the unshard stream
                device.keep(buffer.full, device.current_stream())

    def start_reduce(self, full: Tensor, packed: Tensor) -> None:
        """The graph has packed the gradients of the flat parameter `full`.

        They wait for the end of the graph where they may be but a part: where recomputed forwards read the parameters.
        """
        is_whole = None if self._is_whole is None else self._is_whole()
        if is_whole is None or not is_whole():
            return
        memory = full.untyped_storage()
        for buffer, node in zip(self.buffers, self._nodes, strict=True):
            if buffer.full.untyped_storage() is memory and node is not None and executes_node(node):
                (reduced,) = reduce_packed(self.unit, [buffer.flat], [packed], self.streams, self.full_precision)
                self.reduced[buffer.flat] = reduced


def _reader_of(full: Tensor) -> BlockReader | None:
    return vars(full.untyped_storage()).get("reader", lambda: None)()


@torch.library.impl("fsdp_flat::await_gather", "default")
def _await_gather(full: Tensor) -> Tensor:
    if reader := _reader_of(full):
        reader.await_in(full)
    return full


@torch.library.impl("fsdp_flat::start_reduce_", "default")
def _start_reduce(packed: Tensor, full: Tensor) -> None:
    if reader := _reader_of(full):
        reader.start_reduce(full, packed)


@never_trace
def wait_for_flats(flats: Sequence[Tensor]) -> None:
    """Wait for flat parameters which code outside of graphs is about to read, and autograd in backward."""
    for reader in filter(None, map(_reader_of, flats)):
        reader.may_wait = reader.awaits = False
        finish_filling(reader.buffers, reader.streams)
