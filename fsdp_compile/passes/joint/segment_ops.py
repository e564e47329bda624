"""Operators on a shard that ask for the rank when they run.

A graph is the same on all ranks, but which parameters a shard has segments of is not. These operators take the layout
and the groups as text, find this rank's segments when they run, and have results of one size on all ranks. A parameter
has `counts` blocks of equally many consecutive elements: one, its rows, or smaller ones.

    pack_segments(local)     the segments of some parameters, end to end       what a second all-gather sends
    expand_scales(values)    for each element of the shard its block's value   one scale for each parameter, or row
    segment_maxima(local)    the largest element of each block                 what an all-reduce completes
"""

from functools import lru_cache
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_compile.comm._torch import group_named
from fsdp_compile.core.layout import FlatParamLayout, round_up
from fsdp_compile.core.ops import define

PACK_SEGMENTS = define(
    "pack_segments", "(Tensor local, str layout, str[] groups, int[] params, ScalarType dtype) -> Tensor"
)
EXPAND_SCALES = define("expand_scales", "(Tensor values, str layout, str[] groups, int[] counts) -> Tensor")
SEGMENT_MAXIMA = define(
    "segment_maxima",
    "(Tensor local, str layout, str[] groups, int[] params, int[] counts, bool smallest) -> Tensor",
)

_START = 16  # segments start at multiples of so many elements, aligned for every dtype


class StoredSegment(NamedTuple):
    """A rank's segment of one parameter: its offset in the shard and in `pack_segments`' result, and its length."""

    in_shard: int
    in_packed: int
    numel: int


def shard_index(groups: list[str]) -> int:
    """The index of the shard that this rank stores: with two groups its rank in the first varies fastest."""
    index, stride = 0, 1
    for group in map(group_named, groups):
        index += group.rank() * stride
        stride *= group.size()
    return index


@lru_cache(maxsize=4096)
def segments_of(layout: FlatParamLayout, params: tuple[int, ...], rank: int) -> tuple[StoredSegment | None, ...]:
    """For each of `params` the segment that `rank` stores, or None."""
    segments: list[StoredSegment | None] = []
    end = 0
    for param in params:
        record = layout.record(param, rank)
        segments.append(None if record is None else StoredSegment(record.offset, end, record.numel))
        end += 0 if record is None else round_up(record.numel, _START)
    return tuple(segments)


@lru_cache(maxsize=4096)
def packed_numel(layout: FlatParamLayout, params: tuple[int, ...]) -> int:
    """Elements that `pack_segments` returns: as many as the rank with the most of `params` needs."""
    ranks = range(layout.world_size)
    return max(
        sum(round_up(each.numel, _START) for each in segments_of(layout, params, rank) if each) for rank in ranks
    )


@torch.library.impl("fsdp_flat::pack_segments", "default")
def _pack_segments(local: Tensor, layout: str, groups: list[str], params: list[int], dtype: torch.dtype) -> Tensor:
    """This rank's segments of `params` in `local`, 1-D `[shard_numel]`, then zeros, 1-D, seen as `dtype`."""
    parsed = FlatParamLayout.parse(layout)
    packed = local.new_zeros(packed_numel(parsed, tuple(params)))
    for segment in segments_of(parsed, tuple(params), shard_index(groups)):
        if segment is not None:
            packed.narrow(0, segment.in_packed, segment.numel).copy_(local.narrow(0, segment.in_shard, segment.numel))
    return packed.view(dtype)


@torch.library.register_fake("fsdp_flat::pack_segments")
def _pack_segments_fake(local: Tensor, layout: str, groups: list[str], params: list[int], dtype: torch.dtype) -> Tensor:
    packed = packed_numel(FlatParamLayout.parse(layout), tuple(params))
    return local.new_empty(packed * local.dtype.itemsize // dtype.itemsize, dtype=dtype)


@torch.library.impl("fsdp_flat::expand_scales", "default")
def _expand_scales(values: Tensor, layout: str, groups: list[str], counts: list[int]) -> Tensor:
    """The value of each element's block, 1-D `[shard_numel]`, from the `counts` values of each parameter, end to end.

    Padding, and parameters without values, get ones.
    """
    parsed = FlatParamLayout.parse(layout)
    expanded = values.new_ones(parsed.shard_numel)
    begin = 0
    for param, count in enumerate(counts):
        record = parsed.record(param, shard_index(groups))
        if record is not None and count:
            block = parsed.numels[param] // count
            first, end = record.first // block, record.last // block + 1
            each = values.narrow(0, begin + first, end - first)
            if count > 1:
                each = each.repeat_interleave(block).narrow(0, record.first - first * block, record.numel)
            expanded.narrow(0, record.offset, record.numel).copy_(each.expand(record.numel))
        begin += count
    return expanded


torch.library.register_fake(
    "fsdp_flat::expand_scales",
    lambda values, layout, *_: values.new_empty(FlatParamLayout.parse(layout).shard_numel),
)


@torch.library.impl("fsdp_flat::segment_maxima", "default")
def _segment_maxima(
    local: Tensor, layout: str, groups: list[str], params: list[int], counts: list[int], smallest: bool
) -> Tensor:
    """For each block of `params` (`counts` blocks each) the maximum on this rank, and 1 if it has a NaN: float32 `[2,
    sum(counts)]`.

    A reduced maximum would lose a NaN, so it travels beside. With `smallest`: negated minima. A block without elements
    here: minus infinity, and 0.
    """
    parsed = FlatParamLayout.parse(layout)
    maxima = local.new_full((2, sum(counts)), -inf, dtype=torch.float32)
    begin = 0
    for param, count in zip(params, counts, strict=True):
        record = parsed.record(param, shard_index(groups))
        if record is not None:
            block = parsed.numels[param] // count
            elements = local.narrow(0, record.offset, record.numel)
            extrema = _extrema_of_blocks(elements, record.first % block, block, smallest)
            maxima[0].narrow(0, begin + record.first // block, len(extrema)).copy_(-extrema if smallest else extrema)
        begin += count
    maxima[1] = maxima[0].isnan()
    maxima[0].masked_fill_(maxima[1] > 0, -inf)
    return maxima


def _extrema_of_blocks(elements: Tensor, skipped: int, block: int, smallest: bool) -> Tensor:
    """The largest or smallest of each block of `elements`; the first block lacks its first `skipped` elements."""
    reduce = torch.amin if smallest else torch.amax
    head = min(-skipped % block, len(elements))
    blocks = (len(elements) - head) // block
    tail = elements[head + blocks * block :]
    extrema = [reduce(elements[:head], 0, True)] if head else []
    extrema += [reduce(elements[head : head + blocks * block].view(blocks, block), 1)] if blocks else []
    extrema += [reduce(tail, 0, True)] if len(tail) else []
    return torch.cat(extrema)


torch.library.register_fake(
    "fsdp_flat::segment_maxima",
    lambda local, _layout, _groups, _params, counts, _smallest: local.new_empty((2, sum(counts)), dtype=torch.float32),
)
