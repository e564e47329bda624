"""The user's functions that reduce gradients: `register_comm_hook`.

The user's function reduces a unit's gradients in place of our collectives, over the group that shards the unit:
    sharded unit    hook(state, gradients, output)     1-D, the whole flat parameter's and this rank's slice
    NO_SHARD        hook(state, gradients)             in place
The hook divides (E-HOOK-1), as those of `torch.distributed.algorithms._comm_hooks.default_hooks` do. It may give its
tensors another dtype, so the dtype of the result is only looked at after the call. Hooks of torch that compress
gradients get them in the dtype of the computation, and choose the dtype on the wire themselves (E-HOOK-3). A state
with a method `of_flat_param` knows which gradient it is called for.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_compile.core._torch import allreduce_hook, bf16_compress_hook, fp16_compress_hook, reduce_scatter_hook
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.unit import Unit

_COMPRESSING = {fp16_compress_hook: torch.float16, bf16_compress_hook: torch.bfloat16}


def compresses(hook: Callable[..., Any]) -> bool:
    """Whether `hook` is one of torch's two that compress gradients."""
    return any(hook is known for known in _COMPRESSING)


@runtime_checkable
class StatePerFlatParam(Protocol):
    """The state of a communication hook that distinguishes flat parameters."""

    def of_flat_param(self, flat_param: object, name: str, group: dist.ProcessGroup) -> Any:
        """What the hook gets as its state for `flat_param`, an object with a hash.

        `name` is that of its first parameter in the root, and `group` has the ranks over which the hook reduces.
        """


def reduce_by(unit: Unit, flat: FlatParam, state: Any, hook: Callable[..., Any], packed: Tensor) -> Tensor:
    """Reduce `packed` by `hook` and return the result ; see this file's first lines."""
    if isinstance(state, StatePerFlatParam):
        state = state.of_flat_param(flat, flat.names[0], unit.group.find())
    if len(unit.stages) == 2:  # shards are ordered by two groups; hooks expect slice r to be that of rank r
        first, second = unit.stages
        packed = packed.view(second.size, first.size, -1).transpose(0, 1).reshape(-1)
    compressed_on_cpu = packed.device.type == "cpu" and compresses(hook)
    if compressed_on_cpu:  # torch's own record a stream, which fails on CPU tensors (torch 2.11 to 2.13)
        packed = packed.to(_COMPRESSING[hook])
        hook = reduce_scatter_hook if unit.is_sharded else allreduce_hook
    if unit.is_sharded:
        reduced = packed.new_empty(packed.numel() // unit.group.size)
        hook(state, packed, reduced)
    else:
        reduced = packed
        hook(state, reduced)
    return reduced.to(state.parameter_type) if compressed_on_cpu else reduced
