"""Ranks that need not exist: a process group for predictions."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

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
