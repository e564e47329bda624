"""Where each parameter of a unit lies in its flat buffer, and which part of it each rank stores.

Integers only: no tensors, no process group. Every number counts elements, never bytes. Below, a (3), b (2x2) and c (5)
are laid out for two ranks on a grid of 4 elements; a dot is padding:

    element    0       4       8         12
    buffer   | a a a . b b b b c c c c c . |      c ends at 13; one more element makes 14 divisible by two ranks
    rank 0   | a a a . b b b |                    b lies in both shards: 3 elements here,
    rank 1                   | b c c c c c . |    the last one there

A layout holds nothing that depends on the rank; what one rank stores is asked of it (`record`).
Ids such as E-FLAT-15 name statements of the eager runtime specification.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import combinations

DEFAULT_ALIGNMENT = 16
"""Grid on which parameters start, in elements. Inductor takes a slice of a buffer as aligned for writing only at
multiples of 16 elements, whatever the dtype; for one-byte elements this is still 16 bytes."""

MOST, MORE = 512, 50
"""Padding that makes shards end between rows is at most one element in so many; in `MORE` if then none ends within."""


@dataclass(frozen=True)
class ShardRecord:
    """The part of one parameter that one rank stores, in elements (E-SHARD-5). Never empty."""

    offset: int  # where the part starts in the rank's shard
    numel: int
    first: int  # index of its first element in the flattened parameter
    last: int  # and of its last, inclusive


@dataclass(frozen=True)
class LayoutSegment:
    """A run of the full buffer, in elements: one parameter or one gap of padding (E-FLAT-4, E-FLAT-18). Never empty."""

    offset: int
    numel: int
    parameter: int | None  # index into the layout's shapes; None for padding


@dataclass(frozen=True)
class FlatParamLayout:
    """Where a unit's parameters lie in one 1-D buffer that divides evenly among the ranks. All numbers in elements.

    Equality and hash leave the names out: blocks of equal shapes have equal layouts, hence equal graphs. Parameters
    start on the grid and follow each other without overlap. `build` chooses the offsets.
    """

    names: tuple[str, ...] = field(compare=False)  # for people; unique
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]  # where each parameter starts in the full buffer
    numel: int  # of the full buffer, padding included
    world_size: int
    alignment: int = DEFAULT_ALIGNMENT

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.shapes) == len(self.offsets):
            lengths = f"{len(self.names)} names, {len(self.shapes)} shapes and {len(self.offsets)} offsets"
            raise ValueError(f"a layout needs one name, shape and offset per parameter, found {lengths}")

    @classmethod
    def build(
        cls,
        parameters: Iterable[tuple[str, Sequence[int]]],
        world_size: int,
        alignment: int = DEFAULT_ALIGNMENT,
        shard_alignment: int = 1,
    ) -> "FlatParamLayout":
        """Lay out `(name, shape)` pairs in the order given, with the least padding.

        Padding precedes each parameter that would start off the grid of `alignment` elements (E-FLAT-15), and fills the
        end until the buffer divides into `world_size` shards of a multiple of `shard_alignment` elements (E-FLAT-16).
        ValueError for an alignment below 1.
        """
        if alignment < 1:
            raise ValueError(f"alignment must be at least 1, found {alignment}")
        names, shapes, offsets = [], [], []
        end = 0
        for name, dims in parameters:
            shape = tuple(dims)
            offset = round_up(end, alignment)
            end = offset + math.prod(shape)
            names.append(name)
            shapes.append(shape)
            offsets.append(offset)
        numel = round_up(end, world_size * shard_alignment)
        return cls(tuple(names), tuple(shapes), tuple(offsets), numel, world_size, alignment)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, the same on every rank (E-SHARD-1)."""
        return self.numel // self.world_size

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each parameter; 1 for a 0-d shape (E-FLAT-11)."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def segments(self) -> tuple[LayoutSegment, ...]:
        """Consecutive segments that cover each element of the buffer once, in order (E-FLAT-4), none of them empty."""
        segments: list[LayoutSegment] = []
        end = 0
        for parameter, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            if numel:
                segments += [LayoutSegment(end, offset - end, None), LayoutSegment(offset, numel, parameter)]
                end = offset + numel
        segments.append(LayoutSegment(end, self.numel - end, None))
        return tuple(segment for segment in segments if segment.numel)

    @cached_property
    def windows(self) -> tuple[list[int], list[tuple[int, tuple[int, ...] | None]], list[int]]:
        """The sizes of all segments; for each parameter with elements its segment, and its shape if not 1-D; and the
        indices of those without.
        """
        at = [(place, each.parameter) for place, each in enumerate(self.segments) if each.parameter is not None]
        shapes = [(place, self.shapes[index]) for place, index in at]
        windows = [(place, None if len(shape) == 1 else shape) for place, shape in shapes]
        return [each.numel for each in self.segments], windows, [i for i, numel in enumerate(self.numels) if not numel]

    @property
    def padding_numel(self) -> int:
        """Elements of the buffer that no parameter owns."""
        return self.numel - sum(self.numels)

    def record(self, index: int, rank: int) -> ShardRecord | None:
        """The part of parameter `index` that `rank` stores; None if it stores nothing of it (E-SHARD-6, E-SHARD-9)."""
        start, origin = rank * self.shard_numel, self.offsets[index]
        low, high = max(start, origin), min(start + self.shard_numel, origin + self.numels[index])
        if low >= high:
            return None
        return ShardRecord(offset=low - start, numel=high - low, first=low - origin, last=high - origin - 1)

    def records(self, rank: int) -> tuple[ShardRecord | None, ...]:
        """`record` of every parameter on `rank` (E-SHARD-8)."""
        return tuple(self.record(index, rank) for index in range(len(self.shapes)))

    @cached_property
    def text(self) -> str:
        """The layout as a constant for compilers, without names and rank. `parse` reads it back.

        Grammar: `shape@offset,...|numel/world_size%alignment`, dimensions joined by `x`, nothing for a 0-d shape, as in
        `64x96@0,96@6144,@6240|6272/4%16`. Equal layouts, and only those, have equal texts.
        """
        pairs = zip(self.shapes, self.offsets, strict=True)
        parameters = ",".join(f"{'x'.join(map(str, shape))}@{offset}" for shape, offset in pairs)
        return f"{parameters}|{self.numel}/{self.world_size}%{self.alignment}"

    @staticmethod
    @lru_cache(maxsize=1024)  # read at every run of an op; layouts are immutable
    def parse(text: str) -> "FlatParamLayout":
        """The layout that wrote `text`, its parameters named "0", "1" and so on."""
        parameters, *numbers = re.split("[|/%]", text)
        shapes, offsets = zip(*(parameter.split("@") for parameter in parameters.split(",")), strict=True)
        return FlatParamLayout(
            tuple(map(str, range(len(shapes)))),
            tuple(tuple(int(dim) for dim in shape.split("x") if dim) for shape in shapes),
            tuple(map(int, offsets)),
            *map(int, numbers),
        )


_BLOCKS = (128, 64, 32, DEFAULT_ALIGNMENT)
"""Elements that share a scale, in formats of numbers that have such blocks."""

_VECTORS = 64
"""Elements that a kernel on the CPU computes in one turn, at most; it computes what is left over by other instructions,
which may round otherwise. Shards of a multiple leave over the same elements however many there are."""


def lay_out(
    parameters: Iterable[tuple[str, Sequence[int]]], world_size: int, same_on_any: bool = False, rows: float = 0.0
) -> FlatParamLayout:
    """The layout of `(name, shape)` pairs over `world_size` ranks whose shards end between rows, and between blocks.

    See Note [Why shards end between rows]. It pads at most one element in `MOST` more than `build`, or one in `MORE`
    where then no shard ends within a row; with `rows` that part, where none ends within one index into a first
    dimension. Parameters and shards start at multiples of 128, 64 or 32 elements instead of 16 if that cuts no more
    rows: then no two ranks share a block that has a scale. With `same_on_any` they start at multiples of 64, so that
    the end of the buffer alone depends on `world_size`.
    """
    names, shapes = zip(*((name, tuple(shape)) for name, shape in parameters), strict=True)
    return replace(_laid_out(shapes, world_size, same_on_any, rows), names=names)


@lru_cache(maxsize=1024)  # blocks of a model have the same shapes
def _laid_out(shapes: tuple[tuple[int, ...], ...], world_size: int, same_on_any: bool, rows: float) -> FlatParamLayout:
    named, judged = [(str(index), shape) for index, shape in enumerate(shapes)], int(rows > 0)
    if same_on_any:
        least = FlatParamLayout.build(named, world_size, _VECTORS, _VECTORS)
        return min(_padded(least, least.numel * (1 + 1 / MOST), moves=False), key=_cut_rows)
    best = least = FlatParamLayout.build(named, world_size, DEFAULT_ALIGNMENT, DEFAULT_ALIGNMENT)
    for part in (1 / MOST, rows or 1 / MORE):
        found = best
        for grid in _BLOCKS:
            tight = FlatParamLayout.build(named, world_size, grid, grid)
            found = min([found, *_padded(tight, least.numel * (1 + part))], key=_cut_rows)
            if not any(_cut_rows(found)[:2]):
                break
        if part == 1 / MOST or not _cut_rows(found)[judged]:
            best = found
        if not _cut_rows(best)[judged]:
            break
    return best


def _padded(tight: FlatParamLayout, most: float, moves: bool = True) -> Iterator[FlatParamLayout]:
    """`tight` with more padding, of up to `most` elements: at its end, or so that parameters start further on."""
    for rows in dict.fromkeys(tuple(_row(shape, dims) for shape in tight.shapes) for dims in (1, 2)):
        longest = sorted({row for row in rows if row > 1})[-5:]
        steps = {
            math.lcm(tight.alignment, *chosen)
            for count in range(len(longest) + 1)
            for chosen in combinations(longest, count)
        }
        for shard in sorted({round_up(tight.shard_numel, step) + more * step for step in steps for more in range(3)}):
            if (numel := shard * tight.world_size) > most:
                break
            yield replace(tight, numel=numel)
            offsets, end = [], 0
            for each, row in zip(tight.numels, rows, strict=True):
                offsets.append(_start_of_rows(end, each, row, shard, tight.alignment))
                end = offsets[-1] + each
            if moves and end <= numel:
                yield replace(tight, offsets=tuple(offsets), numel=numel)


def _start_of_rows(begin: int, numel: int, row: int, shard: int, grid: int) -> int:
    """The first multiple of `grid` from `begin` on at which no shard ends within a row of a parameter of `numel`
    elements, if there is one near; else the first one.
    """
    begin = round_up(begin, grid)
    end = begin - begin % shard + shard if numel else begin  # of the shard in which it would start
    if begin + numel <= end or row == 1:
        return begin
    found = [end] if numel <= shard else []
    common, step = math.gcd(row, grid), math.lcm(row, grid)
    for first in (end, end + shard):  # the first end of a shard that is within
        if first % common == 0:  # multiples of `grid` that are whole rows before it: Chinese remainders
            start = first // common * pow(grid // common, -1, row // common) % (row // common) * grid
            start += max(0, round_up(begin - start, step))
            if start < first and (shard % row == 0 or start + numel <= first + shard):
                found.append(start)
    return min(found, default=begin)


def _cut_rows(layout: FlatParamLayout) -> tuple[int, int, int, int]:
    """What decides between layouts, less is better: how many shards end within one index into the first two dimensions
    of a parameter (of a matrix: into the first one), how many within one into the first, the grid, the size.
    """
    parts, rows = 0, 0
    for end in range(layout.shard_numel, layout.numel, layout.shard_numel) if layout.numel else ():
        index = bisect_right(layout.offsets, end) - 1
        within, shape = end - layout.offsets[index], layout.shapes[index]
        if within < layout.numels[index]:
            parts += within % _row(shape, 2) > 0
            rows += within % _row(shape, 1) > 0
    return parts, rows, -layout.alignment, layout.numel


def _row(shape: tuple[int, ...], dims: int) -> int:
    """Elements of one index into the first `dims` dimensions; of a matrix and a vector, into the first one."""
    return math.prod(shape[dims if len(shape) > 2 else 1 :])


def round_up(count: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple
