"""Ranks that need not exist: a process group for predictions, and a model that is sharded over it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch import nn

from fsdp_compile.core.sharding import sharding_of
from fsdp_compile.explain._torch import fake_tensors
from fsdp_compile.passes._torch import fake_store


@contextmanager
def process_group(world_size: int | None) -> Iterator[None]:
    """Yield the initialized process group, of `world_size` ranks, or else a fake one that ends with the context."""
    if dist.is_initialized():
        if world_size not in (None, dist.get_world_size()):
            raise ValueError(f"world_size: expected {dist.get_world_size()}, as the process group has, found "
                             f"{world_size}")  # fmt: skip
        yield
        return
    if world_size is None:
        raise ValueError("world_size: expected the number of ranks, as no process group is initialized, found None")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def sharded(
    model: nn.Module | Callable[[], nn.Module], shard: Callable[[nn.Module], nn.Module], world_size: int | None
) -> Iterator[nn.Module]:
    """Yield `model`, or what it makes, which gets no memory, sharded by `shard` within `process_group(world_size)`.

    A model that is sharded already stays as it is; of another one a copy is sharded.
    """
    given = model if isinstance(model, nn.Module) else None
    with process_group(world_size), nullcontext() if given is not None else fake_tensors():
        made = model() if given is None else given
        yield made if sharding_of(made) else shard(made if given is None else copy.deepcopy(made))
