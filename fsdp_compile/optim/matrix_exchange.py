"""Elements of matrices on their way to the ranks that compute with complete ones, and back.

    exchange = Exchange(ranks, ranges, owners)       of matrices of one process group that are exchanged together
    exchange.send(part_of, ...)                      what this rank stores of each matrix, 1-D
    for index, matrix in exchange.received(): ...    the matrices that this rank owns
    exchange.send_back(results, ...)                 of these, in their order
    for index, part in exchange.returned(): ...      what this rank stores of each result

Both ways are one all-to-all, which runs while the caller computes. It also puts what a rank keeps of its own matrices
in its place, so that a rank that owns one of them computes in the memory that was received. Matrices that lie on their
owner are not exchanged; where no rank has anything for another one, nothing is sent.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fsdp_compile.comm.collectives import Filling, start_all_to_all_of_parts
from fsdp_compile.tensors.shard_spec import ShardRanks

Ranges = Sequence[tuple[int, int]]
"""For each rank the first element that it stores of a matrix, and how many."""


class Exchange:
    """An exchange of some matrices, which may be repeated.

    Args:
        ranks: over which they are sharded.
        ranges: for each matrix and rank the first element that it stores, and how many.
        owners: for each matrix the rank of the group that computes with all of it.

    Attributes:
        at_home: matrices that lie on this rank, which owns them; the caller computes with these by itself.
        owned: other matrices that this rank owns.
    """

    def __init__(self, ranks: ShardRanks, ranges: Sequence[Ranges], owners: Sequence[int]) -> None:
        self._ranks, here, everyone = ranks, ranks.rank, range(ranks.size)
        stays = [sum(numel for _, numel in of) == of[owner][1] for of, owner in zip(ranges, owners, strict=True)]
        self.at_home = [index for index, owner in enumerate(owners) if owner == here and stays[index]]
        moves = [index for index in range(len(owners)) if not stays[index]]
        moving = [[index for index in moves if owners[index] == rank] for rank in everyone]
        self.owned, self._any = moving[here], bool(moves)
        self._sent = [index for of_rank in moving for index in of_rank if ranges[index][here][1]]
        self._sent_sizes = [ranges[index][here][1] for index in self._sent]
        self._to_send = [sum(ranges[index][here][1] for index in of_rank) for of_rank in moving]
        received = [(at, rank) for rank in everyone for at, index in enumerate(self.owned) if ranges[index][rank][1]]
        self._received_sizes = [ranges[self.owned[at]][rank][1] for at, rank in received]
        self._to_receive = [sum(ranges[index][rank][1] for index in self.owned) for rank in everyone]
        self._parts: list[list[int]] = [[] for _ in self.owned]  # of each matrix, by their numbers among the received
        for number in sorted(range(len(received)), key=lambda i: ranges[self.owned[received[i][0]]][received[i][1]]):
            self._parts[received[number][0]].append(number)
        self._filling: Filling | None = None  # what is under way

    def send(self, part_of: Callable[[int], Tensor], like: Tensor, what: str) -> None:
        """Begin to send owners what this rank stores of each matrix.

        Args:
            part_of: given the index of a matrix, what this rank stores of it, 1-D.
            like: of their dtype and device, without elements.
            what: it is, for errors.
        """
        parts = [part_of(index) for index in self._sent]
        self._filling = self._start(parts, self._to_send, self._to_receive, like, what)

    def has_ended(self) -> bool:
        """Whether the host would not wait for what is under way."""
        return self._filling is None or all(work.is_completed() for work in self._filling.works)

    def received(self) -> Iterator[tuple[int, Tensor]]:
        """Each matrix that this rank owns and that moves, 1-D, by its index; it may be overwritten."""
        of_each = self._arrived(self._received_sizes)
        for index, numbers in zip(self.owned, self._parts, strict=True):
            parts = [of_each[number] for number in numbers]
            yield index, parts[0] if len(parts) == 1 else torch.cat(parts)

    def send_back(self, results: Sequence[Tensor], like: Tensor, what: str) -> None:
        """Begin to send each rank what it stores of the results, 1-D, of what `received` gave, in its order."""
        parts = [like] * len(self._received_sizes)
        for result, numbers in zip(results, self._parts, strict=True):
            cut = result.split_with_sizes([self._received_sizes[number] for number in numbers])
            for number, part in zip(numbers, cut, strict=True):
                parts[number] = part
        self._filling = self._start(parts, self._to_receive, self._to_send, like, what)

    def returned(self) -> Iterator[tuple[int, Tensor]]:
        """What this rank stores of each result that moves, 1-D, by the matrix's index."""
        yield from zip(self._sent, self._arrived(self._sent_sizes), strict=True)

    def _arrived(self, sizes: list[int]) -> Sequence[Tensor]:
        filling, self._filling = self._filling, None
        if filling is None:
            return ()
        filling.wait()
        return filling.full.split_with_sizes(sizes)

    def _start(
        self, parts: Sequence[Tensor], send: list[int], receive: list[int], like: Tensor, what: str
    ) -> Filling | None:
        if not self._any:
            return None
        joined = parts[0] if len(parts) == 1 else torch.cat(list(parts)) if parts else like
        return start_all_to_all_of_parts(joined, send, receive, self._ranks.group, what)
