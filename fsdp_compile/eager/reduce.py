"""From a unit's gradients to its shards': pack, reduce, wait late.

A reduce starts as soon as a unit's gradients are there, and is waited for where autograd needs the result: in the join,
which the engine runs after everything else. A reduce-scatter's input lives until then, so only a few may be in flight.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsdp_compile import collectives
from fsdp_compile.eager.accumulate import add_unsynced, keep_unsynced
from fsdp_compile.eager.torch_private import current_backward
from fsdp_compile.flat_param import Arrival, FlatParam
from fsdp_compile.unit import Unit

IN_FLIGHT = 2
"""Reduces that may run while backward computes on: the input of one is a unit's full gradients."""

_in_flight: deque[Arrival] = deque()


def reduce_gradients(unit: Unit, flats: Sequence[FlatParam], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Start to average the gradients of the full views over the ranks; one gradient of the shard per flat parameter.

    What is returned may be read after the flat parameter's `arrival.wait()`. None without gradient synchronisation:
    then the gradients are kept, whole and local.
    """
    shard_grads: list[Tensor | None] = []
    start = 0
    for flat in flats:
        part = grads[start : start + len(flat.params)]
        start += len(flat.params)
        packed = pack(flat, part, unit.reduce_dtype(flat), unit.device)
        if unit.syncs:
            shard_grads.append(_start(unit, flat, add_unsynced(flat, packed)))
        else:
            keep_unsynced(flat, packed)
            shard_grads.append(None)
    return shard_grads


def pack(flat: FlatParam, grads: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Gradients in the parameters' full shapes as one tensor `[layout.numel]`; zeros where there is none."""
    pieces = []
    for segment in flat.layout.segments:
        grad = None if segment.parameter is None else grads[segment.parameter]
        pieces.append(torch.zeros(segment.numel, dtype=dtype, device=device) if grad is None else grad.reshape(-1))
    if all(piece.dtype == dtype for piece in pieces):
        return torch.cat(pieces)
    return torch.cat(pieces, out=torch.empty(flat.layout.numel, dtype=dtype, device=device))


def _start(unit: Unit, flat: FlatParam, packed: Tensor) -> Tensor:
    """Start the reduce; return what will be the shard's gradient."""
    again = flat.arrival.backward == current_backward()  # a second forward of the unit: autograd adds the two at once
    flat.arrival.wait()
    flat.arrival.backward = current_backward()
    reduced, finish = _reduce(unit, packed)
    result = reduced
    if reduced.dtype != flat.shard.dtype or reduced.device != flat.shard.device:
        result = torch.empty_like(flat.shard)
        arrive = finish

        def finish() -> None:
            arrive()
            result.copy_(reduced)

    flat.arrival.finish = finish
    if again:
        flat.arrival.wait()
    _in_flight.append(flat.arrival)
    while len(_in_flight) > IN_FLIGHT:
        _in_flight.popleft().wait()
    return result


def _reduce(unit: Unit, packed: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Start to average `packed`; where the average will be, and what waits for it."""
    if unit.comm_hook is not None:
        return _reduce_by_hook(unit, packed)
    if unit.is_sharded and unit.switches.fake_reduce:
        reduced = packed.chunk(unit.group_size)[unit.rank].clone()
    elif unit.is_sharded:
        reduced = collectives.start_reduce_scatter(packed, unit.group_size, unit.group_name)
    else:
        reduced = packed
        if unit.group_size > 1:
            collectives.start_all_reduce(packed, unit.group_name)

    def finish() -> None:
        collectives.wait(reduced)
        if unit.replicas is not None:
            collectives.start_all_reduce(reduced, unit.replicas.group_name)
            collectives.wait(reduced)

    return reduced, finish


def _reduce_by_hook(unit: Unit, packed: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """The user's hook reduces, and divides (E-HOOK-1)."""
    assert unit.comm_hook is not None
    state, hook = unit.comm_hook
    if not unit.is_sharded:
        hook(state, packed)
        return packed, lambda: None
    reduced = packed.new_empty(packed.numel() // unit.group_size)
    hook(state, packed, reduced)
    return reduced, lambda: None
