"""All-gathers that were started before the forward that reads them.

    gather = PrefetchedGather(shard, group_size, group)      begins to fill a buffer
    with offered([gather]):
        forward()           the first all-gather of that shard takes the buffer, and waits for what fills it

A forward, eager or compiled, is not told of them: who starts an all-gather asks `take`, with nothing but the shard.
"""

# Note [Where a prefetched buffer is taken]
# An operator's body and the code that Inductor generates have the shard, as a tensor, and the group's name, and no
# object that could own what was prefetched. So they look it up by the address of the shard in one table per process,
# which has entries only while `offered` is in force around the one forward that may use them. In between steps
# `CompiledStep` owns them, and nothing finds them: no evaluation, no other model, no later forward.
# What takes a buffer does not ask whether its values are up to date, or whether other ranks take it too. Both are
# decided before it is offered, in one place (eager/next_forward.py).

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from fsdp_compile.comm import watchdog
from fsdp_compile.comm._torch import group_named, start_all_gather, start_broadcast
from fsdp_compile.comm.collectives import copies, movable

Awaitable = dist.Work | watchdog.WatchedCollective


def start_gather(out: Tensor, shard: Tensor, group: str, unit: str | None = None) -> tuple[Awaitable, ...]:
    """Begin to all-gather `shard`, 1-D `[n]`, into `out`, 1-D `[n * group_size]`; what is to be waited for."""
    ranks = group_named(group)
    works: tuple[dist.Work, ...]
    if copies(out, group):  # Note [What gloo copies]
        slices = movable(out).view(ranks.size(), -1).unbind()
        slices[ranks.rank()].copy_(movable(shard))
        works = tuple(start_broadcast(ranks, each, source) for source, each in enumerate(slices))
    else:
        works = (start_all_gather(ranks, out, shard),)
    if watchdog.is_on() and out.device.type == "cpu":
        return (watchdog.WatchedCollective(works, "all-gather", ranks, out.numel(), unit),)
    return works


class PrefetchedGather:
    """An all-gather of `shard` under way, of which nothing has read the result yet.

    Args:
        shard: 1-D `[n]`, as it is stored.
        group_size, group: the ranks.
        unit: what the watchdog calls its unit.

    Attributes:
        key: what it is looked up by.
        is_taken: whether a forward has taken the result.
    """

    def __init__(self, shard: Tensor, group_size: int, group: str, unit: str | None = None) -> None:
        self.key = (shard.data_ptr(), shard.numel(), shard.dtype, group)
        full = shard.new_empty(shard.numel() * group_size)
        self._filling: Filling | None = Filling(full, start_gather(full, shard, group, unit))
        self.is_taken = False

    def take(self) -> "Filling":
        """What is being filled; this object refers to its memory no more."""
        assert self._filling is not None
        filling, self._filling, self.is_taken = self._filling, None, True
        return filling

    def drop(self) -> None:
        """If nothing has taken it, wait for it, and give its memory back."""
        if self._filling is not None:
            filling, self._filling = self._filling, None
            filling.wait()


class Filling(NamedTuple):
    """A tensor, 1-D `[n * group_size]`, that collectives fill: to be read after `wait`."""

    full: Tensor
    works: tuple[Awaitable, ...]

    def wait(self) -> None:
        """Order what follows after the collectives."""
        for work in self.works:
            work.wait()


_offered: dict[tuple[object, ...], PrefetchedGather] = {}


@contextmanager
def offered(gathers: Sequence[PrefetchedGather]) -> Iterator[None]:
    """Let the forward in this block use `gathers`; it takes each once."""
    _offered.update((each.key, each) for each in gathers)
    try:
        yield
    finally:
        for each in gathers:
            _offered.pop(each.key, None)


def take(shard: Tensor, group: str) -> Filling | None:
    """The all-gather of `shard` over `group` that was started before, for who is about to start it; or None."""
    if not _offered:
        return None
    gather = _offered.pop((shard.data_ptr(), shard.numel(), shard.dtype, group), None)
    return None if gather is None else gather.take()
