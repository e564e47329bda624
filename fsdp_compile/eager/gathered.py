"""One forward's full views of a unit, from gather to the end of its backward.

    forward:   gather -> module code reads the views -> free
    backward:  gather again (first gradient reaches an output) -> module code may read the views (recomputation) ->
               free (all gradients of the views are there) -> pack, reduce

Freeing resizes the storage to zero bytes: autograd's saved views stay valid objects and are filled again in place.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile import collectives
from fsdp_compile.eager.reduce import reduce_gradients
from fsdp_compile.eager.torch_private import call_after_backward, current_backward, tree_leaves
from fsdp_compile.flat_param import FlatParam
from fsdp_compile.ops import alias, view_parameters
from fsdp_compile.unit import Unit

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


class FullBuffer:
    """A flat parameter in full, `[layout.numel]`, in the dtype and on the device that its unit computes in.

    Where the shard is that already (NO_SHARD in the parameters' own dtype) it is the shard's memory, never freed.
    """

    def __init__(self, unit: Unit, flat: FlatParam, dtype: torch.dtype) -> None:
        self.unit, self.flat = unit, flat
        self.is_shard = not unit.is_sharded and dtype == flat.shard.dtype and unit.device == flat.shard.device
        self.full = (
            alias(flat.shard) if self.is_shard else torch.empty(flat.layout.numel, dtype=dtype, device=unit.device)
        )
        self.storage = self.full.untyped_storage()
        self.nbytes = self.storage.nbytes()
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
        shard = self.flat.shard.to(device=self.full.device, dtype=self.full.dtype, non_blocking=True)
        unit = self.unit
        self.filling = unit.is_sharded and not unit.switches.fake_all_gather
        if self.filling:
            collectives.start_all_gather(self.full, shard, unit.group_size, unit.group_name, unit.rank)
        elif not unit.is_sharded:
            self.full.copy_(shard)

    def wait(self) -> None:
        """It may be read from here on."""
        if self.filling:
            collectives.wait(self.full)
            self.filling = False

    def views(self) -> list[Tensor]:
        """The parameters' full views. Their version counter is not this buffer's: filling it again is no change."""
        return view_parameters(alias(self.full), self.flat.layout.text)

    def free(self) -> None:
        """Give the memory back; views stay valid objects and may be read after the next fill."""
        self.wait()
        if not self.is_shard:
            self.storage.resize_(0)


class Gathered:
    """The full views that one forward of `unit` gathered, and the buffers beneath them.

    Owned by the graph of that forward, through the hooks on its outputs: it goes when the graph goes.
    """

    def __init__(self, unit: Unit, full_precision: bool = False) -> None:
        self.unit, self.full_precision = unit, full_precision
        self.root: Any = None  # eager.root.Root
        self.before: weakref.ref[Gathered] | None = None  # the forward that ended before this one
        unit.refresh()
        self.buffers = [
            FullBuffer(unit, flat, flat.shard.dtype if full_precision else unit.compute_dtype(flat))
            for flat in unit.flats
        ]
        self.versions = [param._version for param in unit.params]
        self.backward = -1  # the backward pass that has opened the views
        self.recomputed_into = False  # whether a forward recomputed in backward reads these views
        self.still_read = False  # whether frozen parameters may be read after the trained ones have their gradients
        with torch.no_grad():
            for buffer in self.buffers:
                buffer.start()

    def open(self) -> None:
        """Wait for the gather; give the unit its views."""
        for buffer in self.buffers:
            buffer.wait()
        self.views = self._differentiable_views()
        self.unit.views, self.unit.views_backward = self.views, current_backward()

    def _differentiable_views(self) -> list[Tensor]:
        trained = [flat for flat in self.unit.flats if flat.trains]
        if not trained or not torch.is_grad_enabled():
            with torch.no_grad():
                return self.plain_views(self.unit.flats)
        found = iter(_FullViews.apply(self, trained, *[flat.handle for flat in trained]))
        views: list[Tensor] = []
        for buffer in self.buffers:
            if buffer.flat.trains:
                views += [next(found) for _ in buffer.flat.params]
            else:
                with torch.no_grad():
                    views += buffer.views()
        return views

    def plain_views(self, flats: Sequence[FlatParam]) -> list[Tensor]:
        """Full views of the parameters of `flats`, without autograd history of ours."""
        return [view for buffer in self.buffers if buffer.flat in flats for view in buffer.views()]

    def end_forward(self, inputs: Any, output: Any, keep: bool) -> None:
        """Arrange for backward; free the buffers unless `keep` or backward could not fill them again."""
        if not torch.is_grad_enabled():
            return  # nothing was saved: the buffers go with their last views
        self.unit.awaiting_backward.add(self)
        hooked = self._hook_outputs(output)
        if self.unit.has_frozen or not self.unit.trains:
            self._hook_inputs(inputs)
        if hooked and self.unit.reshard_after_forward and not keep:
            self.free()

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
        self.backward = current_backward()
        call_after_backward(self.close)
        self.prefetch()
        for buffer in self.buffers:
            buffer.wait()
        self.unit.views, self.unit.views_backward = self.views, self.backward
        if self.root is not None:
            self.root.prefetch_backward(self, BackwardPrefetch.BACKWARD_PRE)

    def prefetch(self) -> bool:
        """Begin to gather again what was freed; whether anything was."""
        freed = [buffer for buffer in self.buffers if buffer.is_free]
        if freed:
            self._check_unchanged()
        with torch.no_grad():
            for buffer in freed:
                buffer.start()
        return bool(freed)

    def free_if_unused(self) -> None:
        """At the end of a backward pass for which this was gathered ahead: free it if nothing read it (E-PRE-5)."""
        if self.backward == -1 and self.unit.reshard_after_forward:
            self.free()

    def gradients_ready(self) -> None:
        """All trained parameters' gradients are there: free before they are packed, if nobody reads the views now.

        Several forwards of one unit recomputed in one backward all read these views: wait for the last of them. A
        reentrant checkpoint runs a backward pass of its own within the one that opened the views.
        """
        if not (self.still_read or self._is_shared() or self.backward not in (-1, current_backward())):
            self.close()
        if self.root is not None:
            self.root.prefetch_backward(self, BackwardPrefetch.BACKWARD_POST)

    def _inputs_ready(self) -> None:
        self.still_read = False
        if self.backward == current_backward() and not self._is_shared():
            self.close()

    def _is_shared(self) -> bool:
        return self.recomputed_into and len(self.unit.awaiting_backward) > 1

    def close(self) -> None:
        """The backward pass needs the views no longer: free the buffers."""
        self.unit.awaiting_backward.discard(self)
        if self.unit.views is self.views:
            self.unit.views = None
        self.free()

    def _check_unchanged(self) -> None:
        for name, param, version in zip(self.unit.names, self.unit.params, self.versions, strict=True):
            if param._version != version:
                raise RuntimeError(
                    f"parameter {name}: expected the values of the forward pass in its backward pass, found it "
                    f"changed in place in between; run backward before the optimizer's step"
                )

    def free(self) -> None:
        """Give the buffers' memory back."""
        for buffer in self.buffers:
            buffer.free()


class _FullViews(torch.autograd.Function):
    """The full views of the flat parameters that train; backward frees them, packs their gradients and reduces them.

    Note on lifetime: the views own this node, so it must not own the `Gathered` that owns the views.
    """

    @staticmethod
    def forward(ctx: Any, gathered: Gathered, flats: list[FlatParam], *handles: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.unit, ctx.flats, ctx.gathered = gathered.unit, flats, weakref.ref(gathered)
        ctx.full_precision = gathered.full_precision
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
        gathered = ctx.gathered()
        if gathered is not None:
            gathered.gradients_ready()
        return (None, None, *reduce_gradients(ctx.unit, ctx.flats, grads, ctx.full_precision))


def open_for_recomputation(unit: Unit, full_precision: bool) -> Gathered | None:
    """Give `unit` views while backward recomputes a forward: those of the forward that is being recomputed.

    Without one (a reentrant checkpoint ran its first forward without gradients) the recomputed forward is the real one
    and gathers for itself: what is returned.
    """
    gathered: Gathered | None = next(iter(unit.awaiting_backward), None)
    if gathered is None:
        gathered = Gathered(unit, full_precision)
        gathered.open()
        gathered.backward = current_backward()
        unit.awaiting_backward.add(gathered)
        call_after_backward(gathered.close)  # also keeps it until then
        return gathered
    gathered.recomputed_into = True
    gathered.reopen()
    return None


def _weak_call(method: Callable[[], None]) -> Callable[[Any], None]:
    """A hook on a node of the graph must not own the views, which own that node: no collector sees such a ring."""
    weak = weakref.WeakMethod(method)

    def hook(_grads: Any) -> None:
        target = weak()
        if target is not None:
            target()

    return hook
