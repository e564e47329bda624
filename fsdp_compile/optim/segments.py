"""Segments: the parameters of one group of an optimizer that lie side by side in a flat shard.

flat shard      | a a a . b b b b c c c |        .: padding
the segment     | ----------------------|        updated as one tensor: parameters, gradients, and state of each kind
"""

import operator
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.sharded_tensor import FlatGradient, ShardedTensor
from fsdp_compile.core.unit import unit_of


class Segment:
    """Parameters of one group that lie side by side in a flat shard.

    Attributes:
        params: the parameters, in the order of the shard.
        start, stop: where they lie in it.
        offsets: where each lies in it; None: no element of it is on this rank.
    """

    def __init__(self, flat: FlatParam, indices: list[int]) -> None:
        self.flat, self.shard, self.indices = flat, flat.shard, indices
        self.params = [flat.params[index] for index in indices]
        stored = [record for index in indices if (record := flat.records[index])]
        self.start = stored[0].offset if stored else 0
        self.stop = stored[-1].offset + stored[-1].numel if stored else 0
        if len(indices) == len(flat.params):  # with padding, whose zeros stay: of one size on all ranks
            self.start, self.stop = 0, flat.shard.numel()
        self.offsets = [record.offset if (record := flat.records[index]) else None for index in indices]

    def gradient(self) -> Tensor | None:
        """The gradients of all parameters as one tensor, 1-D; None if they do not lie side by side."""
        gradient = self.flat.reduction.flat_gradient
        if gradient is None and (flat := FlatGradient.of(self.params)) is not None:
            gradient = flat.grad
        if gradient is None or gradient.dtype != self.shard.dtype or gradient.shape != self.shard.shape:
            return None
        return gradient[self.start : self.stop]

    def joined(self, values: Sequence[ShardedTensor]) -> Tensor:
        """A copy of state, one tensor for each parameter, as one tensor, 1-D `[stop - start]`."""
        like = values[0].local
        joined = torch.zeros(self.stop - self.start, dtype=like.dtype, device=like.device)
        for value, offset in zip(values, self.offsets, strict=True):
            if offset is not None:
                at = offset - self.start
                joined[at : at + value.local.numel()] = value.local
        return joined

    def shown(self, position: int, joined: Tensor) -> ShardedTensor:
        """The part of `joined` that belongs to the parameter at `position`; it shares memory."""
        spec, offset = self.flat.specs[self.indices[position]], self.offsets[position]
        at = 0 if offset is None else offset - self.start
        return ShardedTensor(joined[at : at + spec.numel], spec)


SegmentT = TypeVar("SegmentT", bound=Segment)


class SegmentTable(Generic[SegmentT]):
    """The segments of an optimizer, found again when its parameters or their shards are other ones.

    Attributes:
        of_groups: for each parameter group its segments.
    """

    def __init__(self, optimizer: Optimizer, kind: type[SegmentT]) -> None:
        self.optimizer, self.kind = optimizer, kind
        self.of_groups: list[list[SegmentT]] = []
        self._params: list[list[nn.Parameter]] = []  # of each group, when its segments were made

    def update(self) -> None:
        """Divide the groups into segments, again if parameters or their shards are other ones now."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        same = len(groups) == len(self._params) and all(
            len(now) == len(before) and all(map(operator.is_, now, before))
            for now, before in zip(groups, self._params, strict=True)
        )
        if same and all(s.shard is s.flat.shard for segments in self.of_groups for s in segments):
            return
        self._params = [list(params) for params in groups]
        self.of_groups = [self._divided(params) for params in groups]

    def _divided(self, params: list[nn.Parameter]) -> list[SegmentT]:
        """Parameters of one group as segments: those of a flat parameter with none of another group in between."""
        of_flats: dict[FlatParam, list[int]] = {}
        for param in params:
            managed = unit_of(param)
            if managed is not None and isinstance(param, ShardedTensor):
                flat, index = managed[0].in_flat(managed[1])
                of_flats.setdefault(flat, []).append(index)
        segments = []
        for flat, indices in of_flats.items():
            indices.sort()
            neighbors = [indices[0]]
            for index in indices[1:]:
                if index != neighbors[-1] + 1:
                    segments.append(self.kind(flat, neighbors))
                    neighbors = []
                neighbors.append(index)
            segments.append(self.kind(flat, neighbors))
        return segments


def is_scalar(value: Any) -> bool:
    """Whether `value`, of an optimizer's state, is a tensor without dimensions, such as a step count."""
    return isinstance(value, Tensor) and not isinstance(value, ShardedTensor) and value.dim() == 0
