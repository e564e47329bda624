"""FlatParamLayout against an oracle written from the formulas of the specification, and itself.

Ids name statements of the eager runtime specification. No torch: buffers are Python lists.
"""

import ast
import math
import pickle
from dataclasses import FrozenInstanceError
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fsdp_compile.core.layout
from fsdp_compile.core.layout import DEFAULT_ALIGNMENT, FlatParamLayout

FP64, FP32, BF16, FP8 = 2, 4, 8, 16  # alignments of the specification's examples, in elements

ABC = [("a", (3,)), ("b", (2, 2)), ("c", (5,))]


def test_default_alignment_is_never_under_16_bytes():
    """The default grid is 16 bytes even of one-byte elements (E-FLAT-13, E-FLAT-14, E-FLAT-21)."""
    assert DEFAULT_ALIGNMENT % 16 == 0
    assert FlatParamLayout.build(ABC, 1).offsets == (0, 16, 32)


def test_unit_without_data_is_legal():
    """A layout of zero-element parameters only is an empty buffer (E-FLAT-12)."""
    layout = FlatParamLayout.build([("a", (0,)), ("b", (2, 0))], 4, shard_alignment=16)
    assert (layout.numel, layout.shard_numel, layout.segments) == (0, 0, ())
    assert layout.records(3) == (None, None)
    assert FlatParamLayout.parse(layout.text) == layout


dims = st.integers(0, 4)
shape_lists = st.lists(st.lists(dims, max_size=4).map(tuple), min_size=1, max_size=6)  # at most 6 * 256 elements
alignments = st.sampled_from([1, FP64, FP32, BF16, FP8, DEFAULT_ALIGNMENT])
world_sizes = st.integers(1, 64)


@st.composite
def layouts(draw):
    """Layouts as `build` makes them."""
    shapes = draw(shape_lists)
    parameters = [(f"p{index}", shape) for index, shape in enumerate(shapes)]
    return FlatParamLayout.build(parameters, draw(world_sizes), draw(alignments), draw(st.sampled_from([1, 4, 16])))


fast = settings(max_examples=100, deadline=None)


@fast
@given(layouts())
def test_segments_cover_every_element_once(layout):
    """Segments follow each other from 0 to numel; each parameter with elements has one, with its offset and index;
    padding has none, is what is left, and never meets padding. E-FLAT-4, E-FLAT-18.
    """
    end = 0
    for segment in layout.segments:
        assert segment.offset == end and segment.numel > 0
        end += segment.numel
    assert end == layout.numel
    owners = [segment.parameter for segment in layout.segments if segment.parameter is not None]
    assert owners == [index for index, numel in enumerate(layout.numels) if numel]
    assert not any(one.parameter is other.parameter is None for one, other in pairwise(layout.segments))
    for segment in layout.segments:
        if segment.parameter is not None:
            place = layout.offsets[segment.parameter], layout.numels[segment.parameter]
            assert (segment.offset, segment.numel) == place
    assert layout.padding_numel == sum(segment.numel for segment in layout.segments if segment.parameter is None)


@fast
@given(shape_lists, world_sizes, alignments, st.sampled_from([1, 4, 16]))
def test_places_equal_the_running_total_of_the_specification(shapes, world_size, alignment, shard_alignment):
    """Offsets and size are those of the specification's loop: on the grid, least padding (E-FLAT-15, E-FLAT-16)."""
    parameters = [(f"p{index}", shape) for index, shape in enumerate(shapes)]
    layout = FlatParamLayout.build(parameters, world_size, alignment, shard_alignment)
    total, offsets = 0, []
    for shape in shapes:
        if total % alignment:
            total += alignment - total % alignment
        offsets.append(total)
        total += math.prod(shape)
    if total % (world_size * shard_alignment):
        total += world_size * shard_alignment - total % (world_size * shard_alignment)
    assert layout.offsets == tuple(offsets)
    assert layout.numel == total
    assert all(offset % alignment == 0 for offset in layout.offsets)
    assert layout.numel % world_size == 0 and layout.shard_numel % shard_alignment == 0


@fast
@given(layouts())
def test_shards_rebuild_every_parameter(layout):
    """`unsharded[c*r + offset + k] == param[first + k]`; ranks' parts cover a parameter once, in order.

    All ranks have shards of one size, also on a grid of 1. E-SHARD-1, 3..9, E-TEST-3.
    """
    unsharded = [None] * layout.numel  # each element: (parameter, index in it), None for padding
    for index, (offset, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True)):
        assert unsharded[offset : offset + numel] == [None] * numel  # no overlap
        unsharded[offset : offset + numel] = [(index, element) for element in range(numel)]
    rebuilt = [[] for _ in layout.shapes]
    for rank in range(layout.world_size):
        shard = unsharded[layout.shard_numel * rank : layout.shard_numel * (rank + 1)]
        for index, record in enumerate(layout.records(rank)):
            if record:
                assert record.numel == record.last - record.first + 1
                assert record.offset >= 0 and record.offset + record.numel <= layout.shard_numel
                part = shard[record.offset : record.offset + record.numel]
                assert part == [(index, element) for element in range(record.first, record.last + 1)]
                rebuilt[index] += part
        assert shard.count(None) == layout.shard_numel - sum(record.numel for record in layout.records(rank) if record)
    assert rebuilt == [[(index, element) for element in range(numel)] for index, numel in enumerate(layout.numels)]


@fast
@given(layouts())
def test_text_round_trip(layout):
    """Text and layout determine each other, so texts are equal exactly if layouts are; names come back as positions."""
    parsed = FlatParamLayout.parse(layout.text)
    assert parsed == layout and hash(parsed) == hash(layout)
    assert parsed.text == layout.text
    assert parsed.names == tuple(str(index) for index in range(len(layout.names)))
    assert FlatParamLayout.parse(layout.text) is parsed  # cached


def test_equality_ignores_names():
    """Blocks of equal shapes have equal layouts, hashes and texts; any number that differs tells them apart."""
    layout = FlatParamLayout.build([("blocks.0.w", (4, 4)), ("blocks.0.b", (4,))], 2, FP32)
    other = FlatParamLayout.build([("blocks.1.w", (4, 4)), ("blocks.1.b", (4,))], 2, FP32)
    assert layout == other and hash(layout) == hash(other) and layout.text == other.text
    assert layout != FlatParamLayout.build([("blocks.0.w", (2, 8)), ("blocks.0.b", (4,))], 2, FP32)
    assert layout != FlatParamLayout.build([("blocks.0.w", (4, 4)), ("blocks.0.b", (4,))], 4, FP32)
    assert layout != FlatParamLayout.build([("blocks.0.w", (4, 4)), ("blocks.0.b", (4,))], 2, FP64)


def test_layout_is_immutable_and_pickles_with_its_names():
    """Metadata is fixed at construction (E-FLAT-6), and what was cached on the way does not count for equality."""
    layout = FlatParamLayout.build(ABC, 2)
    with pytest.raises(FrozenInstanceError):
        layout.numel = 0
    assert layout.segments and layout.text
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout == FlatParamLayout.build(ABC, 2)
    assert copy.names == ("a", "b", "c")


def test_refusals():
    """The error of a layout with lists of unequal lengths has the lengths (E-ERR-22), that of an alignment below one
    the number (E-ERR-18).
    """
    with pytest.raises(ValueError, match="found 1 names, 2 shapes and 2 offsets"):
        FlatParamLayout(("a",), ((3,), (4,)), (0, 4), 8, 2)
    with pytest.raises(ValueError, match="alignment must be at least 1, found -4"):
        FlatParamLayout.build(ABC, 2, -4)


def test_checks_survive_optimised_python_and_need_no_torch():
    """No check is an assert statement, which `python -O` drops (E-GEN-3), and the file imports no torch."""
    nodes = list(ast.walk(ast.parse(Path(fsdp_compile.core.layout.__file__).read_text())))
    assert not [node for node in nodes if isinstance(node, ast.Assert)]
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert imported and not [name for name in imported if name.split(".")[0] == "torch"]
