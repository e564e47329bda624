"""Which elements of a flattened tensor a rank stores, and as which chunks storage formats know them. Integers only.

A rank stores one range of the flattened elements of each parameter, while torch.distributed.checkpoint (DCP) speaks of
chunks: boxes in the original shape. Elements 5 to 17 of a 4 x 6 tensor are two chunks, and `2 * ndim - 1` is the most
that a range of an n-dimensional tensor needs:

    . . . . . a        a    row 0, column 5
    b b b b b b        b    rows 1 and 2, all columns
    b b b b b b
    . . . . . .
"""

# Note [Why shards end between rows]
# torch.distributed.checkpoint plans, writes and reads chunk by chunk, and each chunk takes an entry in `.metadata` and
# in a file. A shard that ends within a row of a matrix leaves two chunks on either side: complete rows and a part of
# one. So a layout pads its end by up to 1/512 (`end_between_rows` in core/layout.py) where fewer shards then end within
# a row; of usual models the ranks together store little more chunks than there are parameters and cuts. This is a
# matter of speed alone: any range of elements is saved and loaded correctly, by any number of ranks.

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor whose elements are contiguous when the tensor is flattened. It is never empty."""

    offsets: tuple[int, ...]  # of its first element, in the tensor's shape
    sizes: tuple[int, ...]
    start: int  # index of its first element among the elements that the rank stores

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)


def chunks_of_range(shape: tuple[int, ...], first: int, numel: int) -> tuple[Chunk, ...]:
    """The elements `first` to `first + numel - 1` of a flattened tensor of `shape`, as chunks in order.

    Together they cover the range once. There are at most `max(1, 2 * len(shape) - 1)` of them, none for an empty range.

    Raises:
        ValueError: the range is not within the tensor.
    """
    if first < 0 or numel < 0 or first + numel > math.prod(shape):
        raise ValueError(f"expected a range within the {math.prod(shape)} elements of shape {shape}, found {numel} "
                         f"elements from {first}")  # fmt: skip
    chunks: list[Chunk] = []
    start = 0
    for offsets, sizes in _boxes(shape, first, first + numel) if numel else ():
        chunks.append(Chunk(offsets, sizes, start))
        start += math.prod(sizes)
    return tuple(chunks)


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes of elements `start` to `stop`, at least one: a row's end, rows, a row's beginning."""
    if not shape:
        yield (), ()
        return
    rest = shape[1:]
    row = math.prod(rest)
    first, last = -(-start // row), stop // row  # the complete rows
    if first > last:
        yield from _boxes_in_row(last, rest, start - last * row, stop - last * row)
        return
    if start % row:
        yield from _boxes_in_row(first - 1, rest, start % row, row)
    if first < last:
        yield (first, *[0] * len(rest)), (last - first, *rest)
    if stop % row:
        yield from _boxes_in_row(last, rest, 0, stop % row)


def _boxes_in_row(index: int, rest: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in _boxes(rest, start, stop):
        yield (index, *offsets), (1, *sizes)


@dataclass(frozen=True)
class FlatSharding:
    """How one tensor, flattened, is sharded: it lies in a flat buffer that the ranks split into equal shards.

    This is what a `FlatParamLayout` says of one of its parameters, and it holds for optimizer state of that shape too.
    """

    shape: tuple[int, ...]  # of the full tensor
    offset: int  # of its first element in the flat buffer
    shard_numel: int  # elements of each rank's shard of the buffer
    shard_order: tuple[int, ...] = ()  # for each rank the shard that it stores; empty: rank r stores shard r

    def local_range(self, rank: int) -> tuple[int, int]:
        """The first element of the flattened tensor that `rank` stores and how many it stores; (0, 0) if none."""
        shard = self.shard_order[rank] if self.shard_order else rank
        low = max(shard * self.shard_numel, self.offset)
        high = min((shard + 1) * self.shard_numel, self.offset + math.prod(self.shape))
        return (low - self.offset, high - low) if low < high else (0, 0)

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """What `rank` stores, as chunks."""
        return chunks_of_range(self.shape, *self.local_range(rank))
