"""A range of a flattened tensor as chunks of the n-dimensional tensor."""

import math
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.tensors.shard_spec import Chunk, FlatSharding, ShardRanks, ShardSpec, chunks_of_view

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    first = draw(st.integers(0, math.prod(shape)))
    return shape, first, draw(st.integers(0, math.prod(shape) - first))


@given(ranges())
def test_chunks_are_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
    """Chunks, flattened one after the other, are the elements of the range in order, few and none empty."""
    shape, first, numel = case
    full = torch.arange(math.prod(shape)).view(shape)
    chunks = chunks_of_view(full, first, numel) or ()
    elements = torch.cat([torch.empty(0, dtype=torch.int64), *[_take(full, chunk).reshape(-1) for chunk in chunks]])
    assert elements.tolist() == list(range(first, first + numel))
    ends = [0]
    for chunk in chunks:
        assert chunk.start == ends[-1] and chunk.numel > 0
        ends.append(chunk.start + chunk.numel)
    assert len(chunks) <= max(1, 2 * len(shape) - 1)


def _take(full: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    return full[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]


@given(ranges(), st.randoms())
def test_chunks_of_views(case: tuple[tuple[int, ...], int, int], random: Random) -> None:
    """Of a transposed and sliced view, chunks are its elements of the range, and lie there by its strides."""
    shape, first, numel = case
    full = torch.arange(math.prod(shape))
    view = full.view(shape).permute(random.sample(range(len(shape)), len(shape)))
    view = view[tuple(slice(random.randint(0, size), None, random.randint(1, 2)) for size in view.shape)]
    stored, found = full[first : first + numel], []
    for chunk in chunks_of_view(view, first, numel) or ():
        here = stored.as_strided(chunk.sizes, view.stride(), first + chunk.start)
        assert torch.equal(here, _take(view, chunk)) and chunk.numel
        found += here.flatten().tolist()
    assert sorted(found) == sorted(each for each in view.flatten().tolist() if first <= each < first + numel)


def test_a_view_with_elements_in_two_places() -> None:
    """It has no chunks."""
    assert chunks_of_view(torch.empty(3, device="meta").expand(2, 3), 0, 3) is None
    assert chunks_of_view(torch.empty(6, device="meta").unfold(0, 3, 1), 0, 3) is None


@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(1, 8))
def test_a_sharding_is_what_the_layout_says(shapes: list[tuple[int, ...]], world_size: int) -> None:
    """For each parameter and rank, what is stored is the layout's record; all ranks cover the parameter once."""
    layout = FlatParamLayout.build([(str(i), shape) for i, shape in enumerate(shapes)], world_size)
    for index, shape in enumerate(shapes):
        sharding = FlatSharding(shape, layout.offsets[index], layout.shard_numel)
        covered: list[int] = []
        for rank in range(world_size):
            record = layout.record(index, rank)
            first, numel = sharding.local_range(rank)
            assert (first, numel) == ((record.first, record.numel) if record else (0, 0))
            assert sum(chunk.numel for chunk in sharding.chunks(rank)) == numel
            covered += range(first, first + numel)
        assert covered == list(range(math.prod(shape)))


def test_ranges_of_specs() -> None:
    """Tensors of one shape are alike where every rank has the same elements, wherever they lie in their flat buffers;
    complete rows are shown without a copy; new process groups count for all tensors over the same ranks."""
    ranks = ShardRanks("first", 2, 1, "replicas")
    whole = ShardSpec(FlatSharding((2, 2), 0, 8), ranks)
    assert whole.same_ranges(ShardSpec(FlatSharding((2, 2), 4, 8), ranks))
    assert not whole.same_ranges(ShardSpec(FlatSharding((2, 2), 6, 8), ranks))
    assert not whole.same_ranges(ShardSpec(FlatSharding((4,), 0, 8), ranks))
    local = torch.arange(6.0)
    rows = ShardSpec(FlatSharding((4, 3), 0, 6), ranks).rows_of(local, 0.0)
    assert rows.shape == (2, 3) and rows.data_ptr() == local.data_ptr()
    alike = ShardRanks("first", 2, 1, "replicas")
    ranks._made["asked for"] = None
    assert ranks == alike and repr(ranks) == repr(alike), "what was asked of them makes no difference"
