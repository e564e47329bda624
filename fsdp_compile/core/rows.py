"""Shards that end between the rows of matrices, where little padding does it.

    2 ranks, a matrix of 3 rows of 4     | a a a a a a | a a a a a a |       two and two boxes in a checkpoint
    and padding for a fourth             | a a a a a a a a | a a a a . . . . |       one and one

Of a matrix that is cut in the middle of a row each rank stores whole rows and a part of one. That is two boxes, and
torch.distributed.checkpoint plans, writes and reads box by box. Integers only, in elements.
"""

import math
from bisect import bisect_right
from dataclasses import replace

from fsdp_compile.core.layout import FlatParamLayout, round_up

MOST = 512
"""At most one element in so many may be padding for this."""


def end_between_rows(layout: FlatParamLayout, shard_alignment: int) -> FlatParamLayout:
    """`layout` with more padding at its end, if fewer shards then end within a row of a parameter.

    Of the sizes that are multiples of a row for each rank it takes the one with the fewest such shards, then the
    smallest. Shards are multiples of `shard_alignment` elements, as those of `layout` are.
    """
    rows = [math.prod(shape[1:]) for shape in layout.shapes]  # elements that one index into the first dimension gives
    used = layout.offsets[-1] + layout.numels[-1]
    steps = {layout.world_size * math.lcm(row, shard_alignment) for row in rows if row}
    sizes = {round_up(used, step) for step in steps}
    wider = [replace(layout, numel=size) for size in sizes if layout.numel < size <= layout.numel * (1 + 1 / MOST)]
    return min([layout, *wider], key=lambda each: (_cut_rows(each, rows), each.numel)) if wider else layout


def _cut_rows(layout: FlatParamLayout, rows: list[int]) -> int:
    """How many shards end within a row."""
    count = 0
    for end in range(layout.shard_numel, layout.numel, layout.shard_numel):
        index = bisect_right(layout.offsets, end) - 1
        within = end - layout.offsets[index]
        count += within < layout.numels[index] and within % rows[index] > 0
    return count
