"""Shards that end between rows."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compile.core.layout import MOST, FlatParamLayout, end_between_rows, lay_out
from fsdp_compile.tensors.shard_spec import FlatSharding

LINEAR = ((1024, 1024), (1024,))
GPT_BLOCK = (
    (768,),
    (768,),
    (2304, 768),
    (2304,),
    (768, 768),
    (768,),
    (768,),
    (768,),
    (3072, 768),
    (3072,),
    (768, 3072),
)
LLAMA_BLOCK = (*[(4096, 4096)] * 4, (11008, 4096), (11008, 4096), (4096, 11008), (4096,), (4096,))
CONVOLUTION = ((512, 512, 3, 3), (512,))


def built(shapes: tuple[tuple[int, ...], ...], world_size: int) -> FlatParamLayout:
    return FlatParamLayout.build([(str(i), s) for i, s in enumerate(shapes)], world_size, shard_alignment=16)


def chunks(layout: FlatParamLayout) -> int:
    """How many chunks all ranks store of all parameters."""
    shardings = [FlatSharding(s, at, layout.shard_numel) for s, at in zip(layout.shapes, layout.offsets, strict=True)]
    return sum(len(sharding.chunks(rank)) for sharding in shardings for rank in range(layout.world_size))


@pytest.mark.parametrize(
    ("shapes", "world_size", "before", "after"),
    [
        (LINEAR, 2, 5, 3),  # each rank rows of the matrix, the last one the vector
        (GPT_BLOCK, 4, 16, 14),  # 11 parameters and 3 cuts: no fewer are possible
        (LLAMA_BLOCK, 8, 28, 18),  # one cut stays in a row: rows of the last matrix are of another length
    ],
)
def test_fewer_chunks(shapes: tuple[tuple[int, ...], ...], world_size: int, before: int, after: int) -> None:
    """Of usual units the ranks store little more chunks than there are parameters and cuts."""
    layout = built(shapes, world_size)
    assert (chunks(layout), chunks(end_between_rows(layout, 16))) == (before, after)


def test_padding_that_does_not_pay() -> None:
    """A layout stays as it is where no shard ends in a row, where there is one shard, or where it would take much."""
    for shapes, world_size in [
        (((64, 64), (64, 64)), 2),
        (LINEAR, 1),
        (((3, 100), (7,)), 2),
        (CONVOLUTION, 2),
        (((0, 4), (0,)), 2),
    ]:
        layout = built(shapes, world_size)
        assert end_between_rows(layout, 16) is layout


def _cut_blocks(layout: FlatParamLayout, block: int) -> int:
    """How many shards end within a block of a parameter that consists of such blocks."""
    ends = range(layout.shard_numel, layout.numel, layout.shard_numel)
    begun = zip(layout.offsets, layout.numels, strict=True)
    spans = [(at, at + numel) for at, numel in begun if numel % block == 0]
    return sum((end - at) % block > 0 for end in ends for at, stop in spans if at < end < stop)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 8, 64, 384])
@pytest.mark.parametrize("shapes", [LINEAR, GPT_BLOCK, LLAMA_BLOCK, CONVOLUTION, ((1023, 96), (96,), (33, 1024))])
def test_shards_end_between_blocks(shapes: tuple[tuple[int, ...], ...], world_size: int) -> None:
    """Shards of usual units end between blocks of 16 to 128 elements, in no more rows, for one element in 512."""
    least = end_between_rows(built(shapes, world_size), 16)
    layout = lay_out(((str(i), shape) for i, shape in enumerate(shapes)), world_size)
    assert layout.numel <= least.numel * (1 + 1 / MOST) and _ends_in_rows(layout) <= _ends_in_rows(least)
    assert all(_cut_blocks(layout, block) == 0 for block in (16, 32, 64, 128) if block <= layout.alignment)
    assert layout.alignment == 128 or world_size > 64 or shapes not in (GPT_BLOCK, LLAMA_BLOCK)  # small ones may stay


SHAPES = st.lists(st.lists(st.integers(0, 300), max_size=3).map(tuple), min_size=1, max_size=6).map(tuple)


@given(SHAPES, st.integers(1, 9))
def test_what_else_a_layout_has_stays(shapes: tuple[tuple[int, ...], ...], world_size: int) -> None:
    """Places stay; padding at the end is within the limit; shards keep to their grid; fewer end in a row than before.

    E-FLAT-15, E-FLAT-16.
    """
    layout = built(shapes, world_size)
    found = end_between_rows(layout, 16)
    assert (found.names, found.shapes, found.offsets) == (layout.names, layout.shapes, layout.offsets)
    assert layout.numel <= found.numel <= layout.numel * (1 + 1 / MOST)
    assert found.shard_numel % 16 == 0
    if found is not layout:
        assert _ends_in_rows(found) < _ends_in_rows(layout)


@given(SHAPES, st.integers(1, 9))
def test_every_unit_is_laid_out(shapes: tuple[tuple[int, ...], ...], world_size: int) -> None:
    """Any shapes have a layout, also those without elements, with little more padding and no more rows that are cut."""
    least = end_between_rows(built(shapes, world_size), 16)
    layout = lay_out(((str(i), shape) for i, shape in enumerate(shapes)), world_size)
    assert layout.numel <= least.numel * (1 + 1 / MOST)
    assert layout.shard_numel % 16 == 0 and layout.alignment % 16 == 0
    assert _ends_in_rows(layout) <= _ends_in_rows(least)


def _ends_in_rows(layout: FlatParamLayout) -> int:
    """For each cut that is inside of a parameter whether it leaves a part of a row, by the ranks' records."""
    found = 0
    for rank in range(layout.world_size):
        for shape, record in zip(layout.shapes, layout.records(rank), strict=True):
            found += record is not None and (record.last + 1) % math.prod(shape[1:]) > 0
    return found
