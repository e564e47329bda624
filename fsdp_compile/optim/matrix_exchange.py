"""Elements of matrices on their way to the ranks that compute with complete ones, and back.

    routes = Routes(ranks, ranges, owners)          of matrices of one process group that are exchanged together
    arriving = routes.to_owners(parts, "...")       parts: for each matrix what this rank stores, 1-D
    arriving.wait()                                 for each matrix that this rank owns: (first element, part) pairs
    routes.to_ranks(matrices, "...").wait()         matrices: by index; for each matrix what this rank stores

Both are one all-to-all, which runs while the caller computes. What a rank sends itself is not copied; where no rank has
anything for another one, nothing is sent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsdp_compile.comm.collectives import Filling, start_all_to_all_of_parts
from fsdp_compile.tensors.shard_spec import ShardRanks

Part = tuple[int, Tensor]
"""The first element of a part of a matrix, and the part, 1-D."""

Ranges = Sequence[tuple[int, int]]
"""For each rank the first element that it stores of a matrix, and how many."""


@dataclass
class Arriving:
    """What an all-to-all brings; `take` makes of it what `wait` returns."""

    filling: Filling | None
    take: Callable[[Tensor | None], Any]

    def has_ended(self) -> bool:
        """Whether the host would not wait: on an accelerator also where the device still would."""
        return self.filling is None or all(work.is_completed() for work in self.filling.works)

    def wait(self) -> Any:
        """Order what follows after the exchange; return what has arrived."""
        if self.filling is None:
            return self.take(None)
        self.filling.wait()
        return self.take(self.filling.full)


class Routes:
    """Who sends what to whom: the same for all exchanges of these matrices.

    Args:
        ranks: over which they are sharded.
        ranges: for each matrix and rank the first element that it stores, and how many.
        owners: for each matrix the rank of the group that computes with all of it.
    """

    def __init__(self, ranks: ShardRanks, ranges: Sequence[Ranges], owners: Sequence[int]) -> None:
        self.ranks, self._ranges = ranks, ranges
        here, everyone = ranks.rank, range(ranks.size)
        self.owned = [index for index, owner in enumerate(owners) if owner == here]
        away = [sum(numel for rank, (_, numel) in enumerate(ranges[index]) if rank != here) for index in self.owned]
        self.at_home = [at for at, numel in enumerate(away) if not numel]  # those of `owned` that lie here, by position
        others = [[index for index, owner in enumerate(owners) if owner == rank != here] for rank in everyone]
        self._sent = [index for of_rank in others for index in of_rank if self._ranges[index][here][1]]
        self._to_send = [sum(self._ranges[index][here][1] for index in of_rank) for of_rank in others]
        self._to_receive = [
            sum(self._ranges[index][rank][1] for index in self.owned) if rank != here else 0 for rank in everyone
        ]
        pairs = zip(self._ranges, owners, strict=True)
        self.moves = any(numel and rank != owner for of, owner in pairs for rank, (_, numel) in enumerate(of))

    @cached_property
    def _received(self) -> list[tuple[int, int, int]]:
        """What comes from other ranks, in order: which matrix, its first element, and how many."""
        everyone = [rank for rank in range(self.ranks.size) if rank != self.ranks.rank]
        found = ((index, *self._ranges[index][rank]) for rank in everyone for index in self.owned)
        return [each for each in found if each[2]]

    def to_owners(self, parts: Mapping[int, Tensor], like: Tensor, what: str) -> Arriving:
        """Begin to send what this rank stores of each matrix, if anything, to its owner.

        `wait` returns, for each of `owned`, all its parts; `like`: a tensor of their dtype and device.
        """
        sizes = [numel for _, _, numel in self._received]

        def take(full: Tensor | None) -> list[list[Part]]:
            found: dict[int, list[Part]] = {index: [] for index in self.owned}
            for (index, first, _), part in zip(self._received, () if full is None else full.split(sizes), strict=True):
                found[index].append((first, part))
            for index in self.owned:
                first, numel = self._ranges[index][self.ranks.rank]
                found[index] += [(first, parts[index])] if numel else []
            return list(found.values())

        sent = [parts[index] for index in self._sent]
        return Arriving(self._start(sent, like, self._to_send, self._to_receive, what), take)

    def to_ranks(self, matrices: Mapping[int, Tensor], like: Tensor, what: str) -> Arriving:
        """Begin to send each rank what it stores of `matrices`, those that this rank owns, flattened.

        Those that lie on this rank may be added until `wait`, which returns what this rank stores of every matrix.
        `like`: a tensor of their dtype and device.
        """
        sizes = [self._ranges[index][self.ranks.rank][1] for index in self._sent]

        def take(full: Tensor | None) -> list[Tensor]:
            found = [like.new_empty(0)] * len(self._ranges)
            for index, part in zip(self._sent, () if full is None else full.split(sizes), strict=True):
                found[index] = part
            for index, matrix in matrices.items():
                first, numel = self._ranges[index][self.ranks.rank]
                found[index] = matrix[first : first + numel]
            return found

        sent = [matrices[index][first : first + numel] for index, first, numel in self._received]
        return Arriving(self._start(sent, like, self._to_receive, self._to_send, what), take)

    def _start(
        self, parts: Sequence[Tensor], like: Tensor, send: list[int], receive: list[int], what: str
    ) -> Filling | None:
        if not self.moves:
            return None
        sent = torch.cat(list(parts)) if parts else like.new_empty(0)
        return start_all_to_all_of_parts(sent, send, receive, self.ranks.group, what)
