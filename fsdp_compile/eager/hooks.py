"""Communication hooks: the user's function reduces a unit's gradients in place of ours.

    sharded unit    hook(state, gradients, output)     1-D, the whole flat parameter's and this rank's slice
    NO_SHARD        hook(state, gradients)             in place

The hook divides (E-HOOK-1). Those of `torch.distributed.algorithms._comm_hooks.default_hooks` do; they may also give
the tensors they get another dtype, which is why results are looked at afresh after the call.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from fsdp_compile import collectives
from fsdp_compile.averaging import averaging
from fsdp_compile.unit import Unit

_COMPRESSING = (fp16_compress_hook, bf16_compress_hook)


def compresses(hook: Callable[..., Any]) -> bool:
    """Whether `hook` chooses the dtype on the wire itself: it is one of torch's two (E-HOOK-3)."""
    return any(hook is known for known in _COMPRESSING)


def reduce_by_hook(unit: Unit, packed: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Let the unit's hook reduce `packed`; where its result is, and what completes it.

    Under hybrid sharding the hook reduces over the ranks that share a copy; the mean over copies is ours (E-HOOK-7).
    """
    assert unit.comm_hook is not None
    state, hook = unit.comm_hook
    if unit.is_sharded:
        reduced = packed.new_empty(packed.numel() // unit.group_size)
        hook(state, packed, reduced)
    else:
        reduced = packed
        hook(state, packed)
    return reduced, lambda: _average_copies(unit, reduced)


def _average_copies(unit: Unit, reduced: Tensor) -> None:
    if unit.replicas is None:
        return
    how = averaging(reduced.dtype, unit.replicas.size())
    if how.before > 1:
        reduced.div_(how.before)
    collectives.start_all_reduce(reduced, unit.replicas.group_name, how.op)
    collectives.wait(reduced)
    if how.after > 1:
        reduced.div_(how.after)
