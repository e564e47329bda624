"""Elements of matrices on their way to the ranks that compute with complete ones, and back.

    routes = Routes(ranks, ranges, owners)     of matrices of one process group that are exchanged together
    filling = routes.to_owners(parts, ...)     parts: what this rank stores of each of `routes.sent`, 1-D
    routes.assemble(filling.full)              the matrices that this rank owns, `routes.owned`, each 1-D
    filling = routes.to_ranks(matrices, ...)   matrices: of `routes.owned`, 1-D
    routes.parts_of(filling.full)              what this rank stores of each of `routes.sent`

Both are one all-to-all, which runs while the caller computes. It also puts what a rank keeps of its own matrices in its
place, so that a rank that owns one of them computes in the memory that was received. Matrices that lie on their owner
are not exchanged; where no rank has anything for another one, nothing is sent.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fsdp_compile.comm.collectives import Filling, start_all_to_all_of_parts
from fsdp_compile.tensors.shard_spec import ShardRanks

Ranges = Sequence[tuple[int, int]]
"""For each rank the first element that it stores of a matrix, and how many."""


class Routes:
    """Who sends what to whom: the same for all exchanges of these matrices.

    Args:
        ranks: over which they are sharded.
        ranges: for each matrix and rank the first element that it stores, and how many.
        owners: for each matrix the rank of the group that computes with all of it.

    Attributes:
        at_home: matrices that lie on this rank, which owns them.
        owned: other matrices that this rank owns.
        sent: matrices of which this rank stores a part, owner by owner, without those that lie on one rank.
    """

    def __init__(self, ranks: ShardRanks, ranges: Sequence[Ranges], owners: Sequence[int]) -> None:
        self._ranks, here, everyone = ranks, ranks.rank, range(ranks.size)
        stays = [sum(numel for _, numel in of) == of[owner][1] for of, owner in zip(ranges, owners, strict=True)]
        self.at_home = [index for index, owner in enumerate(owners) if owner == here and stays[index]]
        moves = [index for index in range(len(owners)) if not stays[index]]
        moving = [[index for index in moves if owners[index] == rank] for rank in everyone]
        self.owned, self._any = moving[here], bool(moves)
        self.sent = [index for of_rank in moving for index in of_rank if ranges[index][here][1]]
        self._sent_sizes = [ranges[index][here][1] for index in self.sent]
        self._to_send = [sum(ranges[index][here][1] for index in of_rank) for of_rank in moving]
        received = [(at, rank) for rank in everyone for at, index in enumerate(self.owned) if ranges[index][rank][1]]
        self._received_sizes = [ranges[self.owned[at]][rank][1] for at, rank in received]
        self._to_receive = [sum(ranges[index][rank][1] for index in self.owned) for rank in everyone]
        self._parts: list[list[int]] = [[] for _ in self.owned]  # of each matrix, by their numbers among the received
        for number in sorted(range(len(received)), key=lambda i: ranges[self.owned[received[i][0]]][received[i][1]]):
            self._parts[received[number][0]].append(number)
        self._are_in_order = [number for of in self._parts for number in of] == list(range(len(received)))

    def to_owners(self, parts: Sequence[Tensor], like: Tensor, what: str) -> Filling | None:
        """Begin to send what this rank stores of each of `sent` to its owner; `like`: of their dtype and device."""
        return self._start(parts, self._to_send, self._to_receive, like, what)

    def assemble(self, full: Tensor) -> Iterator[Tensor]:
        """Each of `owned`, 1-D; `full`: what `to_owners` has filled."""
        received = full.split_with_sizes(self._received_sizes)
        for numbers in self._parts:
            yield received[numbers[0]] if len(numbers) == 1 else torch.cat([received[number] for number in numbers])

    def to_ranks(self, matrices: Sequence[Tensor], like: Tensor, what: str) -> Filling | None:
        """Begin to send each rank what it stores of `owned`, flattened; `like`: of their dtype and device."""
        parts: Sequence[Tensor] = matrices
        if not self._are_in_order:
            parts = [like] * len(self._received_sizes)
            for matrix, numbers in zip(matrices, self._parts, strict=True):
                cut = matrix.split_with_sizes([self._received_sizes[number] for number in numbers])
                for number, part in zip(numbers, cut, strict=True):
                    parts[number] = part
        return self._start(parts, self._to_receive, self._to_send, like, what)

    def parts_of(self, full: Tensor) -> Sequence[Tensor]:
        """What this rank stores of each of `sent`; `full`: what `to_ranks` has filled."""
        return full.split_with_sizes(self._sent_sizes)

    def _start(
        self, parts: Sequence[Tensor], send: list[int], receive: list[int], like: Tensor, what: str
    ) -> Filling | None:
        if not self._any:
            return None
        joined = parts[0] if len(parts) == 1 else torch.cat(list(parts)) if parts else like
        return start_all_to_all_of_parts(joined, send, receive, self._ranks.group, what)
