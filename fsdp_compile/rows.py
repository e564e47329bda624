"""Shards that end between the rows of matrices, where little padding does it.

    2 ranks, a matrix of 3 rows of 4     | a a a a a a | a a a a a a |       two and two boxes in a checkpoint
    and padding for a fourth             | a a a a a a a a | a a a a . . . . |       one and one

Of a matrix that is cut in the middle of a row each rank stores some whole rows and a part of one: two boxes, that is two
items to plan, write and read, as long as torch.distributed.checkpoint takes boxes only. Integers only, in elements.
"""

import math
from bisect import bisect_right
from dataclasses import replace

from fsdp_compile.layout import FlatParamLayout

MOST = 512
"""At most one element in so many may be padding for this."""


def end_between_rows(layout: FlatParamLayout, shard_alignment: int) -> FlatParamLayout:
    """`layout` with more padding at its end, if fewer shards then end within a row of a parameter.

    Of the sizes that are multiples of a row for each rank it takes the one with the fewest such shards, then the
    smallest. Shards are multiples of `shard_alignment` elements, as those of `layout` are.
    """
    used = layout.offsets[-1] + layout.numels[-1]
    steps = {layout.world_size * math.lcm(row, shard_alignment) for row in map(_row, layout.shapes) if row}
    sizes = {-(-used // step) * step for step in steps}
    wider = [replace(layout, numel=size) for size in sizes if layout.numel < size <= layout.numel * (1 + 1 / MOST)]
    return min([layout, *wider], key=lambda each: (_cut_rows(each), each.numel))


def _cut_rows(layout: FlatParamLayout) -> int:
    """How many shards end within a row."""
    count = 0
    for end in range(layout.shard_numel, layout.numel, layout.shard_numel):
        index = bisect_right(layout.offsets, end) - 1
        within = end - layout.offsets[index]
        count += within < layout.numels[index] and within % _row(layout.shapes[index]) > 0
    return count


def _row(shape: tuple[int, ...]) -> int:
    """Elements of a row: what one index into the first dimension gives."""
    return math.prod(shape[1:])
