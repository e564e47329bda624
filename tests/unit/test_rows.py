"""Shards that end between rows."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compile.core.layout import MORE, MOST, FlatParamLayout, lay_out
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


def llama_block(width: int, keys: int, hidden: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of a block, in the order of its parameters."""
    attention = (width, width), (keys, width), (keys, width), (width, width)
    return *attention, (hidden, width), (width, hidden), (hidden, width), (width,), (width,)


LLAMA_8B, LLAMA_70B = llama_block(4096, 1024, 14336), llama_block(8192, 1024, 28672)
EXPERTS = ((128, 1536, 2048), (128, 2048, 768), (128, 2048), (4096, 2048), (2048, 4096), (512, 2048), (2048,))
CONVOLUTION = ((512, 512, 3, 3), (512,))


def laid_out(shapes: tuple[tuple[int, ...], ...], world_size: int) -> FlatParamLayout:
    return lay_out(((str(i), shape) for i, shape in enumerate(shapes)), world_size)


def chunks(layout: FlatParamLayout) -> int:
    """How many chunks all ranks store of all parameters."""
    shardings = [FlatSharding(s, at, layout.shard_numel) for s, at in zip(layout.shapes, layout.offsets, strict=True)]
    return sum(len(sharding.chunks(rank)) for sharding in shardings for rank in range(layout.world_size))


def cuts(layout: FlatParamLayout, dims: int = 1) -> int:
    """How many shards end within one index into the first `dims` dimensions of a parameter, by the ranks' records."""
    found = 0
    for rank in range(layout.world_size):
        for shape, record in zip(layout.shapes, layout.records(rank), strict=True):
            row = math.prod(shape[dims if len(shape) > 2 else 1 :])
            found += record is not None and (record.last + 1) % row > 0
    return found


@pytest.mark.parametrize(
    ("shapes", "world_size", "expected"),
    [
        (LINEAR, 2, 3),  # each rank rows of the matrix, the last one the vector
        (GPT_BLOCK, 4, 14),  # 11 parameters and 3 cuts: no fewer are possible
        *((LLAMA_8B, ranks, number) for ranks, number in ((4, 12), (8, 16), (64, 72), (256, 262))),
        *((LLAMA_70B, ranks, number) for ranks, number in ((4, 12), (8, 16), (64, 72))),
    ],
)
def test_nothing_is_cut(shapes: tuple[tuple[int, ...], ...], world_size: int, expected: int) -> None:
    """Of usual units no shard ends within a row: ranks store one chunk for each parameter and cut."""
    layout = laid_out(shapes, world_size)
    assert cuts(layout) == 0 and chunks(layout) == expected
    assert layout.padding_numel * (MOST if world_size <= 8 else MORE) <= layout.numel


def test_stacked_experts_are_cut_between_rows_of_one() -> None:
    """A tensor of three dimensions counts by its first two where its first one costs too much."""
    layout = laid_out(EXPERTS, 64)
    assert cuts(layout, 2) == 0 < cuts(layout, 1) and layout.padding_numel * MOST <= layout.numel


def _cut_blocks(layout: FlatParamLayout, block: int) -> int:
    """How many shards end within a block of a parameter that consists of such blocks."""
    ends = range(layout.shard_numel, layout.numel, layout.shard_numel)
    begun = zip(layout.offsets, layout.numels, strict=True)
    spans = [(at, at + numel) for at, numel in begun if numel % block == 0]
    return sum((end - at) % block > 0 for end in ends for at, stop in spans if at < end < stop)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 8, 64, 384])
@pytest.mark.parametrize("shapes", [LINEAR, GPT_BLOCK, LLAMA_8B, CONVOLUTION, ((1023, 96), (96,), (33, 1024))])
def test_shards_end_between_blocks(shapes: tuple[tuple[int, ...], ...], world_size: int) -> None:
    """Shards of usual units end between blocks of 16 to 128 elements that share a scale."""
    layout = laid_out(shapes, world_size)
    assert all(_cut_blocks(layout, block) == 0 for block in (16, 32, 64, 128) if block <= layout.alignment)
    assert layout.alignment == 128 or world_size > 64 or shapes not in (GPT_BLOCK, LLAMA_8B)  # small ones may stay


SHAPES = st.lists(st.lists(st.integers(0, 300), max_size=3).map(tuple), min_size=1, max_size=6).map(tuple)


@given(SHAPES, st.integers(1, 9))
def test_every_unit_is_laid_out(shapes: tuple[tuple[int, ...], ...], world_size: int) -> None:
    """Any shapes have a layout, also those without elements, in their order, with little more padding than is needed
    and no more rows that are cut; more than 1/512 only where nothing is. E-FLAT-15, E-FLAT-16, E-COMP-6.
    """
    least = FlatParamLayout.build([(str(i), s) for i, s in enumerate(shapes)], world_size, shard_alignment=16)
    layout = laid_out(shapes, world_size)
    assert (layout.names, layout.shapes) == (least.names, least.shapes)
    assert layout.numel <= least.numel * (1 + 1 / MOST) or (
        layout.numel <= least.numel * (1 + 1 / MORE) and cuts(layout, 2) == 0
    )
    assert layout.shard_numel % 16 == 0 and layout.alignment % 16 == 0 and cuts(layout, 2) <= cuts(least, 2)


@given(SHAPES)
def test_a_layout_that_is_the_same_on_any(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Parameters start where they do on one rank: the end alone depends on how many there are. Shards end at multiples
    of 64, so that kernels see the same rests."""
    named = [(str(i), shape) for i, shape in enumerate(shapes)]
    layouts = [lay_out(named, world_size, same_on_any=True) for world_size in (1, 2, 4, 8)]
    assert len({layout.offsets for layout in layouts}) == 1
    assert all(layout.shard_numel % 64 == 0 for layout in layouts)
