"""The unsharded parameters of one forward of a unit, from its all-gather to the end of its backward.

pre_forward      all-gather, unless there is one under way -> module code reads the parameters
post_forward     free, or keep until backward
pre_backward     all-gather again when the first gradient reaches an output -> recomputed module code may read them
post_backward    free once the gradients of all parameters are there -> pack and reduce these
"""

import operator
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from fsdp_compile.comm import collectives
from fsdp_compile.core._torch import (
    WITHOUT_TENSORS,
    backward_keeps_graph,
    leaves_of,
    may_change_saved_tensors,
    never_compile,
    next_node_number,
    node_number,
    register_first_hook,
)
from fsdp_compile.core.autograd import check_engine
from fsdp_compile.core.backward_pass import BackwardPass, call_with_gradients, running_backward
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.ops import equal_bits, inner_tensors
from fsdp_compile.core.sharding import changed_in_forward
from fsdp_compile.core.unit import Phase, Unit
from fsdp_compile.eager.block_reader import BlockReader
from fsdp_compile.eager.forward_pass import ForwardPass
from fsdp_compile.eager.reduce import reduce_gradients, reduce_packed
from fsdp_compile.eager.streams import KeptUnsharded, UnshardedBuffer, Values, finish_filling

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
# another way (a global list, a closure): the buffers stay, as they do where an output may have tensors inside. Where
# the last of these gets no gradient, eager/early_entry.py gathers. What both miss is an error, by the counters above.
#
# The views own the autograd node that made them. A strong reference from that node, or from a hook on it, to the
# `UnshardedUnit` that owns the views would close a cycle through C++ that Python's garbage collector does not see; so
# nodes and hooks on inputs refer to it weakly. Hooks on the outputs own it: it goes when the graph goes.

_VERSION = operator.attrgetter("_version")
Exit = tuple[int, weakref.ref[Any], weakref.ref[Tensor]]  # number of a node, what dies with that, and what it made


class UnshardParams(torch.autograd.Function):
    """From flat parameters that train to their unsharded parameters.

    Backward frees these, packs their gradients and starts to reduce them. For a compiled block the unsharded parameters
    are flat: its graph splits them and packs their gradients.
    """

    @staticmethod
    def forward(ctx: Any, gathered: "UnshardedUnit", flats: list[FlatParam], *deferred: Tensor) -> tuple[Tensor, ...]:
        """Return the unsharded parameters of `flats`, or flat ones `[layout.numel]`; `deferred`: those of `flats`."""
        ctx.set_materialize_grads(False)
        ctx.unit, ctx.flats, ctx.gathered = gathered.unit, flats, weakref.ref(gathered)
        ctx.as_flats, ctx.signals = gathered.reader is not None, [each.detach() for each in deferred]
        ctx.streams, ctx.full_precision = gathered.streams, gathered.values.full_precision
        buffers = [buffer for buffer in gathered.buffers if buffer.flat in flats]
        if ctx.as_flats:
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
        """Leave the shards' gradients, being reduced, to `ScatterGradients`; return a scalar where there is one."""
        check_engine(ctx.flats[0].names[0])
        with collectives.profiled("post", ctx.unit.path):
            if (gathered := ctx.gathered()) is not None:
                gathered.gradients_ready()
            if ctx.as_flats:
                reduced: dict[FlatParam, Tensor | None] = {}
                if gathered is not None:
                    reduced, gathered.reader.reduced = gathered.reader.reduced, {}
                rest = {flat: grad for flat, grad in zip(ctx.flats, grads, strict=True) if flat not in reduced}
                others = reduce_packed(ctx.unit, [*rest], reversed(rest.values()), ctx.streams, ctx.full_precision)
                reduced |= dict(zip(rest, others, strict=True))
                shard_grads = [reduced[flat] for flat in ctx.flats]
            else:
                shard_grads = reduce_gradients(ctx.unit, ctx.flats, grads, ctx.streams, ctx.full_precision)
            for listen in gathered.forward.root.heard.after_reduce if gathered is not None else ():
                listen(gathered)
            left = zip(ctx.flats, shard_grads, ctx.signals, strict=True)
            return (None, None, *[signal if flat.reduction.defer(grad) else None for flat, grad, signal in left])


class State(Enum):
    """What reads the unsharded parameters of one forward. `TRANSITIONS` has the changes that are allowed."""

    GATHERED = "gathered for a forward"
    FORWARD = "read by its forward"
    WAITING = "waiting for backward"  # freed, or kept where that saves an all-gather
    PREFETCHED = "gathered again for backward"
    BACKWARD = "read by backward"
    LENT = "lent to a recomputed forward"  # in backward, until that reaches the outputs of the forward itself
    ENDED = "ended"
    __hash__ = object.__hash__  # that of Enum is a Python function


TRANSITIONS = {
    State.GATHERED: {State.FORWARD, State.ENDED},
    State.FORWARD: {State.WAITING, State.ENDED},
    State.WAITING: {State.PREFETCHED, State.BACKWARD, State.LENT, State.ENDED},
    State.PREFETCHED: {State.WAITING, State.BACKWARD, State.LENT},
    State.BACKWARD: {State.WAITING, State.BACKWARD, State.LENT, State.ENDED},  # itself: in a pass within the pass
    State.LENT: {State.WAITING, State.PREFETCHED, State.BACKWARD, State.LENT},
    State.ENDED: {State.BACKWARD},  # another part of its graph, with nodes of its own
}


class Lifetime(Enum):
    """How long the memory of the unsharded parameters has to live."""

    UNTIL_BACKWARD = "until the end of backward"  # which cannot gather again what is freed after the forward
    WHILE_READ = "while forward or backward reads it"
    WHILE_HELD = "as long as anything holds it"  # a graph that a backward pass made, a transform, an output inside it


class Reader(Enum):
    """Who else reads unsharded parameters in a backward pass."""

    FROZEN_PARAMETERS = "frozen parameters"  # until the unit's inputs have their gradients
    TRAINED_PARAMETERS = "trained parameters"  # beside frozen ones: until the gradients of those that train are there
    OWN_RECOMPUTED_FORWARD = "recomputed forward"  # of a checkpoint within the unit
    RECOMPUTED_FORWARD = "another recomputed forward"  # perhaps of another forward of the unit
    __hash__ = object.__hash__


class Opened(NamedTuple):
    """What was noted when module code began to read the views."""

    watched: list[Tensor]  # one view of each version counter
    versions: list[int]  # the counters
    first_node: int  # the number of the first node that autograd makes in this forward
    way: Any  # a node that each backward comes to that reads the parameters; None if none does


class Exits(NamedTuple):
    """How tensors leave a forward, beside those whose hooks gather again for backward."""

    opaque: type | None  # of an output that may have tensors inside
    is_left: bool  # whether forward computed something after all tensors that have hooks


class UnshardedUnit:
    """The unsharded parameters that one forward of `unit` reads, and the buffers beneath them.

    Making one starts the all-gather, unless an earlier backward pass has left buffers with the same values.

    Args:
        full_precision: whether mixed precision is ignored.
        forward: the forward of the root, or of a module outside of one, that it belongs to.

    Attributes:
        values: what the buffers were gathered from.
        backward: the backward pass that last read the parameters, or None.
        readers: who else reads the parameters in that backward pass.
        last_exit: of the tensors that leave its forward with hooks, the one that autograd made last.
        reader: of the flat parameters, if a block that was compiled by itself splits them; or None.
        previous: the forward of a unit that ended before this one.
    """

    def __init__(self, unit: Unit, full_precision: bool, forward: ForwardPass) -> None:
        self.unit, self.forward, self.streams = unit, forward, forward.root.streams_for(unit.device)
        self.values = Values(tuple(unit.params), unit.version_counters(), full_precision)
        self.state, self.lifetime, self.readers = State.GATHERED, Lifetime.UNTIL_BACKWARD, set[Reader]()
        self.reader: BlockReader | None = None
        self.backward: BackwardPass | None = None
        self.last_exit: Exit | None = None
        self.previous: weakref.ref[UnshardedUnit] | None = None
        self.views: list[Tensor] = []
        if (kept := self._take_kept()) is not None:
            self.buffers = kept.buffers
            return
        self.streams.limit()
        with torch.no_grad(), self.streams.unsharding(), collectives.profiled("all_gather", unit.path):
            self.buffers = [UnshardedBuffer(unit, flat, full_precision) for flat in unit.flats]
            for buffer in self.buffers:
                buffer.start()

    def enter(self, state: State) -> None:
        """Change the state, as `TRANSITIONS` allows."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"{self.unit} cannot change from {self.state.value} to {state.value}")
        self.state = state

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
        usable = earlier is not None and earlier.values[1:] == self.values[1:]
        usable &= earlier is not None and not any(buffer.is_free for buffer in earlier.buffers)
        usable = collectives.holds_on_all_ranks(usable, unit.group.name, unit.device)
        if earlier is None:
            return None
        if not usable:
            self._free(earlier.buffers)
            return None
        unit.keep_unsharded |= not torch.is_grad_enabled()  # a forward without gradients leaves them for the next
        return earlier

    def is_current(self) -> bool:
        """Whether the parameters are still those that were gathered, except edits through `.data` (E-STRAT-10)."""
        params, versions, _ = self.values
        return all(map(operator.is_, params, self.unit.params)) and self.unit.version_counters() == versions

    def drop(self) -> None:
        """Free what was gathered for a forward that does not read it."""
        self.enter(State.ENDED)
        self.free()

    def hold(self) -> None:
        """Leave the memory to what holds it: nothing of this forward is freed or gathered again."""
        self.lifetime = Lifetime.WHILE_HELD

    # --- forward ------------------------------------------------------------------------------------------------------

    def pre_forward(self, compiled: Callable[..., Any] | None, is_alone: bool) -> None:
        """Wait for the all-gather and let module code read the parameters, or `compiled`, a block's, the flat ones.

        `is_alone`: no other module reads them in the same forward.
        """
        if torch.is_grad_enabled() and may_change_saved_tensors() and not all(b.is_shard for b in self.buffers):
            raise RuntimeError(
                f"parameter {self.unit.flats[0].names[0]}: sharded modules cannot run within "
                f"torch.autograd.graph.allow_mutation_on_saved_tensors: where parameters are gathered again "
                f"for backward, it would copy what was there before"
            )
        if compiled is not None:
            full_precision = self.values.full_precision
            self.reader = BlockReader(self.unit, compiled, self.buffers, self.streams, is_alone, full_precision)
        if self.reader is None or not self.reader.has_waited:
            self.wait()
        self._make_views()
        self.enter(State.FORWARD)
        self.show()  # last: what is raised before leaves nothing open

    def _make_views(self) -> None:
        unit, as_flats = self.unit, self.reader is not None
        trained = [flat for flat in unit.flats if flat.trains] if torch.is_grad_enabled() else []
        differentiable = UnshardParams.apply(self, trained, *[flat.deferred for flat in trained]) if trained else ()
        views: list[Tensor] = []
        starts, rest = [], iter(differentiable)
        for buffer in self.buffers:
            starts.append(len(views))
            if buffer.flat in trained:
                views += islice(rest, 1 if as_flats else len(buffer.flat.params))
            else:
                with torch.no_grad():
                    views += [buffer.flat_view()] if as_flats else buffer.views()
        if not as_flats and unit.tensor_parallel:
            views = unit.distributed(views, self.values.full_precision)
            for buffer, start in zip(self.buffers, starts, strict=True):  # DTensors have counters of their own
                buffer.count(*views[start : start + len(buffer.flat.params)])
        counted = views if unit.tensor_parallel else [views[start] for start in starts]  # a counter for each buffer
        watched = [] if as_flats or torch.is_inference_mode_enabled() else counted  # inference mode counts no versions
        self.views = views
        way = next((each.grad_fn for each in differentiable if each.requires_grad), None)
        self.opened = Opened(watched, list(map(_VERSION, watched)), next_node_number(), way)

    def show(self) -> None:
        """Let module code, or the graph of a compiled block, read the parameters."""
        if self.reader is not None:
            self.reader.offer(self.views, self._packs_all)
        self.unit.show_unsharded(self.views, self.reader is not None)

    def hide(self) -> None:
        """Hide the parameters from module code."""
        self.unit.hide_unsharded(self.views)

    def wait(self) -> None:
        """Order compute after the all-gathers."""
        finish_filling(self.buffers, self.streams)

    def check_unwritten(self, cause: BaseException | None = None) -> None:
        """Raise RuntimeError if forward changed the unit's parameters in place, where the change would be lost.

        `cause` is what forward raised, as autograd may have refused the change.
        """
        refused = cause is not None and re.search(rf"Output (\d+) of {UnshardParams.__name__}", str(cause))
        unchanged = list(map(_VERSION, self.opened.watched)) == self.opened.versions
        if not refused and (unchanged or all(buffer.is_shard for buffer in self.buffers)):
            return
        trained = [name for flat in self.unit.flats if flat.trains for name in flat.names]
        names = trained[int(refused[1]) :][:1] if refused and self.reader is None else self.unit.names
        raise RuntimeError(changed_in_forward(self.find_changed() or names)) from cause

    def find_changed(self) -> list[str]:
        """The names of parameters that lost the values that were gathered, as far as this rank stores them.

        Finds what version counters do not count: writes through `.data`. Reads the unit's shard once and waits for the
        device once for each parameter.
        """
        changed: list[str] = []
        views = iter(self.views if self.reader is None else chain(*[buffer.views() for buffer in self.buffers]))
        for buffer in self.buffers:
            flat = buffer.flat
            stored = flat.split(flat.shard.detach())
            for name, record, mine in zip(flat.names, flat.records, stored, strict=True):
                view = next(inner_tensors(next(views)))
                if record is None:
                    continue
                same_size = view.numel() > record.last
                here = view.detach().reshape(-1)[record.first : record.last + 1] if same_size else None
                there = mine.to(device=view.device, dtype=buffer.full.dtype)
                if here is None or here.dtype != there.dtype or not equal_bits(here, there):
                    changed.append(name)
        return changed

    def post_forward(self, inputs: Sequence[Any], output: Any, kept: Iterable[Tensor], keep: bool) -> Exits | None:
        """Prepare for backward; free the buffers unless `keep`, or backward could not fill them again.

        `kept`: what modules keep, among which may be tensors that this forward made. None if no backward follows, or
        the buffers stay as long as anything holds them.
        """
        if self.reader is not None and self.reader.awaits:
            self.wait()  # for what the graph has not read
        if not torch.is_grad_enabled():  # nothing was saved: the buffers go with their last views
            self.enter(State.ENDED)
            if self.unit.keep_unsharded:  # an earlier backward pass has left them
                self._keep_unsharded()
            return None
        self.enter(State.WAITING)
        self.unit.awaiting_backward[self] = None
        given = [each for value in inputs for each in leaves_of(value) if isinstance(each, Tensor)]
        exits = self._hook_outputs(given, output, kept)
        if not self.unit.only_trains:
            self._hook_inputs(given)
        if self.lifetime is Lifetime.WHILE_HELD:
            return None
        if not (exits.opaque or exits.is_left):
            self.lifetime = Lifetime.WHILE_READ
            if not keep:
                self.free(keep_slices=True)
        return exits

    def _hook_outputs(self, given: list[Tensor], output: Any, kept: Iterable[Tensor]) -> Exits:
        """Gather again when a gradient reaches an output, or another tensor that forward made and that still is there.

        An output that lies in a buffer holds it.
        """
        memory = {buffer.storage.data_ptr() for buffer in self.buffers}
        hooked: dict[int, Exit] = {}
        opaque: type | None = None
        for leaf in leaves_of(output):
            if not isinstance(leaf, Tensor):
                opaque = opaque or (None if isinstance(leaf, WITHOUT_TENSORS) else type(leaf))
                continue
            if leaf.layout is torch.strided:
                parts = (leaf,) if type(leaf) is Tensor else inner_tensors(leaf)
                if any(part.untyped_storage().data_ptr() in memory for part in parts):
                    self.lifetime = Lifetime.WHILE_HELD
            if leaf.grad_fn is None:  # an autograd leaf is an input passed through
                continue
            hooked[id(leaf)] = self._register_hook(leaf)
            # If a view is then changed in place, autograd drops its node and keeps that of its base. If the base is an
            # input, that node belongs to another unit.
            node = None if leaf._base is None else leaf._base.grad_fn
            if node and all((each if each._base is None else each._base).grad_fn is not node for each in given):
                node.register_prehook(self.before_backward)
        for each in (*kept, *given):
            if id(each) not in hooked and node_number(each) >= self.opened.first_node:
                hooked[id(each)] = self._register_hook(each)
        last = self.last_exit = max(hooked.values(), key=operator.itemgetter(0), default=None)
        return Exits(opaque, next_node_number() > (self.opened.first_node if last is None else last[0] + 1))

    def _register_hook(self, tensor: Tensor) -> Exit:
        hooks = register_first_hook(tensor, self.before_backward)  # before those that forward has registered
        return node_number(tensor), hooks, weakref.ref(tensor)

    def _hook_inputs(self, given: list[Tensor]) -> None:
        """Frozen parameters are read until the unit's inputs have their gradients."""
        if needed := [each for each in given if each.requires_grad]:
            self.readers.add(Reader.FROZEN_PARAMETERS)
            if self.unit.trains:  # autograd computes the gradient of an input that is a leaf before those of parameters
                self.readers.add(Reader.TRAINED_PARAMETERS)
            else:
                ways = (get_gradient_edge(each).node for each in needed if node_number(each) < self.opened.first_node)
                self.opened = self.opened._replace(way=next(ways, None))  # others have hooks that own this
            # An input that outlives this forward collects no hooks.
            weakref.finalize(self, call_with_gradients(needed, weakref.WeakMethod(self._inputs_ready)))

    # --- backward -----------------------------------------------------------------------------------------------------

    @never_compile
    def before_backward(self, _grad: Any) -> None:
        """The running pass is about to read the parameters: a hook of autograd."""
        backward = running_backward()
        assert backward is not None  # the engine calls this
        if torch.is_grad_enabled():
            self.lifetime = Lifetime.WHILE_HELD
        if self.backward is not backward:
            with collectives.profiled("pre", self.unit.path):
                self.pre_backward(backward)
        elif self in self.unit.awaiting_backward and not any(buffer.is_free for buffer in self.buffers):
            self.enter(State.BACKWARD)  # a recomputed forward opened it; another may have hidden it since
            self.unit.show_unsharded(self.views, self.reader is not None)
        elif self.state is State.LENT:
            self.enter(State.WAITING)

    def pre_backward(self, backward: BackwardPass, state: State = State.BACKWARD) -> None:
        """Let the running pass `backward` read the parameters: gather again what was freed."""
        unit, root, was_prefetched = self.unit, self.forward.root, self.state is State.PREFETCHED
        unit.check_not_summoned("backward")
        if unit.phase is Phase.FORWARD:  # its parameters would be freed at the end of this backward (E-BWD-3)
            raise ValueError(
                f"backward reached {unit} while a forward of it runs, as the backward of an earlier forward was "
                f"called within: end the forward first"
            )
        self.backward = backward
        if any(buffer.is_shard for buffer in self.buffers):
            self._check_unchanged()  # else backward would compute with values that forward did not have
        backward.at_end(self.post_backward, if_failed=self._fail_backward)
        for listen in root.heard.before_backward:
            listen(self, backward, was_prefetched)
        if any(buffer.is_free for buffer in self.buffers):
            self._check_unchanged()
            self._gather_again()
        awaits = self.reader is not None and self.reader.awaits
        if not awaits:
            self.wait()
        for buffer in self.buffers if awaits else ():
            buffer.allow_reads()
        self.enter(state)
        self.show()
        for listen in root.heard.in_backward:
            listen(self, backward)

    def _fail_backward(self) -> None:
        if self.state in (State.BACKWARD, State.LENT):
            self.enter(State.WAITING)
        self.hide()
        if self.reader is not None:
            self.reader.reduced.clear()
        self.leave_unread()

    def leave_unread(self) -> None:
        """Leave what is being gathered to the root's next forward: other ranks may not take part for a while."""
        self.forward.root.unread.extend(buffer for buffer in self.buffers if buffer.filling)

    def recompute(self) -> None:
        """Note that a recomputed forward reads the open parameters; the second in a backward pass is another one."""
        own = Reader.OWN_RECOMPUTED_FORWARD
        self.readers.add(own if own not in self.readers else Reader.RECOMPUTED_FORWARD)

    def _gather_again(self) -> bool:
        """Begin to gather again what was freed; return whether anything was."""
        freed = [buffer for buffer in self.buffers if buffer.is_free]
        if freed:
            self.streams.limit()
            with torch.no_grad(), self.streams.unsharding(), collectives.profiled("all_gather", self.unit.path):
                for buffer in reversed(freed):  # backward reads the last parameters first
                    buffer.start()
        return bool(freed)

    def prefetch(self) -> bool:
        """Begin to gather again for backward, if anything was freed; return whether it was."""
        if self.state not in (State.WAITING, State.LENT, State.PREFETCHED) or not self._gather_again():
            return False
        if self.state is not State.PREFETCHED:
            self.enter(State.PREFETCHED)
        return True

    def free_prefetched(self) -> None:
        """Free what was gathered again but not read."""
        if self.state is State.PREFETCHED:
            self.enter(State.WAITING)
            self.free(keep_slices=True)

    def _packs_all(self) -> bool:
        """Whether the gradients that a compiled block packs now are all that the unit gets of this forward."""
        return (
            self.readers.isdisjoint((Reader.RECOMPUTED_FORWARD, Reader.OWN_RECOMPUTED_FORWARD))
            and self.backward is running_backward()
            and self in self.unit.awaiting_backward
        )

    def gradients_ready(self) -> None:
        """All gradients of trained parameters are there: free the parameters, unless something still reads them.

        Parts of one unit that are recomputed in one backward pass all read these parameters: the last closes them. A
        reentrant checkpoint runs a backward pass of its own within the one that opened them.
        """
        self.readers.discard(Reader.TRAINED_PARAMETERS)
        backward = running_backward()
        in_this_pass = self.backward is None or self.backward is backward
        if in_this_pass and Reader.FROZEN_PARAMETERS not in self.readers and not self._is_shared():
            self.post_backward()
        for listen in self.forward.root.heard.after_backward:
            listen(self, backward)

    @never_compile
    def _inputs_ready(self) -> None:
        self.readers.discard(Reader.FROZEN_PARAMETERS)
        if Reader.TRAINED_PARAMETERS in self.readers:
            return  # `gradients_ready` follows, or else the end of the backward pass
        backward = running_backward()
        if self.backward is backward and not self._is_shared():
            self.post_backward()
            for listen in self.forward.root.heard.after_backward:  # a frozen unit gets no gradients (E-PRE-6)
                listen(self, backward)

    def _is_shared(self) -> bool:
        return Reader.RECOMPUTED_FORWARD in self.readers and len(self.unit.awaiting_backward) > 1

    def post_backward(self) -> None:
        """End backward: free the buffers, or keep them where that saves an all-gather."""
        if self.state is State.ENDED:  # at the end of the pass, if its gradients were there before
            return
        unit, is_within = self.unit, self.state is State.FORWARD
        if is_within:
            self.hold()  # forward itself has called backward: what else it has computed has no hooks yet
        if self.state is not State.LENT:  # else its own backward may follow
            after = State.WAITING if backward_keeps_graph() else State.ENDED
            if after is State.ENDED:
                unit.awaiting_backward.pop(self, None)
            if self.state is not after:
                self.enter(after)
        self.hide()
        unit.casts_closed = is_within and not self.values.full_precision
        if self.lifetime is Lifetime.WHILE_HELD:
            return
        if unit.keep_unsharded and not (unit.reshard_after_backward or any(buffer.is_free for buffer in self.buffers)):
            self._keep_unsharded()
            return
        if unit.kept is not None:
            self._free(unit.kept.buffers)
            unit.kept = None
        self.free()

    def _keep_unsharded(self) -> None:
        if (earlier := self.unit.kept) is not None and earlier.buffers is not self.buffers:
            self._free(earlier.buffers)
        self.unit.kept = KeptUnsharded(self.buffers, self.values)

    def _check_unchanged(self) -> None:
        unit, versions, changed = self.unit, self.values.versions, ""
        if unit.version_counters() == versions:  # in C
            return
        for flat, version in zip(unit.flats, versions.shards[::2], strict=True):
            if flat.shard._version != version:  # of all that lies in the shard
                changed = f"{flat.names[0]} or another one"
        params = zip(unit.names, unit.params, versions.params, strict=True)
        if unit.is_sharded:  # else they share the shard's counter
            changed = next((name for name, param, version in params if param._version != version), changed)
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
