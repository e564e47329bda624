"""From a unit's gradients to its shards': pack, reduce, wait late.

A reduce starts as soon as a unit's gradients are there, and is waited for where autograd needs the result: in the join,
which the engine runs after everything else. A reduce-scatter's input lives until then, so only a few may be in flight.

Communication hooks: the user's function reduces a unit's gradients in place of ours.

    sharded unit    hook(state, gradients, output)     1-D, the whole flat parameter's and this rank's slice
    NO_SHARD        hook(state, gradients)             in place

The hook divides (E-HOOK-1). Those of `torch.distributed.algorithms._comm_hooks.default_hooks` do; they may also give
the tensors they get another dtype, which is why results are looked at afresh after the call.

What compiled backward passes leave to the eager runtime: the real bodies of two marker operators.

A graph that hands its gradients over reduces nothing itself: what becomes of them is decided here, as soon as they are
packed and by the same code as in eager backward. A graph that reduces asks, just before, for what no_sync has kept. So
ranks that have kept nothing and ranks that have run one reduce each, and what users do to the gradients that are shown
meanwhile counts up to this moment.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)

from fsdp_compile.comm.flat import start_average
from fsdp_compile.core.autograd import GradientReduction, check_first_order
from fsdp_compile.core.flat_param import FlatParam, flat_param_by_id
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.core.unshard_spec import NamedGroup
from fsdp_compile.eager._torch import current_backward
from fsdp_compile.eager.accumulate import accumulate, take_accumulated
from fsdp_compile.eager.streams import NO_STREAMS, Streams

IN_FLIGHT = 2
"""Reduces that may run while backward computes on: the input of one is a unit's full gradients."""

_in_flight: deque[GradientReduction] = deque()


def reduce_gradients(
    unit: Unit,
    flats: Sequence[FlatParam],
    grads: Sequence[Tensor | None],
    streams: Streams = NO_STREAMS,
    full_precision: bool = False,
) -> list[Tensor | None]:
    """Start to average the gradients of the full views over the ranks; one gradient of the shard per flat parameter.

    What is returned may be read after the flat parameter's `reduction.wait()`. None without gradient synchronisation:
    then the gradients are kept, whole and local.

    Args:
        unit: whose gradients.
        flats: those of its flat parameters that train.
        grads: one per parameter of `flats`, in full shape; None: unused.
        streams: in which reduces run.
        full_precision: whether forward left mixed precision aside.

    Raises:
        RuntimeError: a gradient has a graph of its own: backward was called with create_graph.
    """
    for name, grad in zip((name for flat in flats for name in flat.layout.names), grads, strict=True):
        if grad is not None:
            check_first_order(name, grad)
    shard_grads: list[Tensor | None] = []
    start = 0
    for flat in flats:
        part = grads[start : start + len(flat.params)]
        start += len(flat.params)
        packed = pack(flat, part, _sent_dtype(unit, flat, full_precision), unit.device)
        shard_grads.append(keep_or_reduce(unit, flat, packed, streams, full_precision))
    return shard_grads


def reduce_packed(
    unit: Unit,
    flats: Sequence[FlatParam],
    packed: Sequence[Tensor | None],
    streams: Streams = NO_STREAMS,
    full_precision: bool = False,
) -> list[Tensor | None]:
    """As `reduce_gradients`, of gradients that a compiled graph has packed: `[layout.numel]` each; None: unused."""
    shard_grads = []
    for flat, grads in zip(flats, packed, strict=True):
        dtype = _sent_dtype(unit, flat, full_precision)
        sent = torch.zeros(flat.layout.numel, dtype=dtype, device=unit.device) if grads is None else grads.to(dtype)
        shard_grads.append(keep_or_reduce(unit, flat, sent, streams, full_precision))
    return shard_grads


def _sent_dtype(unit: Unit, flat: FlatParam, full_precision: bool) -> torch.dtype:
    return flat.shard.dtype if full_precision else unit.sent_dtype(flat)


def keep_or_reduce(
    unit: Unit, flat: FlatParam, packed: Tensor, streams: Streams, full_precision: bool
) -> Tensor | None:
    """Keep `packed`, 1-D `[layout.numel]`, for later (None), or start to average it with all that was kept.

    Args:
        packed: becomes ours.
        streams, full_precision: as in `reduce_gradients`.
    """
    if not unit.syncs:
        accumulate(flat, packed)
        return None
    kept = take_accumulated(flat)
    flat.reduction.full_precision = full_precision
    return _start(unit, flat, packed if kept is None else packed.add_(kept), streams)


def pack(flat: FlatParam, grads: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Gradients in the parameters' full shapes as one tensor `[layout.numel]`; zeros where there is none."""
    empty = [s.numel for s in flat.layout.segments if s.parameter is None or grads[s.parameter] is None]
    zeros = iter(torch.zeros(sum(empty), dtype=dtype, device=device).split_with_sizes(empty))
    given = (None if s.parameter is None else grads[s.parameter] for s in flat.layout.segments)
    pieces = [next(zeros) if grad is None else grad.reshape(-1) for grad in given]
    if all(piece.dtype == dtype for piece in pieces):
        return torch.cat(pieces)
    return torch.cat(pieces, out=torch.empty(flat.layout.numel, dtype=dtype, device=device))


def _start(unit: Unit, flat: FlatParam, packed: Tensor, streams: Streams) -> Tensor:
    """Start the reduce, in the post-backward stream; return what will be the shard's gradient."""
    again = flat.reduction.backward == current_backward()  # a second forward of the unit: autograd adds the two at once
    flat.reduction.wait()
    flat.reduction.backward = current_backward()
    if unit.comm_hook is not None or unit.offload:  # else the collective holds it until compute has waited
        streams.lend(packed)
    with streams.reducing():
        reduced, arrive = _reduce(unit, packed)
    reduction, offload = flat.reduction, unit.offload  # `finish` hangs on the join: it must not own the flat parameter
    as_stored = reduced.dtype == flat.shard.dtype and reduced.device == flat.shard.device
    result = reduced if as_stored else _like(flat.shard)

    def finish() -> None:
        with streams.finishing():
            arrive()
            if result is not reduced:
                result.copy_(reduced, non_blocking=True)
        streams.await_reduce(reduced)
        event = streams.reduce_event() if offload else None
        if event is not None:
            reduction.settle = partial(streams.device.block, event)

    reduction.finish = finish
    if again:
        reduction.wait_on_host()
    _in_flight.append(reduction)
    while len(_in_flight) > IN_FLIGHT:
        _in_flight.popleft().wait()
    return result


def set_sync(unit: Unit, syncs: bool) -> None:
    """Choose whether backward reduces the gradients of `unit`."""
    unit.syncs = syncs
    for flat in unit.flats if unit.accumulates else ():  # made anew: a copy's flat parameters begin without
        flat.reduction.reduce_accumulated = partial(_reduce_kept, weakref.ref(unit), weakref.ref(flat))


def _reduce_kept(unit_ref: "weakref.ref[Unit]", flat_ref: "weakref.ref[FlatParam]") -> Tensor:
    """Average what was kept under no_sync by itself; a rank that kept nothing takes part with zeros."""
    unit, flat = unit_ref(), flat_ref()
    if unit is None or flat is None:  # deleted, and what was kept with it
        return torch.zeros(())
    kept = take_accumulated(flat)
    if kept is None:
        kept = torch.zeros(flat.layout.numel, dtype=unit.sent_dtype(flat), device=unit.device)
    with torch.no_grad():
        reduced, finish = _reduce(unit, kept)
        finish()
    return reduced.to(flat.shard)


def _like(shard: Tensor) -> Tensor:
    return torch.empty_like(shard, pin_memory=shard.is_pinned())


def _reduce(unit: Unit, packed: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Start to average `packed`; where the average will be, and what waits for it."""
    if unit.comm_hook is not None:
        return reduce_by_hook(unit, *unit.comm_hook, packed)
    replicas = None if unit.replicas is None else NamedGroup.of(unit.replicas)
    if unit.is_sharded and unit.switches.fake_reduce:
        return start_average(packed.chunk(unit.group_size)[unit.rank].clone(), (), False, replicas)
    return start_average(packed, unit.stages, unit.is_sharded, replicas)


_COMPRESSING = {fp16_compress_hook: torch.float16, bf16_compress_hook: torch.bfloat16}


def compresses(hook: Callable[..., Any]) -> bool:
    """Whether `hook` chooses the dtype on the wire itself: it is one of torch's two (E-HOOK-3)."""
    return any(hook is known for known in _COMPRESSING)


def reduce_by_hook(
    unit: Unit, state: Any, hook: Callable[..., Any], packed: Tensor
) -> tuple[Tensor, Callable[[], None]]:
    """Let `hook` reduce `packed`; where its result is, and what completes it.

    Under hybrid sharding the hook reduces over the ranks that share a copy; the mean over copies is ours (E-HOOK-7).
    """
    packed = _in_order_of_ranks(unit, packed)
    if packed.device.type == "cpu" and compresses(hook):
        reduced = _compress_on_cpu(unit, state, packed.to(_COMPRESSING[hook]))
    elif unit.is_sharded:
        reduced = _slice_of(unit, packed)
        hook(state, packed, reduced)
    else:
        reduced = packed
        hook(state, packed)
    replicas = None if unit.replicas is None else NamedGroup.of(unit.replicas)
    return start_average(reduced, (), False, replicas)


def _in_order_of_ranks(unit: Unit, packed: Tensor) -> Tensor:
    """Slice r is that of rank r: hooks reduce over the whole group, gathers in two stages order shards otherwise."""
    if len(unit.stages) == 1:
        return packed
    peers, neighbours = unit.stages
    return packed.view(neighbours.size, peers.size, -1).transpose(0, 1).reshape(-1)


def _slice_of(unit: Unit, packed: Tensor) -> Tensor:
    return packed.new_empty(packed.numel() // unit.group_size)


def _compress_on_cpu(unit: Unit, state: Any, low: Tensor) -> Tensor:
    """What torch's compressing hooks do; on CPU tensors these fail, as they record a stream (torch 2.11 to 2.13)."""
    if unit.is_sharded:
        reduced = _slice_of(unit, low)
        reduce_scatter_hook(state, low, reduced)
    else:
        reduced = low
        allreduce_hook(state, reduced)
    return reduced.to(state.parameter_type)


@torch.library.impl("fsdp_flat::defer_reduce", "default")
def _defer_reduce(packed: Tensor, number: Tensor, layout: str, owned: bool = False) -> Tensor:
    """`owned`: nothing else reads or writes `packed` from now on."""
    flat = flat_param_by_id(number)
    found = unit_of(flat.params[0]) if flat is not None else None
    if flat is None or found is None:
        raise RuntimeError("backward: expected the model of this forward, found it deleted; keep it until backward")
    unit = found[0]
    full_precision = packed.dtype != unit.sent_dtype(flat)
    mine = packed if owned else packed.clone()
    reduced = keep_or_reduce(unit, flat, mine, NO_STREAMS, full_precision)
    if reduced is not None:
        flat.reduction.results.append((current_backward(), reduced))
    return packed.new_zeros((), dtype=torch.float32)


@torch.library.impl("fsdp_flat::add_accumulated", "default")
def _add_accumulated(packed: Tensor, number: Tensor, in_place: bool = False) -> Tensor:
    kept = _take_kept(number)
    return packed.clone() if kept is None else packed + kept


@torch.library.impl("fsdp_flat::add_accumulated_", "default")
def _add_accumulated_in_place(packed: Tensor, number: Tensor) -> None:
    kept = _take_kept(number)
    if kept is not None:
        packed.add_(kept)


def _take_kept(number: Tensor) -> Tensor | None:
    flat = flat_param_by_id(number)
    if flat is None:  # the model was deleted, and what it had kept with it
        return None
    flat.reduction.backward = current_backward()
    return take_accumulated(flat)
