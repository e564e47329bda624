"""A contiguous run of a flattened tensor as boxes of the n-D tensor. Integers only, all in elements.

A rank stores one run of each parameter; storage formats speak of boxes, given by offsets and sizes in the original
shape. Elements 5 to 17 of a 4 x 6 tensor are three boxes, at most `2 * ndim - 1` in general:

    . . . . . a        a    row 0, columns 5 to 5
    b b b b b b        b    rows 1 to 1, whole
    c c c c c c             (one box with b: rows 1 to 2)
    . . . . . .
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A box of a tensor whose elements lie next to each other when the tensor is flattened. Never empty."""

    offsets: tuple[int, ...]  # of its first element, in the tensor's shape
    sizes: tuple[int, ...]
    start: int  # where it begins in the run that it is part of

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)


def boxes_of_run(shape: tuple[int, ...], first: int, numel: int) -> tuple[Box, ...]:
    """The elements `first` to `first + numel - 1` of a flattened tensor of `shape`, as boxes in order.

    Together they cover the run once; there are at most `max(1, 2 * len(shape) - 1)`, none for an empty run.
    ValueError for a run that is not within the tensor.
    """
    if first < 0 or numel < 0 or first + numel > math.prod(shape):
        raise ValueError(f"expected a run within the {math.prod(shape)} elements of shape {shape}, found {numel} "
                         f"elements from {first}")  # fmt: skip
    boxes, start = [], 0
    for offsets, sizes in _split(shape, first, first + numel) if numel else ():
        boxes.append(Box(offsets, sizes, start))
        start += math.prod(sizes)
    return tuple(boxes)


Corner = tuple[tuple[int, ...], tuple[int, ...]]


def _split(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Corner]:
    """Offsets and sizes of the boxes of `start` to `stop`, not empty: part of a row, whole rows, part of a row."""
    if not shape:
        yield (), ()
        return
    rest = shape[1:]
    row = math.prod(rest)
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(last, rest, start - last * row, stop - last * row)
        return
    if start % row:
        yield from _in_row(first - 1, rest, start % row, row)
    if first < last:
        yield (first, *[0] * len(rest)), (last - first, *rest)
    if stop % row:
        yield from _in_row(last, rest, 0, stop % row)


def _in_row(index: int, rest: tuple[int, ...], start: int, stop: int) -> Iterator[Corner]:
    for offsets, sizes in _split(rest, start, stop):
        yield (index, *offsets), (1, *sizes)


@dataclass(frozen=True)
class Cut:
    """How one tensor, flattened, is cut among ranks: it lies at `origin` of a buffer of equal shards.

    What a `FlatParamLayout` says of one of its parameters, and equally of optimizer state with its shape.
    """

    shape: tuple[int, ...]  # of the full tensor
    origin: int  # where it starts in the buffer
    shard_numel: int  # of each rank's part of the buffer
    order: tuple[int, ...] = ()  # for each rank which part it stores; empty: rank r stores part r

    def run(self, rank: int) -> tuple[int, int]:
        """First element and number of elements that `rank` stores; (0, 0) if none."""
        part = self.order[rank] if self.order else rank
        low = max(part * self.shard_numel, self.origin)
        high = min((part + 1) * self.shard_numel, self.origin + math.prod(self.shape))
        return (low - self.origin, high - low) if low < high else (0, 0)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """What `rank` stores as boxes."""
        return boxes_of_run(self.shape, *self.run(rank))
