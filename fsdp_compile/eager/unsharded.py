"""The memory of one flat parameter in full: filled, read, given back, filled again.

The differentiable step from a unit's shards to full views, and back from gradients to a reduce.

One forward's full views of a unit, from gather to the end of its backward.

    forward:   gather -> module code reads the views -> free
    backward:  gather again (first gradient reaches an output) -> module code may read the views (recomputation) ->
               free (all gradients of the views are there) -> pack, reduce

Freeing resizes the storage to zero bytes: autograd's saved views stay valid objects and are filled again in place.
Units that are not freed after forward stay filled through backward passes that do not synchronise gradients; the next
forward reads them if no parameter has changed (E-ACC-5).

A forward that backward runs again: which full views it reads.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile.comm import collectives
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.ops import alias, view_parameters
from fsdp_compile.core.unit import Unit, VersionCounters, check_no_forward_runs, check_not_summoned
from fsdp_compile.core.unshard_spec import NamedGroup
from fsdp_compile.eager._torch import call_after_backward, current_backward, tree_leaves
from fsdp_compile.eager.reduce import reduce_gradients, reduce_packed
from fsdp_compile.eager.streams import NO_STREAMS, Streams
from fsdp_compile.eager.writeback import refresh


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


def _start(full: Tensor, shard: Tensor, group: NamedGroup) -> None:
    collectives.start_all_gather(full, shard, group.size, group.name)


class KeptUnsharded(NamedTuple):
    """Filled buffers that a backward pass which synchronised nothing left to the unit's next forward."""

    buffers: list[UnshardedBuffer]
    versions: VersionCounters
    full_precision: bool


class UnshardParams(torch.autograd.Function):
    """The full views of the flat parameters that train; backward frees them, packs their gradients and reduces them.

    Note on lifetime: the views own this node, so it must not own the `UnshardedUnit` that owns the views.
    """

    @staticmethod
    def forward(ctx: Any, gathered: Any, flats: list[FlatParam], *handles: Tensor) -> tuple[Tensor, ...]:
        """The views of all parameters of `flats`, full shapes; `handles` are those of `flats`."""
        _note(ctx, gathered, flats)
        views, frozen = [], []
        for buffer in gathered.buffers:
            if buffer.flat in flats:
                found = buffer.views()
                views += found
                frozen += [found[index] for index in buffer.flat.frozen]
        ctx.mark_non_differentiable(*frozen)
        return tuple(views)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # one per parameter, full shape
        """The gradients of the handles, 1-D `[shard_numel]`, being reduced."""
        _end(ctx)
        return (None, None, *reduce_gradients(ctx.unit, ctx.flats, grads, ctx.streams, ctx.full_precision))


class UnshardFlats(torch.autograd.Function):
    """The same without cutting: a compiled graph cuts the views and packs their gradients."""

    @staticmethod
    def forward(ctx: Any, gathered: Any, flats: list[FlatParam], *handles: Tensor) -> tuple[Tensor, ...]:
        """The flat parameters of `flats`, `[layout.numel]` each."""
        _note(ctx, gathered, flats)
        return tuple(alias(buffer.full) for buffer in gathered.buffers if buffer.flat in flats)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *packed: Tensor | None) -> tuple[Any, ...]:  # [layout.numel] each
        """The gradients of the handles, 1-D `[shard_numel]`, being reduced."""
        _end(ctx)
        return (None, None, *reduce_packed(ctx.unit, ctx.flats, packed, ctx.streams, ctx.full_precision))


def _note(ctx: Any, gathered: Any, flats: list[FlatParam]) -> None:
    ctx.set_materialize_grads(False)
    ctx.unit, ctx.flats, ctx.gathered = gathered.unit, flats, weakref.ref(gathered)
    ctx.streams, ctx.full_precision = gathered.streams, gathered.full_precision


def _end(ctx: Any) -> None:
    gathered = ctx.gathered()
    if gathered is not None:
        gathered.gradients_ready()


_PLAIN = (int, float, complex, bool, str, bytes, type(None))


class UnshardedUnit:
    """The full views that one forward of `unit` gathered, and the buffers beneath them.

    Owned by the graph of that forward, through the hooks on its outputs: it goes when the graph goes.
    """

    def __init__(self, unit: Unit, full_precision: bool = False, streams: Streams = NO_STREAMS) -> None:
        self.unit, self.full_precision, self.streams = unit, full_precision, streams
        self.root: Any = None  # eager.root.Runtime
        self.before: weakref.ref[UnshardedUnit] | None = None  # the forward that ended before this one
        if refresh(unit):
            streams.begin_iteration()
        self.params, self.versions = tuple(unit.params), unit.version_counters()
        self.iteration: Any = None  # of the root, if its forward was running
        self.whole = False  # whether `views` are flat parameters, which a compiled forward cuts itself
        self.may_free = False  # between forward and backward: filled again when needed
        self.backward = -1  # the backward pass that has opened the views
        self.recomputed_into = False  # whether a forward recomputed in backward reads these views
        self.still_read = False  # whether frozen parameters may be read after the trained ones have their gradients
        self.ahead = False  # whether a backward pass has gathered this ahead and nothing has read it yet
        self.reused = self._take_kept()
        if not self.reused:
            self.streams.limit()
            with torch.no_grad(), streams.unsharding():
                self.buffers = [UnshardedBuffer(unit, flat, self._dtype(flat)) for flat in unit.flats]
                for buffer in self.buffers:
                    buffer.start()

    def _dtype(self, flat: FlatParam) -> torch.dtype:
        return flat.shard.dtype if self.full_precision else self.unit.compute_dtype(flat)

    def _take_kept(self) -> bool:
        """Take the buffers that an earlier backward left, if they hold what a gather would bring; else drop them.

        A backward pass under no_sync has no collectives: some ranks may have left it out, and have kept nothing. So
        whether ranks ask each other follows from what all of them did: this unit's last gather.
        """
        asks, self.unit.may_keep = self.unit.may_keep, self.unit.stays_unsharded and torch.is_grad_enabled()
        kept: KeptUnsharded | None = self.unit.kept_unsharded
        if not asks:
            return False
        self.unit.kept_unsharded = None
        current = holds_on_all_ranks(self.unit, kept is not None and self._would_bring(kept))
        if kept is None:
            return False
        if not current:
            self._free(kept.buffers)
            return False
        self.unit.may_keep |= not torch.is_grad_enabled()  # a forward without gradients leaves them for the next
        self.buffers = kept.buffers
        return True

    def _would_bring(self, kept: KeptUnsharded) -> bool:
        """Whether `kept` holds what this gather would bring."""
        same = kept.versions == self.versions and kept.full_precision == self.full_precision
        return same and not any(buffer.is_free for buffer in kept.buffers)

    def is_current(self) -> bool:
        """Whether the parameters are still those that were gathered, but for edits through `.data` (E-STRAT-10)."""
        same = all(mine is param for mine, param in zip(self.params, self.unit.params, strict=True))
        return same and self.unit.version_counters() == self.versions

    def open(self, whole: bool = False) -> None:
        """Wait for the gather; give the unit its views, or, if `whole`, the flat parameters that they are cut from."""
        self.wait()
        self.whole = whole
        self.views = self._differentiable_flats() if whole else self._differentiable_views()
        self._show(current_backward())

    def _show(self, backward: int) -> None:
        if self.whole:
            self.unit.unsharded_flats = self.views
        else:
            self.unit.unsharded_params = self.views
        self.unit.views_backward = backward

    def wait(self) -> None:
        """The buffers may be read from here on."""
        filling = [buffer for buffer in self.buffers if buffer.filling]
        if filling:
            with self.streams.unsharding():
                for buffer in filling:
                    buffer.finish()
            self.streams.await_unshard(*[buffer.full for buffer in filling])

    def _differentiable_views(self) -> list[Tensor]:
        trained = [flat for flat in self.unit.flats if flat.trains]
        if not trained or not torch.is_grad_enabled():
            with torch.no_grad():
                return self.plain_views(self.unit.flats)
        found = iter(UnshardParams.apply(self, trained, *[flat.autograd_shard for flat in trained]))
        views: list[Tensor] = []
        for buffer in self.buffers:
            if buffer.flat.trains:
                views += [next(found) for _ in buffer.flat.params]
            else:
                with torch.no_grad():
                    views += buffer.views()
        return views

    def _differentiable_flats(self) -> list[Tensor]:
        """The flat parameters, 1-D `[layout.numel]` each; gradients of those that train arrive packed."""
        trained = [flat for flat in self.unit.flats if flat.trains and torch.is_grad_enabled()]
        found = iter(UnshardFlats.apply(self, trained, *[flat.autograd_shard for flat in trained]) if trained else ())
        return [next(found) if buffer.flat in trained else alias(buffer.full) for buffer in self.buffers]

    def plain_views(self, flats: Sequence[FlatParam]) -> list[Tensor]:
        """Full views of the parameters of `flats`, without autograd history of ours."""
        return [view for buffer in self.buffers if buffer.flat in flats for view in buffer.views()]

    def end_forward(self, inputs: Any, output: Any, keep: bool) -> None:
        """Arrange for backward; free the buffers unless `keep` or backward could not fill them again."""
        if not torch.is_grad_enabled():  # nothing was saved: the buffers go with their last views
            if self.reused:
                self._keep()
            return
        self.unit.awaiting_backward.add(self)
        self.may_free = self._hook_outputs(output)
        if self.unit.has_frozen or not self.unit.trains:
            self._hook_inputs(inputs)
        if self.may_free and self.unit.reshard_after_forward and not keep:
            self.free(keep_parts=True)

    def _hook_outputs(self, output: Any) -> bool:
        """Gather again when a gradient reaches an output.

        False if the buffers must stay: an output lies in one, or might hide tensors from us.
        """
        leaves = tree_leaves(output)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:  # an autograd leaf is an input passed through
                leaf.register_hook(self._before_backward)
        return all(isinstance(leaf, (Tensor, *_PLAIN)) and not self._holds(leaf) for leaf in leaves)

    def _holds(self, leaf: Any) -> bool:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return False
        return any(leaf.untyped_storage().data_ptr() == buffer.storage.data_ptr() for buffer in self.buffers)

    def _hook_inputs(self, inputs: Any) -> None:
        """Frozen parameters are read until the unit's inputs have their gradients, not only the trained ones'."""
        needed = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if needed:
            self.still_read = True
            handle = torch.autograd.graph.register_multi_grad_hook(needed, _weak_call(self._inputs_ready))
            weakref.finalize(self, handle.remove)  # an input that outlives this forward collects no hooks

    def _before_backward(self, _grad: Tensor) -> None:
        if self.backward != current_backward():
            self.reopen()

    def reopen(self) -> None:
        """Make the views readable for the running backward pass: gather again what was freed."""
        check_not_summoned(self.unit, "backward")
        check_no_forward_runs(self.unit)
        self.backward = current_backward()
        if any(buffer.is_shard for buffer in self.buffers):
            self._check_unchanged()  # else backward would compute with values that forward did not have
        call_after_backward(self.close, if_failed=self.drop_views)
        self.prefetch()
        self.ahead = False
        self.wait()
        self._show(self.backward)
        self._prefetch_next(BackwardPrefetch.BACKWARD_PRE)

    def prefetch(self) -> bool:
        """Begin to gather again what was freed; whether anything was."""
        freed = [buffer for buffer in self.buffers if buffer.is_free]
        if freed:
            self._check_unchanged()
            self.streams.limit()
            with torch.no_grad(), self.streams.unsharding():
                for buffer in freed:
                    buffer.start()
        return bool(freed)

    def free_ahead(self) -> None:
        """Free what was gathered ahead for nothing."""
        if self.ahead:
            self.ahead = False
            self.free(keep_parts=True)

    def gradients_ready(self) -> None:
        """All trained parameters' gradients are there: free before they are packed, if nobody reads the views now.

        Several forwards of one unit recomputed in one backward all read these views: wait for the last of them. A
        reentrant checkpoint runs a backward pass of its own within the one that opened the views.
        """
        if not (self.still_read or self._is_shared() or self.backward not in (-1, current_backward())):
            self.close()
        self._prefetch_next(BackwardPrefetch.BACKWARD_POST)

    def _inputs_ready(self) -> None:
        self.still_read = False
        if self.backward == current_backward() and not self._is_shared():
            self.close()
            self._prefetch_next(BackwardPrefetch.BACKWARD_POST)  # a frozen unit has no gradients to be ready (E-PRE-6)

    def _prefetch_next(self, when: BackwardPrefetch) -> None:
        if self.root is not None:
            self.root.prefetch_backward(self, when)

    def _is_shared(self) -> bool:
        return self.recomputed_into and len(self.unit.awaiting_backward) > 1

    def close(self) -> None:
        """The backward pass needs the views no longer: free the buffers, or keep them where that saves a gather."""
        self.unit.awaiting_backward.discard(self)
        self.drop_views()
        if self.unit.stays_unsharded and self.unit.may_keep and not any(buffer.is_free for buffer in self.buffers):
            self._keep()
            return
        if self.unit.kept_unsharded is not None:
            self._free(self.unit.kept_unsharded.buffers)
            self.unit.kept_unsharded = None
        self.free()

    def drop_views(self) -> None:
        """Let the unit forget the views: they own the node that owns the unit, and no collector sees such a ring."""
        if self.unit.unsharded_params is self.views:
            self.unit.unsharded_params = None
        if self.unit.unsharded_flats is self.views:
            self.unit.unsharded_flats = None

    def _keep(self) -> None:
        kept: KeptUnsharded | None = self.unit.kept_unsharded
        if kept is not None and kept.buffers is not self.buffers:
            self._free(kept.buffers)
        self.unit.kept_unsharded = KeptUnsharded(self.buffers, self.versions, self.full_precision)

    def _check_unchanged(self) -> None:
        if [param._version for param in self.unit.params] == self.versions.params:
            return
        for name, param, version in zip(self.unit.names, self.unit.params, self.versions.params, strict=True):
            if param._version != version:
                raise RuntimeError(
                    f"parameter {name}: expected the values of the forward pass in its backward pass, found it "
                    f"changed in place in between; run backward before the optimizer's step"
                )

    def free(self, keep_parts: bool = False) -> None:
        """Give the buffers' memory back; if `keep_parts`, but for what a smaller group gathers from again."""
        self.wait()
        self._free(self.buffers, keep_parts)

    def _free(self, buffers: Sequence[UnshardedBuffer], keep_parts: bool = False) -> None:
        filled = [buffer for buffer in buffers if not (buffer.is_shard or buffer.is_free)]
        for buffer in filled:
            buffer.free()
        for buffer in buffers if not keep_parts else ():
            buffer.part = None
        if filled:
            self.streams.note_free()


def _weak_call(method: Callable[[], None]) -> Callable[[Any], None]:
    """A hook on a node of the graph must not own the views, which own that node: no collector sees such a ring."""
    weak = weakref.WeakMethod(method)

    def hook(_grads: Any) -> None:
        target = weak()
        if target is not None:
            target()

    return hook


def open_for_recomputation(unit: Unit, full_precision: bool, streams: Streams, whole: bool) -> UnshardedUnit | None:
    """Give `unit` views while backward recomputes a forward: those of the forward that is being recomputed.

    Without one (a reentrant checkpoint ran its first forward without gradients) the recomputed forward is the real one
    and gathers for itself: what is returned.
    """
    gathered: UnshardedUnit | None = next(iter(unit.awaiting_backward), None)
    if gathered is None:
        gathered = UnshardedUnit(unit, full_precision, streams)
        gathered.open(whole)
        gathered.backward = current_backward()
        unit.awaiting_backward.add(gathered)
        call_after_backward(gathered.close, if_failed=gathered.drop_views)  # also keeps it until then
        return gathered
    gathered.recomputed_into = True
    gathered.reopen()
    return None


def holds_on_all_ranks(unit: Unit, holds: bool) -> bool:
    """Whether `holds` is true on every rank that shards `unit`: an all-reduce of one number.

    To be asked before a rank leaves out a gather, where what it knows may differ from rank to rank.
    """
    if not unit.is_sharded:
        return holds
    denials = torch.tensor([not holds], dtype=torch.float32, device=unit.device)
    collectives.start_all_reduce(denials, unit.group_name, "sum")
    collectives.wait(denials)
    return denials.item() == 0
