"""The groups that a gather goes through, one after the other, and a reduce in reverse.

    one stage      every rank's shard is gathered from the whole group; rank r stores shard r
    two stages     peers, then neighbours: 4 ranks, n = 2 neighbours

        rank            0    1    2    3
        stores shard    0    2    1    3       a rank's number among its peers + peers * that among its neighbours
        with peers      0 1  2 3  0 1  2 3     one n-th of the buffer, in one piece: what is kept for backward
        and neighbours  0 1 2 3   ...          gathered again in backward

With shards in this order each stage concatenates what it gathers: nothing is moved, no rank's place stands in a graph.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from fsdp_compile.comm import collectives


class Stage(NamedTuple):
    """A group that a gather goes through, and this rank's place in it."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Stage":
        """A stage that goes through `group`."""
        return cls(group.group_name, group.size(), dist.get_rank(group))


def shard_index(stages: Iterable[Stage]) -> int:
    """Which part of the flat buffer this rank stores: the one that its place in the gathered buffer shows."""
    number, peers = 0, 1
    for stage in stages:
        number, peers = number + peers * stage.rank, peers * stage.size
    return number


def shard_order(stages: Iterable[Stage]) -> tuple[int, ...]:
    """For each rank of the whole group the part that it stores; empty if rank r stores part r."""
    first, *then = stages
    ranks = range(first.size * then[0].size) if then else ()
    return tuple(rank // then[0].size + first.size * (rank % then[0].size) for rank in ranks)


def gather(shard: Tensor, stages: Iterable[Stage]) -> Tensor:
    """All ranks' `shard`, 1-D `[n]`, in the order of the flat buffer: 1-D `[n * ranks]`."""
    for stage in stages:
        shard = collectives.all_gather(shard, stage.size, stage.name)
    return shard
