"""One process that computes what the settings of a sharded model promise, rank after rank.

Parameters are cast to the compute dtype; each rank's gradients are summed over the microbatches of a window, averaged
over ranks in the reduce dtype, in pairs, and added to the parameters' gradients in the parameters' own dtype.
"""

import copy
from typing import Any

import torch
from models import Case, Inputs, part
from torch import Tensor
from torch.distributed.fsdp import MixedPrecision

from fsdp_compile.comm.collectives import add_in_pairs

from .training import build


def loss_of(case: Case, model: Any, inputs: Inputs) -> Tensor:
    """The case's loss; where the model returns a tensor, of that in fp32."""

    def run(*args: Any, **kwargs: Any) -> Any:
        output = model(*args, **kwargs)
        return output.float() if isinstance(output, Tensor) else output

    return case.loss(run, inputs)  # a callable is all that the loss needs


class Emulation:
    """The unsharded model with the gradients that a sharded one gets.

    Args:
        case: the model, its data and its loss.
        precision: mixed precision of the sharded model, or None.
        world_size: how many ranks to play.
    """

    def __init__(self, case: Case, precision: MixedPrecision | None, world_size: int) -> None:
        self.case, self.policy, self.world_size = case, precision or MixedPrecision(), world_size
        self.model = build(case)

    def backward(self, windows: list[list[Inputs]]) -> None:
        """Add gradients of global batches; those of one window are reduced together."""
        for window in windows:
            ranks = range(self.world_size)
            self._reduce([self._gradients([part(i, rank, self.world_size) for i in window]) for rank in ranks])

    def _gradients(self, microbatches: list[Inputs]) -> list[Tensor | None]:
        """One rank's gradients in the reduce dtype, summed over its microbatches."""
        compute = self.policy.param_dtype
        total: list[Tensor | None] = [None for _ in self.model.parameters()]
        for inputs in microbatches:
            low = copy.deepcopy(self.model).to(compute)
            for param in low.parameters():
                param.grad = None
            cast = tuple(x.to(compute) if x.is_floating_point() else x for x in inputs[:-1])
            loss_of(self.case, low, (*cast, inputs[-1])).backward()
            for index, param in enumerate(low.parameters()):
                if param.grad is not None:
                    grad = param.grad.to(self.policy.reduce_dtype)
                    total[index] = grad if total[index] is None else total[index] + grad
        return total

    def _reduce(self, of_ranks: list[list[Tensor | None]]) -> None:
        for index, param in enumerate(self.model.parameters()):
            grads = [grads[index] for grads in of_ranks]
            if grads[0] is not None:
                total = torch.empty_like(param, dtype=torch.float32)
                add_in_pairs(torch.stack([g.float() for g in grads]), out=total)
                mean = (total / self.world_size).to(grads[0].dtype).to(param.dtype)
                param.grad = mean if param.grad is None else param.grad + mean


def windows_of(batches: list[Inputs], syncs: list[bool]) -> list[list[Inputs]]:
    """Microbatches that are reduced together: each window ends with one whose backward reduces."""
    windows: list[list[Inputs]] = [[]]
    for inputs, reduces in zip(batches, syncs, strict=True):
        windows[-1].append(inputs)
        if reduces:
            windows.append([])
    return [window for window in windows if window]
