"""The unsharded parameters of one forward of a unit, from its all-gather to the end of its backward.

forward    all-gather -> module code reads the parameters -> free
backward   all-gather again when the first gradient reaches an output -> module code may read the parameters, where
           it is recomputed -> free once the gradients of all parameters are there -> pack and reduce these
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Flag, auto
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile.comm import collectives
from fsdp_compile.core._torch import (
    WITHOUT_TENSORS,
    backward_keeps_graph,
    call_after_backward,
    call_with_gradients,
    current_backward,
    executes_node,
    leaves_of,
    may_change_saved_tensors,
    never_compile,
    never_trace,
    next_node_number,
    node_number,
    register_first_hook,
)
from fsdp_compile.core.autograd import check_engine
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.ops import inner_tensors
from fsdp_compile.core.sharding import changed_in_forward
from fsdp_compile.core.unit import Phase, Unit
from fsdp_compile.eager.accumulate import settle_after_backward
from fsdp_compile.eager.reduce import reduce_gradients, reduce_packed
from fsdp_compile.eager.streams import NO_STREAMS, KeptUnsharded, Streams, UnshardedBuffer
from fsdp_compile.eager.writeback import equal_bits, refresh

# Note [Freeing buffers that autograd has saved]
# Autograd saves views of unsharded parameters in forward and reads them in backward. A buffer is therefore freed by
# resizing its storage to zero bytes: the saved views stay valid tensors, and after the next all-gather into the same
# storage they have their values again. All views of a buffer share one version counter, which is not the buffer's: so
# filling it again does not look to autograd like an in-place change. But while the memory is freed or being filled the
# counter has another value than autograd has noted, and what unpacks a saved view then raises, whatever way led to it.
#
# Backward must gather before the first node of the unit runs, and it runs nodes in the reverse order in which forward
# made them. So there are hooks on all tensors that are known to leave the forward: outputs, and what it made that
# modules keep or arguments hold. If autograd made more nodes after the last of these, something may have left in
# another way (a global list, a closure): the buffers stay, as they do where an output may have tensors inside. What
# these hooks miss is an error, by the counters above.
#
# The views own the autograd node that made them. A strong reference from that node, or from a hook on it, to the
# `UnshardedUnit` that owns the views would close a cycle through C++ that Python's garbage collector does not see; so
# nodes and hooks on inputs refer to it weakly. Hooks on the outputs own it: it goes when the graph goes.


_VERSION = operator.attrgetter("_version")


class UnshardParams(torch.autograd.Function):
    """From flat parameters that train to their unsharded parameters.

    Backward frees these, packs their gradients and starts to reduce them. With `as_flats` the unsharded parameters are
    flat: a compiled graph splits them and packs their gradients.
    """

    @staticmethod
    def forward(ctx: Any, gathered: "UnshardedUnit", flats: list[FlatParam], *deferred: Tensor) -> tuple[Tensor, ...]:
        """Return the unsharded parameters of `flats`, or flat ones `[layout.numel]`; `deferred`: those of `flats`."""
        ctx.set_materialize_grads(False)
        ctx.unit, ctx.flats, ctx.gathered = gathered.unit, flats, weakref.ref(gathered)
        ctx.as_flats, ctx.signals = gathered.as_flats, [each.detach() for each in deferred]
        ctx.streams, ctx.full_precision = gathered.streams, gathered.full_precision
        buffers = [buffer for buffer in gathered.buffers if buffer.flat in flats]
        if gathered.as_flats:
            return tuple(buffer.flat_view() for buffer in buffers)
        params, frozen = [], []
        for buffer in buffers:
            views = buffer.views()
            params += views
            frozen += [views[index] for index in buffer.flat.frozen]
        ctx.mark_non_differentiable(*frozen)
        return tuple(params)

    @staticmethod
    @once_differentiable
    @never_compile
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # as the results of forward
        """Leave the shards' gradients, being reduced, to `DeferredGradient`; return a scalar where there is one."""
        check_engine(ctx.flats[0].names[0])
        with collectives.profiled("post", ctx.unit.path):
            gathered = ctx.gathered()
            if gathered is not None:
                gathered.gradients_ready()
            if ctx.as_flats:
                reduced: dict[FlatParam, Tensor | None] = {}
                if gathered is not None:
                    reduced, gathered.reduced = gathered.reduced, {}
                rest = {flat: grad for flat, grad in zip(ctx.flats, grads, strict=True) if flat not in reduced}
                others = reduce_packed(ctx.unit, [*rest], reversed(rest.values()), ctx.streams, ctx.full_precision)
                reduced |= dict(zip(rest, others, strict=True))
                shard_grads = [reduced[flat] for flat in ctx.flats]
            else:
                shard_grads = reduce_gradients(ctx.unit, ctx.flats, grads, ctx.streams, ctx.full_precision)
            left = zip(ctx.flats, shard_grads, ctx.signals, strict=True)
            return (None, None, *[signal if flat.reduction.defer(grad) else None for flat, grad, signal in left])


# Note [Graphs that wait for gathers]
# A block that is compiled by itself reads unsharded flat parameters, which are inputs of its graph. The pass
# `await_gathers` puts a wait for each of them before its first reader, so that the others are gathered meanwhile. Not
# all graphs have such waits (another backend, CUDA graphs). So at the first call of a compiled forward all is waited
# for before; a graph that waits says so when it runs, and from then on the runtime leaves the waits to that forward.
# Where Dynamo gives up, the code that runs instead waits for all, and leaves no waits to backward.
# Likewise the pass `start_reduces` lets backward start each reduce where the last gradient is packed. What has not been
# started is reduced when the graph has ended. Nothing is if autograd is not asked for gradients of the parameters,
# which the graph computes all the same.

_read_by_graphs: "weakref.WeakValueDictionary[int, UnshardedUnit]" = weakref.WeakValueDictionary()
"""By address of a flat parameter the forward whose graph reads it, or whose backward's does."""


@torch.library.impl("fsdp_flat::await_gather", "default")
def _await_gather(full: Tensor) -> Tensor:
    gathered = _read_by_graphs.get(full.data_ptr())
    if gathered is not None:
        gathered.await_in(full)
    return full


@torch.library.impl("fsdp_flat::start_reduce_", "default")
def _start_reduce(packed: Tensor, full: Tensor) -> None:
    gathered = _read_by_graphs.get(full.data_ptr())
    if gathered is not None:
        gathered.start_reduce(full, packed)


@never_trace
def wait_for_flats(flats: Sequence[Tensor]) -> None:
    """Wait for flat parameters which code outside of graphs is about to read, and autograd in backward."""
    for gathered in filter(None, [_read_by_graphs.get(full.data_ptr()) for full in flats]):
        gathered.reader, gathered.awaits = None, False
        gathered.wait()


class Reader(Flag):
    """Who still reads unsharded parameters in a backward pass."""

    NOBODY = 0
    FROZEN_PARAMETERS = auto()  # their part of backward runs until the unit's inputs have their gradients
    TRAINED_PARAMETERS = auto()  # beside frozen ones: until the gradients of those that train are there
    RECOMPUTED_FORWARD = auto()  # a checkpoint within the unit, of this forward or of another one


class UnshardedUnit:
    """The unsharded parameters that one forward of `unit` reads, and the buffers beneath them.

    Making one starts the all-gather, unless an earlier backward pass has left buffers with the same values.

    Args:
        full_precision: whether mixed precision is ignored.
        streams: the streams of the root on the unit's device.
        iteration: the root's forward within which the user asked for the all-gather, or None.

    Attributes:
        versions: version counters of the parameters whose values the buffers have.
        as_flats: whether `views` are flat parameters, which a compiled forward splits itself.
        reused: whether the buffers were left by an earlier backward pass.
        can_free: whether backward can gather again what is freed after the forward.
        backward_pass: the backward pass that last read the parameters, or -1.
        recomputed_in: the backward pass in which a recomputed forward last read the open parameters, or -1.
        is_lent: whether backward last opened it for a recomputed forward, and has not reached its own outputs since.
        prefetched: whether a backward pass has begun to gather again and nothing has read the parameters yet.
        is_held: whether something holds the parameters that no hook tells of: a graph that a backward pass made, a
            transform of `torch.func`, or an output that lies in their buffers. These go with what holds them.
        readers: who else reads the parameters in that backward pass.
        reader: the compiled forward that reads flat parameters, if there are several; or None.
        awaits: whether its graph has waited for flat parameters, as its backward does then.
        reduced: gradients of shards, being reduced, that the graph of backward has started.
        of_several: whether the forwards of several modules read it.
        prefetch_backward: gathers the unit whose backward comes next, if that is wanted now.
        unread: the runtime's, for buffers that nobody waits for after a failure.
        previous: the forward of a unit that ended before this one.
        in_root_forward: whether it was part of a forward of the root, not recomputed or called by itself.
    """

    def __init__(
        self,
        unit: Unit,
        full_precision: bool,
        streams: Streams = NO_STREAMS,
        iteration: object | None = None,
    ) -> None:
        self.unit, self.full_precision, self.streams, self.iteration = unit, full_precision, streams, iteration
        self.prefetch_backward: Callable[[UnshardedUnit, BackwardPrefetch], None] | None = None
        self.previous: weakref.ref[UnshardedUnit] | None = None
        self.unread: list[UnshardedBuffer] = []
        if refresh(unit):
            streams.begin_iteration()
        self.params, self.versions = tuple(unit.params), unit.version_counters()
        self.opaque: type | None = None  # of an output that may have tensors inside
        self.is_left = False  # whether forward computed something after all tensors that have hooks
        self.reader: Callable[..., Any] | None = None
        self.awaits = False
        self.reduced: dict[FlatParam, Tensor | None] = {}
        self.as_flats = self.can_free = self.prefetched = self.is_held = self.in_root_forward = False
        self.is_lent = self.of_several = False
        self.backward_pass, self.recomputed_in, self.readers = -1, -1, Reader.NOBODY
        reused = self._take_kept()
        self.reused = reused is not None
        if reused is not None:
            self.buffers = reused.buffers
            return
        self.streams.limit()
        with torch.no_grad(), streams.unsharding(), collectives.profiled("all_gather", unit.path):
            self.buffers = [
                UnshardedBuffer(unit, flat, unit.compute_dtype(flat, full_precision)) for flat in unit.flats
            ]
            for buffer in self.buffers:
                buffer.start()

    def _take_kept(self) -> KeptUnsharded | None:
        """The buffers that an earlier backward pass left, if they have the values that an all-gather would bring.

        Some ranks may have skipped a backward pass under no_sync and have nothing. So whether ranks ask each other
        follows from what all of them did: this unit's last all-gather.
        """
        unit = self.unit
        asks, unit.keep_unsharded = unit.keep_unsharded, not unit.reshard_after_backward and torch.is_grad_enabled()
        if not asks:
            return None
        earlier, unit.kept = unit.kept, None
        usable = (
            earlier is not None
            and earlier.versions == self.versions
            and earlier.full_precision == self.full_precision
            and not any(buffer.is_free for buffer in earlier.buffers)
        )
        usable = collectives.holds_on_all_ranks(usable, unit.group_name, unit.device)
        if earlier is None:
            return None
        if not usable:
            self._free(earlier.buffers)
            return None
        unit.keep_unsharded |= not torch.is_grad_enabled()  # a forward without gradients leaves them for the next
        return earlier

    def is_current(self) -> bool:
        """Whether the parameters are still those that were gathered, except edits through `.data` (E-STRAT-10)."""
        return all(map(operator.is_, self.params, self.unit.params)) and self.unit.version_counters() == self.versions

    # --- forward ------------------------------------------------------------------------------------------------------

    def open(self, reader: Callable[..., Any] | None = None) -> None:
        """Wait for the all-gather and let module code read the parameters, or `reader`, compiled, the flat ones."""
        is_saved = torch.is_grad_enabled() and not all(buffer.is_shard for buffer in self.buffers)
        if is_saved and may_change_saved_tensors():
            raise RuntimeError(
                f"parameter {self.unit.flats[0].names[0]}: sharded modules cannot run within "
                f"torch.autograd.graph.allow_mutation_on_saved_tensors: where parameters are gathered again "
                f"for backward, it would copy what was there before"
            )
        as_flats = self.as_flats = reader is not None
        self.reader = reader if len(self.buffers) > 1 and not self.of_several else None
        if self.reader is None or self.unit.awaited_by is not reader:
            self.wait()
        trained = [flat for flat in self.unit.flats if flat.trains and torch.is_grad_enabled()]
        deferred = [flat.deferred for flat in trained]
        differentiable = iter(UnshardParams.apply(self, trained, *deferred) if trained else ())
        self.views: list[Tensor] = []
        starts = []
        for buffer in self.buffers:
            starts.append(len(self.views))
            count = 1 if as_flats else len(buffer.flat.params)
            if buffer.flat in trained:
                self.views += [next(differentiable) for _ in range(count)]
            else:
                with torch.no_grad():
                    self.views += [buffer.flat_view()] if as_flats else buffer.views()
        if not as_flats and self.unit.tensor_parallel:
            self.views = self.unit.distributed(self.views)
            for buffer, start in zip(self.buffers, starts, strict=True):  # DTensors have counters of their own
                buffer.count(*self.views[start : start + len(buffer.flat.params)])
        self._watched: list[Tensor] = []  # views of one buffer share one version counter
        if not as_flats and not torch.is_inference_mode_enabled():  # which counts no versions
            self._watched = self.views if self.unit.tensor_parallel else [self.views[start] for start in starts]
        self._versions_when_opened = list(map(_VERSION, self._watched))
        self._first_node = next_node_number()
        self._offer()
        self.unit.show_unsharded(self.views, as_flats)  # last: what is raised before leaves nothing open

    def _offer(self) -> None:
        """Let graphs find the flat parameters that they read (Note [Graphs that wait for gathers])."""
        if self.reader is not None:
            _read_by_graphs.update((buffer.full.data_ptr(), self) for buffer in self.buffers)

    def await_in(self, full: Tensor) -> None:
        """A graph is about to read the flat parameter `full`."""
        self.awaits, self.unit.awaited_by = self.reader is not None, self.reader
        if not self.unit.is_sharded:  # copied, in the unshard stream
            self.wait()
        device, address = self.streams.device, full.data_ptr()
        for buffer in self.buffers:
            if buffer.filling and buffer.full.data_ptr() == address:
                with collectives.waiting_for("all-gather", self.unit.path):
                    buffer.finish()  # compute waits for this collective alone, and not for all of the unshard stream
                device.keep(buffer.full, device.current_stream())

    def start_reduce(self, full: Tensor, packed: Tensor) -> None:
        """A graph has packed the gradients of the flat parameter `full`.

        They wait for `UnshardParams` where they may be but a part: of modules that share the unit, or where recomputed
        forwards read the parameters of another one.
        """
        is_whole = not self.of_several and Reader.RECOMPUTED_FORWARD not in self.readers and self.recomputed_in == -1
        if not is_whole or self.backward_pass != current_backward() or self not in self.unit.awaiting_backward:
            return
        address = full.data_ptr()
        for buffer, view in zip(self.buffers, self.views, strict=True):
            if buffer.full.data_ptr() == address and view.grad_fn is not None and executes_node(view.grad_fn):
                (reduced,) = reduce_packed(self.unit, [buffer.flat], [packed], self.streams, self.full_precision)
                self.reduced[buffer.flat] = reduced

    def wait(self) -> None:
        """Order compute after the all-gathers."""
        filling = [buffer for buffer in self.buffers if buffer.filling]
        if filling:
            with self.streams.unsharding(), collectives.waiting_for("all-gather", self.unit.path):
                for buffer in filling:
                    buffer.finish()
            self.streams.await_unshard(*[buffer.full for buffer in filling])

    def check_unwritten(self, cause: BaseException | None = None) -> None:
        """Raise RuntimeError if forward changed the unit's parameters in place, where the change would be lost.

        `cause` is what forward raised, as autograd may have refused the change.
        """
        refused = cause is not None and UnshardParams.__name__ in str(cause)
        unchanged = list(map(_VERSION, self._watched)) == self._versions_when_opened
        if not refused and (unchanged or all(buffer.is_shard for buffer in self.buffers)):
            return
        raise RuntimeError(changed_in_forward(self.find_changed() or self.unit.names)) from cause

    def find_changed(self) -> list[str]:
        """The names of parameters that lost the values that were gathered, as far as this rank stores them.

        Finds what version counters do not count: writes through `.data`. Reads the unit's shard once and waits for the
        device once for each parameter.
        """
        if self.as_flats:
            return []
        changed: list[str] = []
        views = iter(self.views)
        for buffer in self.buffers:
            flat = buffer.flat
            stored = flat.split(flat.shard.detach())
            for name, record, mine in zip(flat.names, flat.records, stored, strict=True):
                view = next(inner_tensors(next(views)))
                if record is None or mine is None:
                    continue
                same_size = view.numel() > record.last
                here = view.detach().reshape(-1)[record.first : record.last + 1] if same_size else None
                there = mine.reshape(-1).to(device=view.device, dtype=buffer.full.dtype)
                if here is None or here.dtype != there.dtype or not equal_bits(here, there):
                    changed.append(name)
        return changed

    def end_forward(self, inputs: Any, output: Any, kept: Iterable[Tensor], keep: bool) -> None:
        """Prepare for backward; free the buffers unless `keep`, or backward could not fill them again.

        `kept`: what modules keep, among which may be tensors that this forward made.
        """
        if self.awaits:
            self.wait()  # for what the graph has not read
        if not torch.is_grad_enabled():  # nothing was saved: the buffers go with their last views
            if self.reused:
                self._keep()
            return
        self.unit.awaiting_backward[self] = None
        if self.is_held:
            return
        given = [each for each in leaves_of(inputs) if isinstance(each, Tensor)]
        self.can_free = self._hook_outputs(given, output, kept)
        if self.unit.has_frozen or not self.unit.trains:
            self._hook_inputs(given)
        if self.can_free and not keep:
            self.free(keep_slices=True)

    def _hook_outputs(self, given: list[Tensor], output: Any, kept: Iterable[Tensor]) -> bool:
        """Gather again when a gradient reaches an output, or another tensor that forward made and that still is there.

        False if the buffers must stay: an output lies in one, or something may have gradients that has no hook.
        """
        memory = {buffer.storage.data_ptr() for buffer in self.buffers}
        hooked: dict[int, int] = {}
        for leaf in leaves_of(output):
            if not isinstance(leaf, Tensor):
                if self.opaque is None and not isinstance(leaf, WITHOUT_TENSORS):
                    self.opaque = type(leaf)
                continue
            if leaf.layout is torch.strided and not self.is_held:
                self.is_held = any(part.untyped_storage().data_ptr() in memory for part in inner_tensors(leaf))
            if leaf.grad_fn is None:  # an autograd leaf is an input passed through
                continue
            register_first_hook(leaf, self._before_backward)  # before those that forward has registered
            hooked[id(leaf)] = node_number(leaf)
            # If a view is then changed in place, autograd drops its node and keeps that of its base. If the base is an
            # input, that node belongs to another unit.
            node = None if leaf._base is None else leaf._base.grad_fn
            if node and all((each if each._base is None else each._base).grad_fn is not node for each in given):
                node.register_prehook(self._before_backward)
        for each in (*kept, *given):
            if id(each) not in hooked and (number := node_number(each)) >= self._first_node:
                register_first_hook(each, self._before_backward)
                hooked[id(each)] = number
        self.is_left = next_node_number() > max(hooked.values(), default=self._first_node - 1) + 1
        return not (self.opaque or self.is_held or self.is_left)

    def _hook_inputs(self, given: list[Tensor]) -> None:
        """Frozen parameters are read until the unit's inputs have their gradients."""
        needed = [each for each in given if each.requires_grad]
        if needed:
            self.readers |= Reader.FROZEN_PARAMETERS
            if self.unit.trains:  # autograd computes the gradient of an input that is a leaf before those of parameters
                self.readers |= Reader.TRAINED_PARAMETERS
            weak = weakref.WeakMethod(self._inputs_ready)

            def call() -> None:
                inputs_ready = weak()
                if inputs_ready is not None:
                    inputs_ready()

            # An input that outlives this forward collects no hooks.
            weakref.finalize(self, call_with_gradients(needed, call))

    # --- backward -----------------------------------------------------------------------------------------------------

    @never_compile
    def _before_backward(self, _grad: Any) -> None:
        self.is_lent = False
        self.is_held |= torch.is_grad_enabled()
        if self.backward_pass != current_backward():
            with collectives.profiled("pre", self.unit.path):
                self.reopen()
        elif self in self.unit.awaiting_backward and not any(buffer.is_free for buffer in self.buffers):
            # A recomputed forward opened it; another may have hidden it since.
            self.unit.show_unsharded(self.views, self.as_flats)

    def reopen(self) -> None:
        """Let the running backward pass read the parameters: gather again what was freed."""
        self.unit.check_not_summoned("backward")
        if self.unit.phase is Phase.FORWARD:  # its parameters would be freed at the end of this backward (E-BWD-3)
            raise ValueError(
                f"backward reached {self.unit} while a forward of it runs, as the backward of an earlier forward was "
                f"called within: end the forward first"
            )
        self.backward_pass = current_backward()
        if any(buffer.is_shard for buffer in self.buffers):
            self._check_unchanged()  # else backward would compute with values that forward did not have
        call_after_backward(self.close, if_failed=self._fail)
        if self.in_root_forward:  # a reentrant checkpoint runs a backward pass within that of the root
            settle_after_backward(self.unit)
        # With "auto" the last unit may be kept: recorded all the same, so that each pass has one record of the order.
        may_be_kept = self.unit.reshard_after_forward is None
        if self.prefetched or may_be_kept or any(buffer.is_free for buffer in self.buffers):
            self.unit.reduces_in_flight.order.next_in_backward("all-gather", self.unit)
        self.prefetch()
        self.prefetched = False
        if not self.awaits:
            self.wait()
        for buffer in self.buffers if self.awaits else ():
            buffer.allow_reads()
        self.unit.show_unsharded(self.views, self.as_flats)
        self._offer()
        self._prefetch_next(BackwardPrefetch.BACKWARD_PRE)

    def _fail(self) -> None:
        self.hide()
        self.reduced.clear()
        self.leave_unread()

    def leave_unread(self) -> None:
        """Leave what is being gathered to the root's next forward: other ranks may not take part for a while."""
        self.unread.extend(buffer for buffer in self.buffers if buffer.filling)

    def recompute(self) -> None:
        """Note that a recomputed forward reads the open parameters; the second in a backward pass is another one."""
        if self.recomputed_in == current_backward():
            self.readers |= Reader.RECOMPUTED_FORWARD
        self.recomputed_in = current_backward()

    def prefetch(self) -> bool:
        """Begin to gather again what was freed; return whether anything was."""
        freed = [buffer for buffer in self.buffers if buffer.is_free]
        if freed:
            self._check_unchanged()
            self.streams.limit()
            with torch.no_grad(), self.streams.unsharding(), collectives.profiled("all_gather", self.unit.path):
                for buffer in reversed(freed):  # backward reads the last parameters first
                    buffer.start()
            self.prefetched = True
        return bool(freed)

    def free_prefetched(self) -> None:
        """Free what was gathered again but not read."""
        if self.prefetched:
            self.prefetched = False
            self.free(keep_slices=True)

    def gradients_ready(self) -> None:
        """All gradients of trained parameters are there: free the parameters, unless something still reads them.

        Parts of one unit that are recomputed in one backward pass all read these parameters: the last closes them. A
        reentrant checkpoint runs a backward pass of its own within the one that opened them.
        """
        self.readers &= ~Reader.TRAINED_PARAMETERS
        in_this_pass = self.backward_pass in (-1, current_backward())
        if in_this_pass and Reader.FROZEN_PARAMETERS not in self.readers and not self._is_shared():
            self.close()
        self._prefetch_next(BackwardPrefetch.BACKWARD_POST)

    @never_compile
    def _inputs_ready(self) -> None:
        self.readers &= ~Reader.FROZEN_PARAMETERS
        if Reader.TRAINED_PARAMETERS in self.readers:
            return  # `gradients_ready` follows, or else the end of the backward pass
        if self.backward_pass == current_backward() and not self._is_shared():
            self.close()
            self._prefetch_next(BackwardPrefetch.BACKWARD_POST)  # a frozen unit has no gradients to be ready (E-PRE-6)

    def _prefetch_next(self, when: BackwardPrefetch) -> None:
        if self.prefetch_backward is not None:
            self.prefetch_backward(self, when)

    def _is_shared(self) -> bool:
        return Reader.RECOMPUTED_FORWARD in self.readers and len(self.unit.awaiting_backward) > 1

    def close(self) -> None:
        """End backward: free the buffers, or keep them where that saves an all-gather."""
        if not (backward_keeps_graph() or self.is_lent):  # else its own backward may follow
            self.unit.awaiting_backward.pop(self, None)
        self.hide()
        if self.is_held:
            return
        keeps = self.unit.keep_unsharded and not self.unit.reshard_after_backward
        if keeps and not any(buffer.is_free for buffer in self.buffers):
            self._keep()
            return
        if self.unit.kept is not None:
            self._free(self.unit.kept.buffers)
            self.unit.kept = None
        self.free()

    def hide(self) -> None:
        """Hide the parameters from module code."""
        self.unit.hide_unsharded(self.views)

    def _keep(self) -> None:
        earlier = self.unit.kept
        if earlier is not None and earlier.buffers is not self.buffers:
            self._free(earlier.buffers)
        self.unit.kept = KeptUnsharded(self.buffers, self.versions, self.full_precision)

    def _check_unchanged(self) -> None:
        unit, versions, changed = self.unit, self.versions, ""
        for flat, version in zip(unit.flats, versions.shards[::2], strict=True):
            if flat.shard._version != version:  # of all that lies in the shard
                changed = f"{flat.names[0]} or another one"
        for name, param, version in zip(unit.names, unit.params, versions.params, strict=True):
            if unit.is_sharded and param._version != version:  # else they share the shard's counter
                changed = name
                break
        if changed:
            raise RuntimeError(
                f"parameter {changed} of {unit.path} was changed in place between forward and backward; run backward "
                f"before the optimizer's step"
            )

    def free(self, keep_slices: bool = False) -> None:
        """Free the buffers; with `keep_slices`, not what the second of two groups gathers from again."""
        self.wait()
        self._free(self.buffers, keep_slices)

    def _free(self, buffers: Sequence[UnshardedBuffer], keep_slices: bool = False) -> None:
        filled = [buffer for buffer in buffers if not (buffer.is_shard or buffer.is_free)]
        for buffer in filled:
            buffer.free()
        for buffer in buffers if not keep_slices else ():
            buffer.slice = None
        if filled:
            self.streams.note_free()


class UnshardHandle(torch.distributed.fsdp.UnshardHandle):
    """All-gathers that `FSDPModule.unshard(async_op=True)` has started."""

    def __init__(self, gathers: Sequence[UnshardedUnit]) -> None:
        self._gathers = gathers

    def wait(self) -> None:
        """Order the current stream after the all-gathers; without streams, wait for them."""
        for gathered in self._gathers:
            gathered.wait()
        self._gathers = ()


def reshard(unit: Unit) -> None:
    """Free all unsharded parameters of an idle unit; a backward that still needs them gathers again.

    Raises ValueError in a forward or backward of the unit.
    """
    if unit.is_unsharded:
        raise ValueError(f"reshard: {unit} is in its forward or backward; call it between steps")
    free_for_next_forward(unit)
    for gathered in unit.awaiting_backward:
        if gathered.can_free:
            gathered.free()


def free_for_next_forward(unit: Unit) -> None:
    """Free what was gathered early, or kept by a backward pass, for a forward that has not begun."""
    if unit.prefetched is not None:
        unit.prefetched.free()
        unit.prefetched = None
    if unit.kept is not None:
        for buffer in unit.kept.buffers:
            buffer.free()
        unit.kept = None
