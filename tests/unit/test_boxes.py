"""A run of a flattened tensor as boxes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.state_dict.boxes import Box, Cut, boxes_of_run

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    first = draw(st.integers(0, math.prod(shape)))
    return shape, first, draw(st.integers(0, math.prod(shape) - first))


@given(runs())
def test_boxes_are_the_run(run: tuple[tuple[int, ...], int, int]) -> None:
    """Boxes, flattened one after the other, are the elements of the run in order; none is empty, and they are few."""
    shape, first, numel = run
    full = torch.arange(math.prod(shape)).view(shape)
    boxes = boxes_of_run(shape, first, numel)
    found = torch.cat([torch.empty(0, dtype=torch.int64), *[_cut(full, box).reshape(-1) for box in boxes]])
    assert found.tolist() == list(range(first, first + numel))
    ends = [0]
    for box in boxes:
        assert box.start == ends[-1] and box.numel > 0
        ends.append(box.start + box.numel)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def _cut(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]


def test_most_boxes() -> None:
    """The bound `2 * ndim - 1` is reached."""
    for ndim in range(1, 6):
        shape = (4,) * ndim
        assert len(boxes_of_run(shape, 1, 4**ndim - 2)) == 2 * ndim - 1


@pytest.mark.parametrize(("first", "numel"), [(-1, 2), (0, 25), (20, 5), (0, -1)])
def test_a_run_beyond_the_tensor(first: int, numel: int) -> None:
    """A run that is not within the tensor is refused with its numbers."""
    with pytest.raises(ValueError, match=rf"24 elements of shape \(4, 6\), found {numel} elements from {first}"):
        boxes_of_run((4, 6), first, numel)


@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(1, 8))
def test_a_cut_is_what_the_layout_says(shapes: list[tuple[int, ...]], world_size: int) -> None:
    """For each parameter and rank, the run of a cut is the layout's record; all ranks cover the parameter once."""
    layout = FlatParamLayout.build([(str(i), shape) for i, shape in enumerate(shapes)], world_size)
    for index, shape in enumerate(shapes):
        cut = Cut(shape, layout.offsets[index], layout.shard_numel)
        covered: list[int] = []
        for rank in range(world_size):
            record = layout.record(index, rank)
            assert cut.run(rank) == ((record.first, record.numel) if record else (0, 0))
            assert sum(box.numel for box in cut.boxes(rank)) == cut.run(rank)[1]
            covered += range(cut.run(rank)[0], sum(cut.run(rank)))
        assert covered == list(range(math.prod(shape)))
