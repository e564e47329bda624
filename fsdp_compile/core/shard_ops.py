"""Operators on a shard that ask for the rank when they run: `fsdp_flat::take`, `spread` and `segment_maxima`.

A graph is the same on all ranks, but which parameters a shard has segments of is not. These operators take the layout
and the groups as text, find this rank's segments when they run, and have results of one size on all ranks.

    take(local)          the segments of some parameters, one after the other    what a second all-gather sends
    spread(scalars)      one scalar for each element of the shard             a scale, where every parameter has its own
    segment_maxima(local)   the largest element of each segment                     what an all-reduce completes
    send(payload)        the payload, in one buffer                           Inductor's graphs
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
torch.library.define("fsdp_flat::spread", "(Tensor scalars, str layout, str[] groups) -> Tensor", tags=_TAGS)
torch.library.define(
    "fsdp_flat::segment_maxima",
    "(Tensor local, str layout, str[] groups, int[] params, bool smallest) -> Tensor",
    tags=_TAGS,
)
torch.library.define("fsdp_flat::send", "(Tensor payload) -> Tensor", tags=_TAGS)

TAKE = torch.ops.fsdp_flat.take.default
SPREAD = torch.ops.fsdp_flat.spread.default
SEGMENT_MAXIMA = torch.ops.fsdp_flat.segment_maxima.default
SEND = torch.ops.fsdp_flat.send.default

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
def _spread(scalars: Tensor, layout: str, groups: list[str]) -> Tensor:
    """The scalar of each element's parameter, 1-D `[shard_numel]`, from one of each parameter, 1-D."""
    parsed = FlatParamLayout.parse(layout)
    start, stop = parsed.shard_range(shard_index(groups))
    starts = [*parsed.offsets[1:], parsed.numel]  # padding: the scalar of the parameter before it
    spans = zip([0, *starts[:-1]], starts, strict=True)
    lengths = [max(0, min(stop, end) - max(start, begin)) for begin, end in spans]
    shares = [scalars[index].expand(length) for index, length in enumerate(lengths) if length]
    return torch.cat(shares)


@torch.library.register_fake("fsdp_flat::spread")
def _spread_fake(scalars: Tensor, layout: str, groups: list[str]) -> Tensor:
    return scalars.new_empty(FlatParamLayout.parse(layout).shard_numel)


@torch.library.impl("fsdp_flat::segment_maxima", "default")
def _segment_maxima(local: Tensor, layout: str, groups: list[str], params: list[int], smallest: bool) -> Tensor:
    """Of this rank's segments of `params` the maxima, and 1 where a segment has a NaN: float32 `[2, params]`.

    A maximum that ranks reduce would lose a NaN, so it travels beside them. Of the smallest elements: their negation.
    A parameter of which the rank has no segment: minus infinity, and 0.
    """
    segments = segments_of(FlatParamLayout.parse(layout), tuple(params), shard_index(groups))
    values, flags = [], []
    for segment in segments:
        if segment is None:
            values.append(local.new_full((), -math.inf, dtype=torch.float32))
            flags.append(local.new_zeros((), dtype=torch.float32))
            continue
        elements = local.narrow(0, segment.in_shard, segment.numel)
        value = (-elements.min() if smallest else elements.max()).float()
        is_nan = value.isnan()
        values.append(torch.where(is_nan, -math.inf, value))
        flags.append(is_nan.float())
    return torch.stack((torch.stack(values), torch.stack(flags)))


@torch.library.register_fake("fsdp_flat::segment_maxima")
def _segment_maxima_fake(local: Tensor, layout: str, groups: list[str], params: list[int], smallest: bool) -> Tensor:
    return local.new_empty((2, len(params)), dtype=torch.float32)


@torch.library.impl("fsdp_flat::send", "default")
def _send(payload: Tensor) -> Tensor:
    return payload.clone()


@torch.library.register_fake("fsdp_flat::send")
def _send_fake(payload: Tensor) -> Tensor:
    return torch.empty_like(payload)
