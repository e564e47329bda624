"""What a sharded tensor is to code that asks for a DTensor: its type, mesh and placements.

isinstance(param, DTensor)               True
param.to_local(), param.full_tensor()    this rank's elements; all of them
param.device_mesh, param.placements      a mesh, and a `FlatShard` for the ranks that store ranges
"""

# Note [Sharded tensors are DTensors by type]
# Frameworks ask `isinstance(param, DTensor)` and then compute with `to_local()`, reduce over `device_mesh`, or gather
# with `full_tensor()`. What they do with other tensors is meant for a model that is not sharded: a local norm that is
# summed over ranks would count all elements on each of them. So the answer is yes, by a property `__class__`, without
# DTensor as a base class, whose operators act on placements. tests/gloo/integrations/test_call_sites.py runs call
# sites of frameworks beside FSDP2; of 34 that were measured both ways ten would silently do something else without it.
#
# What is no DTensor: unsharded parameters within `summon_full_params`, which are plain to operators; gradients under
# `no_sync`, whose local elements other ranks do not have; views, but those in state dicts. Code of torch that reads the
# fields of what is one is told no: tensors/_torch.py has a table.
# Parameters have no `_local_tensor` and no `_spec`: `DTensor.from_local` would make rows of what is a range. Gradients
# and values of state dicts have the former, which VeOmni scales and torchtitan compares. With `shards="rows"` there are
# both, to be read. No DTensor can be made of them: torch moves data between two placements of one dimension as if they
# were one (of 71 tries 9 were wrong and said nothing), so placements equal no `Shard` there.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_compile.core._torch import local_shape_and_offset
from fsdp_compile.tensors import _torch
from fsdp_compile.tensors._torch import COPIES_ROWS, LOADS_ROWS, asked_by, dispatcher_asks
from fsdp_compile.tensors.shard_spec import ShardSpec

_ALL = -1  # as `FlatShard.row`, to code that copies rows of a full tensor: all, of which `copy_` chooses elements


class FlatShard(Shard):
    """The placement of a sharded tensor: each rank stores one range of the flattened elements.

    It answers as a `Shard(0)`, and `distribute_tensor` makes DTensors of it that are. But it equals no `Shard(0)`: the
    parts are others, so `DTensor.from_local` and `redistribute` refuse this placement: ValueError.

    `compute_local_shape_and_global_offset` of torch says which rows a rank stores, or raises: ValueError.

    Attributes:
        ranges: for each rank the first element that it stores, and how many.
        row: elements of a row; 0 if ranges are none of rows, as of views, and in what older versions have pickled.
    """

    def __init__(self, ranges: tuple[tuple[int, int], ...], row: int = 0) -> None:
        super().__init__(0)
        self.ranges, self.row = ranges, row

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FlatShard):
            return self.ranges == other.ranges
        if isinstance(other, Shard) and asked_by() == _torch.MAKES_SPECS:
            raise ValueError(
                "placements: a DTensor cannot have those of a sharded parameter, of which each rank stores a range of "
                "the flattened elements; use distribute_tensor(full, mesh, placements), or DTensor.from_local with "
                "[Shard(0)] and this rank's rows"
            )
        return self.row == _ALL and type(other) is Shard and other.dim == 0

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __repr__(self) -> str:
        return f"FlatShard(ranges={self.ranges})"

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return FlatShard, (self.ranges, self.row)

    def _local_shard_size_and_offset(self, curr_local_size: Any, num_chunks: int, rank: Any) -> tuple[Any, int]:
        """How many rows a rank stores, and the first of them."""
        if self.row == _ALL:
            return curr_local_size, 0
        if not self.row or any(bound % self.row for each in self.ranges for bound in each):
            raise ValueError(f"placements: ranks store the ranges {self.ranges} of elements, which are no rows of "
                             f"the tensor; call full_tensor(), or take to_local() as the range that it is")  # fmt: skip
        first, numel = self.ranges[rank]
        return numel // self.row, first // self.row

    local_shard_size_and_offset = _local_shard_size_and_offset  # type: ignore[assignment]  # torch's is static


class AsDTensor:
    """A base of `ShardedTensor`: what is asked of a DTensor beside `to_local` and `full_tensor`."""

    is_dtensor = True  # by type: see Note [Sharded tensors are DTensors by type]
    is_view = False
    spec: ShardSpec
    has_rows = property(lambda self: self.spec.ranks.rows and not self.is_view)  # `shards="rows"`

    @property
    def __class__(self) -> type:
        """`DTensor` to `isinstance`; `type` tells the class."""
        is_dtensor = self.is_dtensor and not (asked_by().startswith(_torch.READS_FIELDS) or dispatcher_asks())
        return DTensor if is_dtensor else type(self)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        try:
            object.__dict__["__class__"].__set__(self, kind)
        except TypeError as error:  # of torch.utils.swap_tensors, by which parametrizations take a parameter's place
            raise TypeError(
                f"a sharded parameter of shape {tuple(self.spec.shape)} cannot be parametrized outside of the forward "
                f"of its unit, or behind a backward that this forward runs; do so before fully_shard, or call "
                f"fully_shard on the module whose forward does so"
            ) from error

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that was given, or the ranks that it is sharded over; tensor parallelism adds its dimensions."""
        return self.spec.mesh(self.device.type)  # type: ignore[attr-defined]  # a Tensor

    @property
    def placements(self) -> tuple[Placement, ...]:
        """A placement for each dimension of `device_mesh`: see `FlatShard`."""
        mesh, asks = self.device_mesh, asked_by()
        if asks == COPIES_ROWS:  # new DTensors take the place of what has no memory
            return (Shard(0) if self.is_meta else FlatShard(self.spec.ranges, _ALL),) * mesh.ndim  # type: ignore[attr-defined]  # a Tensor
        shard = Shard(0) if asks in LOADS_ROWS else FlatShard(self.spec.ranges, 0 if self.is_view else self.spec.row)
        return self.spec.placements(shard, mesh)

    def addends(self, grad_placements: Sequence[Placement]) -> int:
        """Of how many ranks gradients are summed up; 1 if the mean is wanted. See `full_tensor`."""
        placements = list(grad_placements)
        if all(each.is_replicate() for each in placements):
            return 1
        mesh = self.device_mesh
        sums = len(placements) == mesh.ndim and all(each.is_partial("sum") for each in placements)
        if not sums or self.spec.tensor_parallel is not None:
            raise ValueError(
                f"grad_placements of {self.spec.named()}: expected Partial() for each dimension of its mesh, whose "
                f"gradients are summed up, or Replicate(), found {placements}"
            )
        return int(mesh.size())

    @property
    def _spec(self) -> Any:
        if self.has_rows:
            return _torch.spec_of(self)
        raise AttributeError(
            f"_spec: {self.spec.named()}, is sharded by ranges of its flattened elements, which no DTensorSpec "
            f"describes: read device_mesh and placements; beside another DTensor, call full_tensor()"
        )

    @property
    def _local_tensor(self) -> Any:
        if self.has_rows:
            return self.detach().to_local()  # type: ignore[attr-defined]  # a Tensor
        if asked_by() in LOADS_ROWS:
            mesh = self.device_mesh
            shape, _ = local_shape_and_offset(self.spec.shape, mesh, self.spec.placements(Shard(0), mesh))
            return torch.empty(shape, device="meta")
        if not isinstance(self, nn.Parameter):  # values of state dicts, of which checkpointers compare the storage
            return self.local  # type: ignore[attr-defined]  # a ShardedTensor
        raise AttributeError(
            f"_local_tensor: a rank stores a range of the flattened elements of {self.spec.named()}, and no rows: call "
            f"to_local(), which is 1-D, or full_tensor()"
        )

    @_local_tensor.setter
    def _local_tensor(self, local: Tensor) -> None:
        vars(getattr(self, "base", self))["local"] = local.view(-1)  # of a copy, by `COPIES_ROWS`; `base`: of a view

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None, **_: Any
    ) -> Any:
        """This tensor for its own placements; otherwise a DTensor on the same mesh, by way of the full tensor.

        Raises:
            ValueError: ranges of elements were asked for, which no DTensor can have.
        """
        everywhere = [Replicate()] * self.device_mesh.ndim
        wanted = everywhere if placements is None else list(placements)
        if wanted != everywhere and device_mesh in (None, self.device_mesh) and tuple(wanted) == self.placements:
            return self
        full: Any = self.full_tensor()  # type: ignore[attr-defined]  # a ShardedTensor
        return DTensor.from_local(full, self.device_mesh, everywhere, run_check=False).redistribute(device_mesh, wanted)
