"""The norm of all gradients from those of flat shards: few reductions, one all-reduce, and no wait of the host."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.core.shard_spec import ShardSpec
from fsdp_compile.core.sharded_tensor import ShardedTensor
from fsdp_compile.optim.compiled_update import FlatUpdate

aten = torch.ops.aten

# Note [Where the norm is computed]
# Clipping needs the norm of all gradients before it changes the first one, so no update can begin before the last
# reduce has ended. What could be done earlier is to square and add up what has arrived. For each flat shard that is one
# read of a gradient that was divided by the number of ranks, and all of them are one kernel on a GPU: at the end it
# takes less than the all-reduce that follows it. In backward's graph the sums would be further outputs of every graph,
# also of those for loops that clip by themselves, or not at all.
#
# Which gradients lie side by side in a flat shard is seen by each rank for itself. What it sends does not depend on
# that: one number for each group of ranks, in the order of their names.


def gradient_norm(params: Iterable[nn.Parameter], updates: Sequence[FlatUpdate]) -> Tensor:
    """The 2-norm of the gradients of all `params` together, over all ranks; equal on all of them, with shape `()`.

    It is that of `torch.nn.utils.get_total_norm` up to rounding: sums are of flat shards, whose padding is zero, and
    not of one parameter after the other.

    Args:
        params: those that are clipped.
        updates: what the optimizer will do to flat shards, of these parameters.
    """
    groups: dict[Any, list[Tensor]] = {}
    specs: dict[Any, ShardSpec] = {}
    others: list[Tensor] = []  # what is not sharded as its parameter, such as plain gradients

    def add(tensor: Tensor, spec: ShardSpec) -> None:
        key = spec.reducing_groups, str(tensor.device), torch.promote_types(tensor.dtype, torch.float32)
        groups.setdefault(key, []).extend([tensor] if tensor.numel() else [])
        specs[key] = spec

    covered: set[int] = set()
    for update in updates:
        if any(spec.tensor_parallel for spec in update.flat.specs):
            update.flat.show_gradient()  # its parameters are reduced over groups of their own
            continue
        for gradient in update.gradients:
            add(gradient, update.flat.specs[0])
        covered.update(map(id, update.params))
    for param in params:
        grad: Any = None if id(param) in covered else param.grad
        if type(grad) is ShardedTensor:
            add(grad.local, grad.spec)
        elif grad is not None:
            others.append(grad)
    sums = [] if groups and not others else [nn.utils.get_total_norm(others).square()]
    for key in sorted(groups, key=str):
        tensors, (_, device, dtype) = groups[key], key
        norms: Any = (
            aten._foreach_norm.Scalar(tensors, 2, dtype) if tensors else [torch.zeros((), dtype=dtype, device=device)]
        )
        sums.append(specs[key].all_reduce(torch.stack(norms).square().sum(), "sum"))
    return torch.stack([total.to(sums[0]) for total in sums]).sum().sqrt()
