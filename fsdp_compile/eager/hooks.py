"""Communication hooks: the user's function reduces a unit's gradients in place of ours.

    sharded unit    hook(state, gradients, output)     1-D, the whole flat parameter's and this rank's slice
    NO_SHARD        hook(state, gradients)             in place

The hook divides (E-HOOK-1). Those of `torch.distributed.algorithms._comm_hooks.default_hooks` do; they may also give
the tensors they get another dtype, which is why results are looked at afresh after the call.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)

from fsdp_compile.comm import collectives
from fsdp_compile.comm.averaging import averaging
from fsdp_compile.core.unit import Unit

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
    return reduced, partial(_average_copies, unit.replicas, reduced)


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


def _average_copies(replicas: dist.ProcessGroup | None, reduced: Tensor) -> None:
    if replicas is None:
        return
    how = averaging(reduced.dtype, replicas.size())
    if how.before > 1:
        reduced.div_(how.before)
    collectives.start_all_reduce(reduced, replicas.group_name, how.op)
    collectives.wait(reduced)
    if how.after > 1:
        reduced.div_(how.after)
