"""Ranks that read and write files together: one decides, or all succeed, and an error of one is an error of all."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from fsdp_compile.checkpoint.manifest import CheckpointError

T = TypeVar("T")


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Whether this is the first rank of `group` (None: of all); True without a process group."""
    return not dist.is_initialized() or dist.get_rank(group) == 0


def first_decides(choose: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What `choose` returns or raises on the first rank, on all ranks; the others do not call it."""
    if not dist.is_initialized():
        return choose()
    told: list[Any] = [None]
    if is_first(group):
        try:
            told[0] = choose()
        except Exception as error:
            told[0] = error
    dist.broadcast_object_list(told, group=group, group_src=0)
    if isinstance(told[0], Exception):
        raise told[0]
    return told[0]


def all_succeed(work: Callable[[], None], doing: str, group: dist.ProcessGroup | None) -> None:
    """Call `work` on every rank; no rank goes on before all have done theirs.

    Raises:
        CheckpointError: on all ranks, if `work` raised on any.
    """
    said: list[Any] = [None]
    try:
        work()
    except Exception as error:
        said[0] = in_words(error)
    if dist.is_initialized():
        mine, said = said[0], [None] * dist.get_world_size(group)
        dist.all_gather_object(said, mine, group=group)
    if any(said):
        raise failed_on(doing, {rank: what for rank, what in enumerate(said) if what})


def in_words(error: BaseException) -> str:
    """What an error says; its name if it says nothing, such as a MemoryError."""
    return str(error) or repr(error)


def failed_on(doing: str, said: Mapping[int, str]) -> CheckpointError:
    """The error of all ranks where those in `said` have failed."""
    return CheckpointError(f"{doing}: " + "; ".join(f"rank {rank}: {what}" for rank, what in said.items()))
