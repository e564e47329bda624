"""Gradients that take the place of parameters are the right ones."""

import pytest
import torch
import torch.distributed as dist
from overwriting import Mirrored, Scaled, awkward
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ..ranks import Ranks
from ..training import backward, executor, local, shard

BOUND = 1e-5  # relative to the largest element of all gradients


def _train(rank: int, how: str, per_rank: int) -> float:
    case, worst = awkward(), 0.0
    models = [shard(case, auto_wrap_policy=ModuleWrapPolicy({Scaled, Mirrored})) for _ in range(2)]
    runs = [models[0], executor(models[1], how)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        inputs = case.batch(10 * step + rank, per_rank)
        for run, optimizer in zip(runs, optimizers, strict=True):
            optimizer.zero_grad()
            backward(run, case, inputs)
        eager, compiled = (
            torch.cat([local(p.grad) for p in model.parameters() if p.grad is not None]) for model in models
        )
        worst = max(worst, ((eager - compiled).abs().max() / eager.abs().max()).item())
        for optimizer in optimizers:
            optimizer.step()
    largest = torch.tensor(worst)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


@pytest.mark.nightly
@pytest.mark.parametrize("per_rank", [1, 3])
@pytest.mark.parametrize("how", ["inductor", "backend"])
def test_gradients_of_awkward_units(two: Ranks, how: str, per_rank: int) -> None:
    """Where loops that read a parameter and loops that write its gradient could meet, gradients equal eager's."""
    assert max(two.run(_train, how, per_rank)) <= BOUND
