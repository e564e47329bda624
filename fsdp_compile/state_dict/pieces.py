"""Between a parameter's part of the shard and the values in state dicts; for parameters and optimizer state alike."""

import math
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile.comm.stages import shard_order
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.state_dict.boxes import Cut
from fsdp_compile.state_dict.sharded_value import PieceTensor
from fsdp_compile.state_dict.share import Share


class Managed:
    """A parameter that is sharded, and its place. It costs nothing: all that it tells is found when asked."""

    def __init__(self, unit: Unit, index: int) -> None:
        self.unit, self.index = unit, index

    @property
    def cut(self) -> Cut:
        """How it is cut among the ranks."""
        return self._share(False).cut

    def _share(self, is_number: bool) -> Share:
        """What its pieces, or the numbers beside it, have in common; the unit keeps it."""
        unit = self.unit
        shares, key = unit.shares, (self.index, is_number, unit.device.type)
        if key not in shares:
            shares[key] = Share(_cut(unit, self.index), unit.mesh, is_number)
        return shares[key]

    @property
    def name(self) -> str:
        """Its name in the unit."""
        return self.unit.names[self.index]

    @property
    def trains(self) -> bool:
        """Whether it requires a gradient."""
        return self.unit.params[self.index].requires_grad

    @property
    def is_here(self) -> bool:
        """Whether this rank stores some of it."""
        return self._share(False).numel > 0

    def piece(self, local: Tensor) -> Tensor:
        """`local`, this rank's part `[n]`, as a tensor of the original shape; not a copy.

        A plain tensor if it has no elements: no rank stores any of it, yet it has to be in a checkpoint.
        """
        if not math.prod(self.cut.shape):
            return local.view(self.cut.shape)
        return PieceTensor(local, self._share(False))

    def number(self, local: Tensor) -> PieceTensor:
        """A number that belongs to the parameter; not a copy. `local` has shape `()`, or `[0]` where it is absent."""
        return PieceTensor(local.view(-1), self._share(True))

    def is_alike(self, value: Any) -> TypeGuard[PieceTensor]:
        """Whether `value` is a piece that is cut as the parameter is: no rank needs what others store of it."""
        return isinstance(value, PieceTensor) and value.cut == self.cut

    def part_of(self, value: Tensor) -> Tensor | None:
        """This rank's part, 1-D `[n]`, of a value of the original shape; None if it has another shape.

        A part of memory that is the value's. Of values that are distributed otherwise all ranks gather the whole.
        """
        if self.is_alike(value) and not value.is_number:
            return value.local
        if tuple(value.shape) != self.cut.shape:
            return None
        full = value.full_tensor() if isinstance(value, DTensor) else value
        return self._share(False).part_of(full)


def _cut(unit: Unit, index: int) -> Cut:
    flat, at = unit.in_flat(index)
    layout = flat.layout
    return Cut(layout.shapes[at], layout.offsets[at], layout.shard_numel, shard_order(unit.stages))


def managed(param: nn.Parameter) -> Managed | None:
    """`param` as a parameter of which ranks store different parts; None if it is whole on every rank, or summoned."""
    found = unit_of(param)
    return Managed(*found) if found and found[0].is_sharded and found[0].summoned is None else None
