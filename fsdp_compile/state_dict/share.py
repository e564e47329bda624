"""What all values that lie alike have in common: a parameter's pieces in every state dict, and its optimizer state's.

A state dict of a large model has thousands of values, made anew for each save and load. What follows from shapes and
places alone is here, and is made once.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile.checkpoint._torch import DTensorSpec, make_spec
from fsdp_compile.state_dict.boxes import Box, Cut


class Share:
    """What this rank stores of a tensor that is cut among the ranks of a mesh, or of a number beside it.

    Args:
        cut: how the tensor is cut.
        mesh: 1-D, the ranks.
        is_number: whether this is about a number, of which every rank that stores some of the tensor has a copy.
    """

    def __init__(self, cut: Cut, mesh: DeviceMesh, is_number: bool = False) -> None:
        self.cut, self.mesh, self.is_number = cut, mesh, is_number
        self.shape = () if is_number else cut.shape
        self._specs: dict[torch.dtype, DTensorSpec] = {}

    @cached_property
    def rank(self) -> int:
        """This rank's place in the mesh. RuntimeError if it has none."""
        coordinate = self.mesh.get_coordinate()
        if not coordinate:
            raise RuntimeError(f"expected a rank of {self.mesh}, found another")
        return coordinate[0]

    @cached_property
    def run(self) -> tuple[int, int]:
        """First element of the cut tensor, flattened, that is stored here, and how many; (0, 0) if none."""
        return self.cut.run(self.rank)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """What is stored here as boxes."""
        return self.boxes_of(self.rank)

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """What `rank` stores as boxes."""
        if self.is_number:
            return (Box((), (), 0),) if self.cut.run(rank)[1] else ()
        return self.cut.boxes(rank)

    @cached_property
    def numel(self) -> int:
        """How many elements are stored here."""
        return sum(box.numel for box in self.boxes)

    def part_of(self, full: Tensor) -> Tensor:
        """Of a tensor of the full shape, what is stored here, 1-D; a view where `full` is contiguous."""
        first = 0 if self.is_number else self.run[0]
        return full.reshape(-1)[first : first + self.numel]

    @cached_property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The boxes as torch.distributed.checkpoint describes them."""
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    @property
    def is_written(self) -> bool:
        """Whether this rank writes what it stores: of a number's copies one is written, with the first element.

        If several ranks offered theirs, DCP would choose the same one for all, and that one would write longer.
        """
        return not self.is_number or self.run[0] == 0

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """What a DTensor says of itself."""
        if dtype not in self._specs:
            self._specs[dtype] = make_spec(self.mesh, self.shape, dtype)
        return self._specs[dtype]

    def __reduce__(self) -> tuple[Any, ...]:
        return Share, (self.cut, self.mesh, self.is_number)  # not what follows from them
