"""From a unit's gradients to those of its shards: pack, accumulate or reduce, wait late.

    reduce_gradients    gradients of unsharded parameters, from eager backward
    reduce_packed       gradients that a compiled graph has packed
    defer_reduce        the same, as an operator within a graph that reduces nothing itself
    update_shard        what a graph has reduced, as an operator, where the optimizer updates units in backward

All end in `reduce_or_accumulate`, which adds up gradients under no_sync and otherwise starts to average them over the
ranks, by collectives or by the user's communication hook.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_compile.comm.collectives import waiting_for
from fsdp_compile.comm.hops import hops_of
from fsdp_compile.core.autograd import check_first_order
from fsdp_compile.core.backward_pass import running_backward
from fsdp_compile.core.flat_collectives import start_average
from fsdp_compile.core.flat_param import FlatParam, find_flat_param
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.eager.accumulate import (
    accumulate,
    accumulated_alone,
    join_accumulated,
    note_unused,
    returns_gradients,
    settle_after_backward,
    take_accumulated,
    wait_for_reduce,
)
from fsdp_compile.eager.streams import NO_STREAMS, Device, Streams
from fsdp_compile.tensors.unused import mark_unused, unused_in

_REQUIRES_GRAD = attrgetter("requires_grad")

# Note [Reduces in flight]
# A reduce starts as soon as the gradients of a unit are there, and is waited for where autograd needs the result: in
# the backward of the flat shard (`ScatterGradients`), which the engine runs after everything else. So it runs beside
# the rest of backward. The input of a reduce-scatter, a unit's unsharded gradients, lives until it is waited for; so
# only those of two units may be under way (`UnitOptions.reduces_in_flight`), and the oldest unit's are waited for when
# one more starts. With streams, a second stage and the all-reduce over replicas start as soon as the reduce before them
# is enqueued. Each root has a queue: where each of several models is trained by a thread of its own, a wait for another
# model's reduce would wait for what that model's threads on other ranks do, perhaps for ever.

# Note [Deferred all-reduces]
# Under hybrid sharding a reduce has two parts: over the ranks that split a copy, and over the copies. Both are linear,
# so a sum over several backward passes may be averaged over the copies once. `set_requires_all_reduce(False)` lets the
# sum wait in `flat.deferred_all_reduce`, of a shard's size, and leaves `.grad` as it was; the next reduce with
# all-reduces adds it to its own. The sum cannot be in a graph, so such units let the eager runtime reduce.


def reduce_gradients(
    unit: Unit,
    flats: Sequence[FlatParam],
    grads: Sequence[Tensor | None],
    streams: Streams = NO_STREAMS,
    full_precision: bool = False,
) -> list[Tensor | None]:
    """Start to average the gradients of the unsharded parameters of `flats`, those that train, over the ranks.

    `grads` has one per parameter; None: unused. With `full_precision` forward ignored mixed precision. RuntimeError if
    backward was called with create_graph.

    Returns:
        For each of `flats` the gradient of its shard, 1-D `[shard_numel]`, to be read after `flat.reduction.wait()`;
        None without gradient synchronization, when gradients are accumulated unsharded on each rank.
    """
    if any(map(_REQUIRES_GRAD, [grad for grad in grads if grad is not None])):
        for name, grad in zip((name for flat in flats for name in flat.names), grads, strict=True):
            if grad is not None:
                check_first_order(name, grad)
    rest = iter(grads)
    of_flats = [list(islice(rest, len(flat.params))) for flat in flats]
    packed = (
        mark_unused(flat.pack(of_flat, unit.sent_dtype(flat, full_precision), unit.device), of_flat, flat.frozen)
        for flat, of_flat in zip(reversed(flats), reversed(of_flats), strict=True)
    )
    return reduce_packed(unit, flats, packed, streams, full_precision)


def reduce_packed(
    unit: Unit,
    flats: Sequence[FlatParam],
    packed: Iterable[Tensor | None],
    streams: Streams = NO_STREAMS,
    full_precision: bool = False,
) -> list[Tensor | None]:
    """As `reduce_gradients`, of gradients that a compiled graph has packed: `[layout.numel]` each; None: unused.

    `packed` begins with those of the last one of `flats`, as a graph does that starts reduces itself: ranks may differ
    in what they have compiled.
    """
    shard_grads = []
    for flat, grads in zip(reversed(flats), packed, strict=True):
        dtype = unit.sent_dtype(flat, full_precision)
        sent = torch.zeros(flat.layout.numel, dtype=dtype, device=unit.device) if grads is None else grads.to(dtype)
        note_unused(flat, None if grads is None else unused_in(grads))
        shard_grads.append(reduce_or_accumulate(unit, flat, sent, streams, full_precision))
    return shard_grads[::-1]


class RunningReduce(NamedTuple):
    """A reduce that was started: what completes it, and where its results are then.

    An autograd node owns it, so that it owns no flat parameter and no unit, as the options of a unit may.

    Attributes:
        path: of the unit, for errors.
        streams: in which the steps run, behind the reduce.
        mean: the average over the ranks, 1-D `[shard_numel]`, once the first step has run.
        gradient: that of the shard, in its dtype and on its device: `mean`, or a copy of it. None: the mean waits for a
            later all-reduce over replicas (Note [Deferred all-reduces]).
        steps: complete the mean, call the user's hook on it, copy it to where the shard is.
        update: what then updates the parameters by `gradient`, which autograd does not get; None: nothing does.
        to_host: whether `gradient` is in host memory, which the host may read later than compute.
    """

    path: str
    streams: Streams
    mean: Tensor
    gradient: Tensor | None
    steps: Sequence[Callable[[], object]]
    update: Callable[[Tensor], None] | None = None
    to_host: bool = False

    def finish(self) -> Callable[[], None] | None:
        """Run the steps and let compute read the results; return what lets the host read a gradient in its memory."""
        with self.streams.finishing(), waiting_for("reduce", self.path):
            for step in self.steps:
                step()
        # Compute allocated a mean that is not read yet, and may be given its memory from here on.
        self.streams.await_reduce(*([] if self.gradient is None else [self.mean]))
        event = self.streams.reduce_event() if self.to_host else None
        return None if event is None else partial(self.streams.device.block, event)


def reduce_or_accumulate(
    unit: Unit, flat: FlatParam, packed: Tensor, streams: Streams, full_precision: bool
) -> Tensor | None:
    """Accumulate `packed`, 1-D `[layout.numel]`, or start to average its sum with the accumulated gradients.

    `packed` may be overwritten. Returns the gradient of the shard; None if accumulated, or used in an update.
    """
    # What is returned can only be reduced, and apart from what was accumulated.
    is_returned = not unit.syncs and not unit.settings.same_bits and returns_gradients(flat)
    if not unit.syncs and not is_returned:
        accumulate(unit, flat, packed)
        return None
    if unit.settings.same_bits and unit.awaiting_backward:  # it ran more than once: all of that is one leaf of the sum
        accumulate(unit, flat, packed)
        _reduce_later(unit, flat)
        flat.reduction.awaits_reduce = True
        wait_for_reduce(unit)
        settle_after_backward(unit)
        return None
    reduction = flat.reduction
    if unit.reduces_in_flight.order is not None:
        unit.reduces_in_flight.order.next_in_backward("reduce", unit, flat.names[0] if len(unit.flats) > 1 else "")
    if not is_returned:
        reduction.awaits_reduce = False
        settle_after_backward(unit)
        packed = join_accumulated(unit, flat, packed)
    _begin_reduction(unit, flat)
    reduction.wait()
    reduction.full_precision = full_precision
    if unit.comm_hook is not None or unit.settings.offload:  # else the collective holds `packed` until compute waited
        streams.use_in_post_backward(packed)
    with streams.reducing(), waiting_for("reduce", unit.path, "reduce"):
        mean, complete = _start_reduce(unit, flat, packed, at_once=streams.device.has_streams)
    reduction.running = running = _what_follows(unit, flat, streams, mean, complete)
    if running.gradient is None or running.update is not None:  # autograd will not wait for it
        backward = running_backward()
        assert backward is not None  # of which that is a result
        backward.at_end(reduction.wait)
    if running.gradient is not None:
        unit.reduces_in_flight.add(reduction, unit.path, unit.options.reduces_in_flight)
    return running.gradient if running.update is None else None


def _what_follows(
    unit: Unit, flat: FlatParam, streams: Streams, mean: Tensor, complete: Callable[[], None]
) -> RunningReduce:
    """The reduce that will give `mean` when `complete` has been called, with what is to be done then."""
    options, shard, reduction = unit.options, flat.shard, flat.reduction
    if unit.replicas is not None and not options.all_reduces:
        return RunningReduce(unit.path, streams, mean, None, [complete])
    steps: list[Callable[[], object]] = [complete]
    if (hook := options.all_reduce_hook) is not None:
        stream = options.all_reduce_hook_stream
        steps.append(partial(hook, mean) if stream is None else partial(_call_in, stream, streams.device, hook, mean))
    gradient = mean
    if mean.dtype != shard.dtype or mean.device != shard.device:
        gradient = torch.empty_like(shard, pin_memory=shard.is_pinned())
        steps.append(partial(gradient.copy_, mean, non_blocking=True))
    update = None if reduction.unused.so_far else reduction.update  # what may get no gradient waits for the end
    return RunningReduce(unit.path, streams, mean, gradient, steps, update, to_host=unit.settings.offload)


def _begin_reduction(unit: Unit, flat: FlatParam) -> None:
    """Note that the running backward pass reduces; RuntimeError if it has before and sums have an order."""
    if flat.reduction.begin_in_backward() and unit.settings.same_bits:
        raise RuntimeError(
            f"unit {unit.path} runs more than once before a backward and is compiled, which reduction_order='tree' "
            f"cannot add up; compile what runs once, and call this unit's module uncompiled"
        )


def set_sync(unit: Unit, syncs: bool) -> None:
    """Choose whether backward reduces the gradients of `unit`."""
    unit.syncs = syncs
    for flat in unit.flats if unit.accumulates else ():  # made anew: a copy's flat parameters begin without
        _reduce_later(unit, flat)
        flat.reduction.awaits_reduce |= not syncs
    wait_for_reduce(unit)


def _reduce_later(unit: Unit, flat: FlatParam) -> None:
    flat.reduction.reduce_accumulated = partial(_reduce_accumulated, weakref.ref(unit), weakref.ref(flat))


def _reduce_accumulated(unit_ref: "weakref.ref[Unit]", flat_ref: "weakref.ref[FlatParam]") -> Tensor:
    """Average the accumulated gradients by themselves; a rank that has none takes part with zeros."""
    unit, flat = unit_ref(), flat_ref()
    if unit is None or flat is None:  # deleted, and the accumulated gradients with it
        return torch.zeros(())
    accumulated = accumulated_alone(unit, flat)
    if accumulated is None:
        accumulated = torch.zeros(flat.layout.numel, dtype=unit.sent_dtype(flat), device=unit.device)
    with torch.no_grad(), waiting_for("reduce", unit.path):
        reduced, complete = _start_reduce(unit, flat, accumulated)
        complete()
        if flat.deferred_all_reduce is reduced:  # and waits for a later all-reduce
            return torch.zeros_like(flat.shard)
        if unit.options.all_reduce_hook is not None:
            unit.options.all_reduce_hook(reduced)
    return reduced.to(flat.shard)


def _start_reduce(
    unit: Unit, flat: FlatParam, packed: Tensor, at_once: bool = False
) -> tuple[Tensor, Callable[[], None]]:
    """Start to average `packed`; return where the average will be, and what waits for it (`start_average`)."""
    options = unit.options
    groups = options.reduce_groups or unit.stages
    groups, replicas = hops_of(flat.wire, groups, unit.replicas, flat.reduction.full_precision)
    before_replicas = partial(_add_deferred, weakref.ref(flat), options.all_reduces) if options.has_deferred else None
    start = partial(start_average, at_once=at_once, same_bits=unit.settings.same_bits)
    if unit.comm_hook is not None and unit.reduce_by is not None:
        reduced = unit.reduce_by(unit, flat, *unit.comm_hook, packed)
        return start(reduced, (), False, replicas, None, before_replicas)  # over replicas (E-HOOK-7)
    return start(packed, groups, unit.is_sharded, replicas, unit.divisor, before_replicas)


def _add_deferred(flat_ref: "weakref.ref[FlatParam]", all_reduces: bool, reduced: Tensor) -> bool:
    """Add waiting sums to `reduced`; return whether to all-reduce it, else it waits (Note [Deferred all-reduces])."""
    flat = flat_ref()
    if flat is None:  # deleted, and its gradients with it
        return all_reduces
    if flat.deferred_all_reduce is not None:
        reduced.add_(flat.deferred_all_reduce)
    flat.deferred_all_reduce = None if all_reduces else reduced
    return all_reduces


def _call_in(stream: Any, device: Device, hook: Callable[[Tensor], Any], reduced: Tensor) -> None:
    """Run the user's `hook` on `reduced` in `stream`, and order what follows behind it."""
    device.order(device.current_stream(), stream)
    with device.run_in(stream):
        hook(reduced)
    device.order(stream, device.current_stream())


def abandon_gradients(unit: Unit) -> None:
    """Wait for reduces of `unit`, and drop all its gradients that are not reduced yet, also those in flight."""
    for flat in unit.flats:
        flat.reduction.wait_on_host()
        flat.reduction.abandon()
        take_accumulated(flat)
        flat.deferred_all_reduce = None


# --- what compiled backward passes leave to the eager runtime: bodies of marker operators -----------------------------
#
# A graph that defers its reduces decides nothing: what becomes of its gradients is decided here, as soon as they are
# packed, by the code of eager backward. A graph that reduces asks, just before, for accumulated gradients. So ranks
# that have accumulated some and ranks that have none run one reduce each, and what users did to the visible gradients
# counts.


def _flat_of(flat_param_id: Tensor) -> tuple[Unit, FlatParam]:
    flat = find_flat_param(flat_param_id)
    if flat is None or (managed := unit_of(flat.params[0])) is None:
        raise RuntimeError("backward: the model of this forward was deleted; keep it until backward has ended")
    return managed[0], flat


@torch.library.impl("fsdp_flat::defer_reduce", "default")
def _defer_reduce(
    packed: Tensor, flat_param_id: Tensor, layout: str, owned: bool = False, *, unused: Sequence[int] = ()
) -> Tensor:
    """Accumulate or reduce `packed`; if `owned`, nothing else reads or writes it from now on."""
    unit, flat = _flat_of(flat_param_id)
    full_precision = packed.dtype != unit.sent_dtype(flat)
    mine = packed if owned else packed.clone()
    note_unused(flat, unused)
    reduced = reduce_or_accumulate(unit, flat, mine, NO_STREAMS, full_precision)
    flat.reduction.defer(reduced)
    return packed.new_zeros((), dtype=torch.float32)


@torch.library.impl("fsdp_flat::update_shard", "default")
def _update_shard(grad: Tensor, flat_param_id: Tensor, at_once: bool = False) -> Tensor:
    """Update the parameters now if `at_once`: a pass says that nothing in the graph reads them any more."""
    reduction = _flat_of(flat_param_id)[1].reduction
    if at_once and reduction.update is not None:
        reduction.update(grad)
    else:
        reduction.defer(grad.clone())
    return grad.new_zeros((), dtype=torch.float32)


@torch.library.impl("fsdp_flat::add_accumulated", "default")
def _add_accumulated(packed: Tensor, flat_param_id: Tensor, in_place: bool = False) -> Tensor:
    return _join_accumulated_by_id(packed.clone(), flat_param_id)


@torch.library.impl("fsdp_flat::add_accumulated_", "default")
def _add_accumulated_in_place(packed: Tensor, flat_param_id: Tensor) -> None:
    total = _join_accumulated_by_id(packed, flat_param_id)
    if total is not packed:
        packed.copy_(total)


def _join_accumulated_by_id(packed: Tensor, flat_param_id: Tensor) -> Tensor:
    unit, flat = _flat_of(flat_param_id)
    flat.reduction.awaits_reduce &= not unit.syncs
    settle_after_backward(unit)
    _begin_reduction(unit, flat)
    return join_accumulated(unit, flat, packed)
