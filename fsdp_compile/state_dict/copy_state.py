"""The state of a model, its optimizers and other objects, copied from one replica to others without a file.

Replicas store the same shards on the ranks of one replica group, so each rank sends what it stores to the ranks that
store the same, and nothing is gathered: a message for each flat shard, and one for each tensor of optimizer state.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from fsdp_compile.comm.collectives import broadcast, broadcast_object, is_first
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.core.unit import unit_of
from fsdp_compile.state_dict._torch import tree_flatten_with_path, tree_unflatten
from fsdp_compile.state_dict.sharded_value import ShardedValue


def copy_state(
    model: nn.Module, optimizers: Sequence[Optimizer], others: Sequence[Any], step: int, group: dist.ProcessGroup
) -> int:
    """Make all state equal to that of the first rank of `group`; all of its ranks must call it.

    Args:
        model: sharded alike on all ranks of `group`, which store the same shards.
        optimizers: of its parameters.
        others: objects with `state_dict()` and `load_state_dict()`, whose state is pickled.
        step: how many steps were taken.
        group: replicas of this rank's shards.

    Returns:
        `step` of the first rank.

    Raises:
        RuntimeError: the optimizers' state differs in kind from that of the first rank.
    """
    with torch.no_grad():
        for tensor in _tensors_of(model):
            broadcast(tensor, group)
        for optimizer in optimizers:
            if broadcast_object(bool(optimizer.state), group):
                _copy_optimizer(model, optimizer, group)
    for other in others:
        state = broadcast_object(other.state_dict() if is_first(group) else None, group)
        if not is_first(group):
            other.load_state_dict(state)
    copied: int = broadcast_object(step, group)
    return copied


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """What this rank stores of the model: flat shards, parameters that are not sharded, and buffers."""
    for unit in units_gathered_below(model):
        yield from (flat.shard.detach() for flat in unit.flats)
    yield from (param.detach() for param in model.parameters() if unit_of(param) is None)
    yield from model.buffers()


def _copy_optimizer(model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup) -> None:
    state = get_optimizer_state_dict(model, optimizer)  # of an optimizer that has none it makes some, to be overwritten
    leaves, structure = tree_flatten_with_path(state)
    outline = [(str(path), _kind(leaf)) for path, leaf in leaves]
    theirs = broadcast_object([*outline, [leaf for _, leaf in leaves if not isinstance(leaf, Tensor)]], group)
    *their_outline, their_values = theirs
    if their_outline != outline:
        differing = next((a, b) for a, b in zip(outline, their_outline, strict=False) if a != b)
        raise RuntimeError(
            f"optimizer: expected the same state on all replicas, found {differing[0]} here and {differing[1]} on the "
            f"replica that it is copied from; make the model and the optimizer alike on all replicas"
        )
    for _, leaf in leaves:
        if isinstance(leaf, Tensor):
            broadcast(leaf.local if isinstance(leaf, ShardedValue) else leaf, group)
    if not is_first(group):
        values = iter(their_values)
        copied = [leaf if isinstance(leaf, Tensor) else next(values) for _, leaf in leaves]
        set_optimizer_state_dict(model, optimizer, tree_unflatten(copied, structure))


def _kind(leaf: Any) -> str:
    """What must be equal of a leaf for it to be copied: of tensors all but the values."""
    return f"{tuple(leaf.shape)} of {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
