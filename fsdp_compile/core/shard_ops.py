"""Operators on a shard that ask for the rank when they run: `fsdp_flat::take`, `spread` and `segment_maxima`.

A graph is the same on all ranks, but which parameters a shard has segments of is not. These operators take the layout
and the groups as text, find this rank's segments when they run, and have results of one size on all ranks.

    take(local)            the segments of some parameters, end to end       what a second all-gather sends
    spread(values)         for each element of the shard its block's value   one scale for each parameter, or each row
    segment_maxima(local)  the largest element of each block                 what an all-reduce completes
    send(payload)          the payload, in one buffer                        Inductor's graphs
    send_as(shard, dtype)  the shard, cast where its all-gather starts       likewise

A parameter has `counts` blocks of equally many consecutive elements: one, its rows, or smaller ones.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_compile.comm._torch import group_named
from fsdp_compile.core.layout import FlatParamLayout, round_up

_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define(
    "fsdp_flat::take", "(Tensor local, str layout, str[] groups, int[] params, ScalarType dtype) -> Tensor", tags=_TAGS
)
torch.library.define(
    "fsdp_flat::spread", "(Tensor values, str layout, str[] groups, int[] counts) -> Tensor", tags=_TAGS
)
torch.library.define(
    "fsdp_flat::segment_maxima",
    "(Tensor local, str layout, str[] groups, int[] params, int[] counts, bool smallest) -> Tensor",
    tags=_TAGS,
)
torch.library.define("fsdp_flat::send", "(Tensor payload) -> Tensor", tags=_TAGS)
torch.library.define("fsdp_flat::send_as", "(Tensor shard, ScalarType dtype) -> Tensor", tags=_TAGS)

TAKE = torch.ops.fsdp_flat.take.default
SPREAD = torch.ops.fsdp_flat.spread.default
SEGMENT_MAXIMA = torch.ops.fsdp_flat.segment_maxima.default
SEND = torch.ops.fsdp_flat.send.default
SEND_AS = torch.ops.fsdp_flat.send_as.default

_START = 16  # segments start at multiples of so many elements, aligned for every dtype


class StoredSegment(NamedTuple):
    """A rank's segment of one parameter: where it starts in its shard, and in what `take` gives, and its length."""

    in_shard: int
    in_taken: int
    numel: int


def shard_index(groups: list[str]) -> int:
    """Which shard this rank stores: with two groups its rank in the first varies fastest."""
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
def most_taken(layout: FlatParamLayout, params: tuple[int, ...]) -> int:
    """Elements that `take` gives: as many as the rank with the most of `params` needs."""
    ranks = range(layout.world_size)
    return max(
        sum(round_up(each.numel, _START) for each in segments_of(layout, params, rank) if each) for rank in ranks
    )


@torch.library.impl("fsdp_flat::take", "default")
def _take(local: Tensor, layout: str, groups: list[str], params: list[int], dtype: torch.dtype) -> Tensor:
    """This rank's segments of `params` in `local`, 1-D `[shard_numel]`, then zeros, 1-D, seen as `dtype`."""
    parsed = FlatParamLayout.parse(layout)
    taken = local.new_zeros(most_taken(parsed, tuple(params)))
    for segment in segments_of(parsed, tuple(params), shard_index(groups)):
        if segment is not None:
            taken.narrow(0, segment.in_taken, segment.numel).copy_(local.narrow(0, segment.in_shard, segment.numel))
    return taken.view(dtype)


@torch.library.register_fake("fsdp_flat::take")
def _take_fake(local: Tensor, layout: str, groups: list[str], params: list[int], dtype: torch.dtype) -> Tensor:
    taken = most_taken(FlatParamLayout.parse(layout), tuple(params))
    return local.new_empty(taken * local.dtype.itemsize // dtype.itemsize, dtype=dtype)


@torch.library.impl("fsdp_flat::spread", "default")
def _spread(values: Tensor, layout: str, groups: list[str], counts: list[int]) -> Tensor:
    """The value of each element's block, 1-D `[shard_numel]`, from the `counts` values of each parameter, end to end.

    Padding, and parameters without values, get ones.
    """
    parsed = FlatParamLayout.parse(layout)
    spread = values.new_ones(parsed.shard_numel)
    begin = 0
    for param, count in enumerate(counts):
        record = parsed.record(param, shard_index(groups))
        if record is not None and count:
            block = parsed.numels[param] // count
            first, end = record.first // block, record.last // block + 1
            each = values.narrow(0, begin + first, end - first)
            if count > 1:
                each = each.repeat_interleave(block).narrow(0, record.first - first * block, record.numel)
            spread.narrow(0, record.offset, record.numel).copy_(each.expand(record.numel))
        begin += count
    return spread


@torch.library.register_fake("fsdp_flat::spread")
def _spread_fake(values: Tensor, layout: str, groups: list[str], counts: list[int]) -> Tensor:
    return values.new_empty(FlatParamLayout.parse(layout).shard_numel)


@torch.library.impl("fsdp_flat::segment_maxima", "default")
def _segment_maxima(
    local: Tensor, layout: str, groups: list[str], params: list[int], counts: list[int], smallest: bool
) -> Tensor:
    """Of the blocks of `params`, `counts` of each, the maxima of what this rank stores, and 1 where that has a NaN:
    float32 `[2, sum(counts)]`.

    A maximum that ranks reduce would lose a NaN, so it travels beside them. Of the smallest elements: their negation.
    A block of which the rank has no element: minus infinity, and 0.
    """
    parsed = FlatParamLayout.parse(layout)
    maxima = local.new_full((2, sum(counts)), -math.inf, dtype=torch.float32)
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
    maxima[0].masked_fill_(maxima[1] > 0, -math.inf)
    return maxima


def _extrema_of_blocks(elements: Tensor, skipped: int, block: int, smallest: bool) -> Tensor:
    """The largest or smallest of each block of `elements`; `skipped` elements of the first block are missing."""
    reduce = torch.amin if smallest else torch.amax
    head = min(block - skipped, len(elements)) if skipped else 0
    blocks = (len(elements) - head) // block
    tail = elements[head + blocks * block :]
    extrema = [reduce(elements[:head], 0, True)] if head else []
    extrema += [reduce(elements[head : head + blocks * block].view(blocks, block), 1)] if blocks else []
    extrema += [reduce(tail, 0, True)] if len(tail) else []
    return torch.cat(extrema)


@torch.library.register_fake("fsdp_flat::segment_maxima")
def _segment_maxima_fake(
    local: Tensor, layout: str, groups: list[str], params: list[int], counts: list[int], smallest: bool
) -> Tensor:
    return local.new_empty((2, sum(counts)), dtype=torch.float32)


@torch.library.impl("fsdp_flat::send", "default")
def _send(payload: Tensor) -> Tensor:
    return payload.clone()


@torch.library.register_fake("fsdp_flat::send")
def _send_fake(payload: Tensor) -> Tensor:
    return torch.empty_like(payload)


@torch.library.impl("fsdp_flat::send_as", "default")
def _send_as(shard: Tensor, dtype: torch.dtype) -> Tensor:
    return shard.to(dtype, copy=True)


@torch.library.register_fake("fsdp_flat::send_as")
def _send_as_fake(shard: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(shard, dtype=dtype)
