"""Ranks that need not exist: a process group for predictions, and a model that is sharded over it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch import nn

from fsdp_compile.core.sharding import sharding_of
from fsdp_compile.explain._torch import fake_ranks, fake_tensors


@contextmanager
def sharded(
    model: nn.Module | Callable[[], nn.Module], shard: Callable[[nn.Module], nn.Module], world_size: int | None
) -> Iterator[nn.Module]:
    """Yield `model`, or what it makes, which gets no memory, sharded by `shard` over `world_size` ranks.

    A model that is sharded already stays as it is; of another one a copy is sharded. The ranks are those of the process
    group that is initialized, or else of a fake one, which ends with the context: then the one before is there again.
    """
    there = dist.get_world_size() if dist.is_initialized() else None
    given, makes = (model, nullcontext()) if isinstance(model, nn.Module) else (None, fake_tensors())
    ranks = there if world_size is None else world_size
    if ranks is None:
        raise ValueError("world_size: expected the number of ranks, as no process group is initialized, found None")
    if given is not None and sharding_of(given) and there not in (None, ranks):
        raise ValueError(f"world_size: expected {there}, over which the model is sharded, found {ranks}")
    with nullcontext() if ranks == there else fake_ranks(ranks), makes:
        made = model() if given is None else given
        yield made if sharding_of(made) else shard(made if given is None else copy.deepcopy(made))
