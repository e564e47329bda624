"""Which elements of a sharded tensor each rank stores: as ranges, as rows and as chunks of its shape.

A rank stores one range of the flattened elements of each parameter, while torch.distributed.checkpoint (DCP) speaks of
chunks: boxes in the original shape. Elements 5 to 17 of a 4 x 6 tensor are two chunks, and `2 * ndim - 1` is the most
that a range of an n-dimensional tensor needs:

    . . . . . a        a    row 0, column 5
    b b b b b b        b    rows 1 and 2, all columns
    b b b b b b
    . . . . . .
"""

# Note [Why shards end between rows]
# torch.distributed.checkpoint plans, writes and reads chunk by chunk, and each chunk takes an entry in `.metadata` and
# in a file. A shard that ends within a row of a matrix leaves two chunks on either side: complete rows and a part of
# one. So `lay_out` in core/layout.py pads where fewer shards then end within a row: a block of Llama 3 8B is 72 chunks
# on 64 ranks, 262 on 256; with padding at its end alone 106 and 764.

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from fsdp_compile.comm import collectives
from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.groups import mesh_of
from fsdp_compile.core._torch import joined_mesh
from fsdp_compile.tensors.tensor_parallel import TensorParallel

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, of which a rank stores all elements. Never empty."""

    offsets: tuple[int, ...]  # of its first element, in the tensor's shape
    sizes: tuple[int, ...]
    start: int  # index of its first element among the elements that the rank stores

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)


def chunks_of_view(view: Tensor, first: int, numel: int) -> tuple[Chunk, ...] | None:
    """Those elements of `view` that are elements `first` to `first + numel - 1` of the flattened tensor below it.

    At most `max(1, 2 * view.dim() - 1)` chunks, which lie there by its strides. None if an element is in two places.
    """
    order = sorted(range(view.dim()), key=view.stride().__getitem__, reverse=True)
    shape, strides = (tuple(each[dim] for dim in order) for each in (view.shape, view.stride()))
    if any(shape[at] > 1 and strides[at] < _extent(shape[at + 1 :], strides[at + 1 :]) for at in range(len(order))):
        return None
    chunks = []
    start = first - int(view.storage_offset())
    for offsets, sizes in _boxes_between(shape, strides, start, start + numel) if numel and view.numel() else ():
        at = sum(map(operator.mul, offsets, strides)) - start
        offsets, sizes = (tuple(each for _, each in sorted(zip(order, box, strict=True))) for box in (offsets, sizes))
        chunks.append(Chunk(offsets, sizes, at))
    return tuple(chunks)


def _extent(shape: Sizes, strides: Sizes) -> int:
    """How many elements lie from the first of a tensor to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _boxes_between(shape: Sizes, strides: Sizes, start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Offsets and sizes of the elements that lie at `start` to `stop`: a row's end, rows, a row's beginning."""
    if not shape:
        yield from [((), ())] if start <= 0 < stop else []
        return
    (rows, *_), stride, rest, steps = shape, strides[0] or 1, shape[1:], strides[1:]
    first = min(max(-(-start // stride), 0), rows)  # of the complete rows
    last = min(max((stop - _extent(rest, steps)) // stride + 1, 0), rows)
    for row in sorted({first - 1, last}):
        if row == last and first < last:
            yield (first, *[0] * len(rest)), (last - first, *rest)
        if 0 <= row < rows:
            for offsets, sizes in _boxes_between(rest, steps, start - row * stride, stop - row * stride):
                yield (row, *offsets), (1, *sizes)


@dataclass(frozen=True)
class FlatSharding:
    """How one flattened tensor is sharded: it lies in a flat buffer that the ranks split into equal shards.

    This is what a `FlatParamLayout` says of one of its parameters; it holds for optimizer state of that shape too.
    """

    shape: tuple[int, ...]  # of the full tensor
    offset: int  # of its first element in the flat buffer
    shard_numel: int  # elements of each rank's shard of the buffer
    shard_order: tuple[int, ...] = ()  # for each rank the shard that it stores; empty: rank r stores shard r

    def local_range(self, rank: int) -> tuple[int, int]:
        """The first element of the flattened tensor that `rank` stores, and how many; (0, 0) if none."""
        shard = self.shard_order[rank] if self.shard_order else rank
        low = max(shard * self.shard_numel, self.offset)
        high = min((shard + 1) * self.shard_numel, self.offset + math.prod(self.shape))
        return (low - self.offset, high - low) if low < high else (0, 0)

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """What `rank` stores, as chunks."""
        return chunks_of_view(torch.empty(self.shape, device="meta"), *self.local_range(rank)) or ()


# --- this rank --------------------------------------------------------------------------------------------------------


class Wait:  # a generator would be slower, and traced code may have no `try`
    """Context of a collective, such as an "all-gather", of `what`, a parameter or a function that returns its name: a
    RuntimeError gets a note that says so, and which `ranks` take part.
    """

    __slots__ = ("_kind", "_ranks", "_what")

    def __init__(self, ranks: "ShardRanks", kind: str, what: str | Callable[[], str]) -> None:
        self._ranks, self._kind, self._what = ranks, kind, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, RuntimeError):
            what = self._what if isinstance(self._what, str) else self._what()
            error.add_note(
                f"This was the {self._kind} of {what}, among ranks {self._ranks.listed()}: one of them has ended, or "
                f"does not run this; let all of them run it, and print or save on one."
            )


@dataclass(frozen=True)
class ShardRanks:
    """The ranks that tensors are sharded over, and which of them this one is.

    With a `size` of 1, this rank stores all elements, and nothing is sent but to replicas.
    """

    group: str  # the name of their process group; with a `size` of 1 it may be that of the replicas
    size: int
    rank: int  # in that group
    replicas: str | None = None  # hybrid sharding: the name of the group of the ranks that store the same shard
    same_bits: bool = False  # whether sums over elements do not depend on the number of ranks
    given: DeviceMesh | None = field(default=None, compare=False)  # that the user gave: its last dimension is `group`
    rows: bool = False  # whether each of them stores complete rows, which `to_local` then gives
    _made: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> Any:
        return ShardRanks, (self.group, self.size, self.rank, self.replicas, self.same_bits, None, self.rows)

    def check_here(self) -> None:
        """Check before a collective that this process is the rank whose part this is.

        Raises:
            RuntimeError: it is another, because a tensor was loaded that another rank, or one of so many, has saved.
        """
        here, size = ((group := group_named(self.group)).rank(), group.size()) if self.size > 1 else (0, 1)
        if (here, size) != (self.rank, self.size):
            raise RuntimeError(
                f"expected what rank {here} of {size} stores, found the part of rank {self.rank} of {self.size}; load "
                f"what this rank saved, or save full tensors, as full state dicts and torch.distributed.checkpoint do"
            )

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh that was given; or the ranks as a 1-D mesh of devices of that type, or of one that they can use."""
        if self.given is not None:
            return self.given
        return self.once(device_type, lambda: mesh_of(self.group, self.size, self.rank, device_type))

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def listed(self) -> str:
        """These ranks, as they count in the whole job, for errors."""
        ranks = dist.get_process_group_ranks(group_named(self.group))
        return ", ".join(map(str, ranks[:8])) + (f", ... {ranks[-1]}" if len(ranks) > 8 else "")

    def average(self, value: Tensor) -> Tensor:
        """The mean of `value`, plain, over all data-parallel ranks: those of this group and their replicas.

        Of an expanded dimension, one element is sent.
        """
        distinct = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]
        with Wait(self, "all-reduce", f"a gradient of shape {tuple(value.shape)}"):
            mean = distinct.contiguous()
            mean = mean if self.size == 1 else collectives.all_reduce(mean, self.group, "avg")
            mean = mean if self.replicas is None else collectives.all_reduce(mean, self.replicas, "avg")
        return mean.expand(value.shape)


@dataclass(frozen=True)
class ShardSpec:
    """What this rank stores of a sharded tensor: one object for a parameter, its gradient and its optimizer state.

    What follows from shapes and offsets is computed once, and two specs of one model are compared by identity first.
    """

    sharding: FlatSharding  # which elements each rank stores: of the local tensor, if there is a `tensor_parallel`
    ranks: ShardRanks
    tensor_parallel: TensorParallel | None = None  # how the tensor is distributed over other ranks beside

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.sharding, self.tensor_parallel))  # not of the ranks, whose groups may change

    def __deepcopy__(self, memo: object) -> "ShardSpec":
        return self

    def __reduce__(self) -> Any:
        return ShardSpec, (self.sharding, self.ranks, self.tensor_parallel)

    def same_ranges(self, other: "ShardSpec") -> bool:
        """Whether local data of `other` holds the same elements, on every rank."""
        mine, theirs = self.ranks, other.ranks
        return self is other or (
            (self.sharding == other.sharding or (self.shape, self.ranges) == (other.shape, other.ranges))
            and self.tensor_parallel == other.tensor_parallel
            and (mine is theirs or (mine.rank, mine.size) == (theirs.rank, theirs.size))
        )

    @cached_property
    def shape(self) -> torch.Size:
        """The shape of the full tensor."""
        return self.split_shape if self.tensor_parallel is None else self.tensor_parallel.shape

    @cached_property
    def split_shape(self) -> torch.Size:
        """The shape of what the ranks split: of the full tensor, or of the local tensor of a DTensor."""
        return torch.Size(self.sharding.shape)

    def named(self) -> str:
        """The parameter, or what is sharded as it is, for errors."""
        shape = tuple(self.shape)
        names, index = vars(self).get("names", ([], 0))
        return f"{names[index]}, shape {shape}" if names else f"a sharded tensor of shape {shape}"

    @property
    def reducing_groups(self) -> tuple[str, ...]:
        """The names of the groups whose ranks store different elements: what `all_reduce` reduces over."""
        shards = (self.ranks.group,) if self.ranks.size > 1 else ()
        return (*shards, *(self.tensor_parallel.groups if self.tensor_parallel else ()))

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """For each rank the first element of the flattened tensor that it stores, and how many."""
        return tuple(self.sharding.local_range(rank) for rank in range(self.ranks.size))

    @cached_property
    def first(self) -> int:
        """Index of the first element that this rank stores, in the flattened tensor; 0 if it stores none."""
        return self.ranges[self.ranks.rank][0]

    @cached_property
    def numel(self) -> int:
        """How many elements this rank stores."""
        return self.ranges[self.ranks.rank][1]

    @property
    def is_whole(self) -> bool:
        """Whether there is one rank, which stores all elements."""
        return self.ranks.size == 1 and self.tensor_parallel is None

    @cached_property
    def row_numel(self) -> int:
        """Elements of one index into the first dimension."""
        return math.prod(self.split_shape[1:])

    @cached_property
    def row(self) -> int:
        """The same, where rows of what the ranks split are rows of the full tensor on their mesh; else 0."""
        parallel = self.tensor_parallel
        split = parallel and (self.joined_mesh is None or any(each.is_shard(0) for each in parallel.placements))
        return 0 if split else self.row_numel

    @cached_property
    def is_one_chunk_on_all_ranks(self) -> bool:
        """Whether no rank stores more than one chunk of it."""
        return all(len(self.sharding.chunks(rank)) <= 1 for rank in range(self.ranks.size))

    @cached_property
    def rows(self) -> tuple[int, int]:
        """The half-open range of indices into the first dimension of which this rank stores some elements."""
        if not self.numel:
            return 0, 0
        return self.first // self.row_numel, -(-(self.first + self.numel) // self.row_numel)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """What this rank stores, as chunks of the full tensor."""
        chunks = self.sharding.chunks(self.ranks.rank)
        if self.tensor_parallel is None:
            return chunks
        _, start = self.tensor_parallel.local_box
        return tuple(replace(chunk, offsets=tuple(map(operator.add, start, chunk.offsets))) for chunk in chunks)

    @property
    def joined_mesh(self) -> DeviceMesh | None:
        """The mesh that was given and that of tensor parallelism as one; None if there are no two parts of one mesh."""
        given, parallel = self.ranks.given, self.tensor_parallel
        if given is None or parallel is None:
            return None
        joined: DeviceMesh | None = self.ranks.once(parallel.mesh, lambda: joined_mesh(given, parallel.mesh))
        return joined

    def mesh(self, device_type: str) -> DeviceMesh:
        """That of the ranks, followed by the dimensions of tensor parallelism if both are parts of one mesh."""
        joined = self.joined_mesh
        return self.ranks.mesh(device_type) if joined is None else joined

    def placements(self, of_shards: Placement, mesh: DeviceMesh) -> tuple[Placement, ...]:
        """A placement for each dimension of `mesh`: replicas, `of_shards` for the ranks, then tensor parallelism."""
        parallel = self.tensor_parallel
        inner = () if parallel is None or self.joined_mesh is None else parallel.placements
        outer = mesh.ndim - len(inner)
        shards = of_shards if mesh.size(outer - 1) == self.ranks.size else Replicate()  # under NO_SHARD
        return (*[Replicate()] * (outer - 1), shards, *inner)

    def local_of(self, full: Tensor) -> Tensor:
        """What this rank stores, 1-D `[numel]`, of a plain tensor that broadcasts to `shape`.
        A view if `full` is contiguous and has that shape; no more rows than needed are expanded.
        """
        if self.tensor_parallel is not None:
            full = self.tensor_parallel.part_of(full)
        shape = self.split_shape
        if not shape:
            return full.reshape(-1)[: self.numel]
        low, high = self.rows
        start = self.first - low * self.row_numel if self.numel else 0
        return full.expand(shape)[low:high].reshape(-1)[start : start + self.numel]

    def rows_of(self, local: Tensor, fill: float) -> Tensor:
        """`local`, `[numel]`, as rows of `split_shape`, with `fill` for what other ranks store.
        A view if this rank stores complete rows.
        """
        low, high = self.rows
        shape = (high - low, *self.split_shape[1:])
        if self.numel == (high - low) * self.row_numel:
            return local.view(shape)
        rows = local.new_full(shape, fill)
        start = self.first - low * self.row_numel
        rows.view(-1)[start : start + self.numel] = local
        return rows

    def gather(self, local: Tensor) -> Tensor:
        """The full tensor, plain, on every rank: one all-gather, in which all ranks take part."""
        split = self.gather_split(local)
        return split if self.tensor_parallel is None else self.tensor_parallel.gather(split)

    def gather_split(self, local: Tensor) -> Tensor:
        """What the ranks split between them, plain, of `split_shape`: one all-gather, in which all take part."""
        self.ranks.check_here()
        most = max(count for _, count in self.ranges)
        if not most:
            return local.new_empty(self.split_shape)
        if self.ranks.size == 1:
            return local.clone().view(self.split_shape)
        sent = local.new_zeros(most)
        sent[: self.numel] = local
        sent = depending_on(local, sent)
        with self.waiting_for("all-gather"):
            of_ranks = collectives.traceable_all_gather(sent, self.ranks.size, self.ranks.group, self.split_shape)
        of_ranks = of_ranks.view(-1, most)
        in_order = sorted(range(self.ranks.size), key=lambda rank: self.ranges[rank])
        return torch.cat([of_ranks[rank, : self.ranges[rank][1]] for rank in in_order]).view(self.split_shape)

    @property
    def torch_rows(self) -> slice:
        """Those rows of what the ranks split, which has dimensions, that `torch.chunk` gives to this rank."""
        most = -(-self.split_shape[0] // self.ranks.size)
        return slice(self.ranks.rank * most, (self.ranks.rank + 1) * most)

    def all_reduce(self, value: Tensor, op: str) -> Tensor:
        """`value`, plain, reduced over the ranks by "sum", "avg", "max" or "min"; NaN on any rank is NaN on all.

        A maximum over ranks may lose a NaN, depending on the backend, so a flag is reduced beside it.
        """
        self.ranks.check_here()
        if op in ("sum", "avg") or not value.is_floating_point():
            return self._all_reduce(value, op)
        invalid = value.isnan()
        flag = invalid.to(value.dtype) if op == "max" else -invalid.to(value.dtype)
        both = torch.stack([value.masked_fill(invalid, 0), flag])
        extreme, is_invalid = self._all_reduce(both, op)
        return extreme.masked_fill(is_invalid != 0, math.nan)

    def _all_reduce(self, value: Tensor, op: str) -> Tensor:
        with self.waiting_for("all-reduce"):
            value = value if self.ranks.size == 1 else collectives.all_reduce(value, self.ranks.group, op, self.shape)
            return value if self.tensor_parallel is None else self.tensor_parallel.all_reduce(value, op)

    def waiting_for(self, kind: str) -> Wait:
        """Context of a collective of that kind for this tensor."""
        return Wait(self.ranks, kind, self.named)


def name_specs(specs: Sequence[ShardSpec], names: Sequence[str]) -> None:
    """Let errors call what is sharded by `specs` as `names` does, in one order; `names` may change later."""
    for index, spec in enumerate(specs):
        vars(spec)["names"] = names, index


def depending_on(local: Tensor, value: Tensor) -> Tensor:
    """Make `value`, which this rank sends for `local`, depend on `local` in the graph.

    A rank that stores nothing of two tensors sends equal constants for both; a compiler would merge these, and this
    rank would run one collective where others run two.
    """
    if local.numel():
        return value
    if value.is_floating_point() and value.element_size() == 1:  # float8 has no arithmetic
        return depending_on(local.view(torch.uint8), value.view(torch.uint8)).view(value.dtype)
    return value | local.any() if value.dtype is torch.bool else value + local.sum().to(value.dtype)
