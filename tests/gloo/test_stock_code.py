"""Code that was written for unsharded models, on sharded ones: right, or refused with a reason."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import fully_shard

from .ranks import Ranks
from .training import executor, local, stored_here

HOW = ["eager", "aot_eager"]


class _Penalized(nn.Module):
    """Adds a penalty on its parameters, and scales by the norm of one, inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        penalty = sum(param.pow(2).sum() for param in self.parameters())
        factor = next(self.blocks[0].parameters()).norm()
        return self.head(x).square().mean() * factor + 0.1 * penalty


def _penalty(rank: int, how: str) -> None:
    reference = _Penalized()
    sharded = fully_shard(copy.deepcopy(reference))
    model = executor(sharded, how)
    world = dist.get_world_size()
    batch = torch.randn(4 * world, 7, generator=torch.Generator().manual_seed(1))
    expected = torch.stack([reference(part) for part in batch.chunk(world)])
    expected.mean().backward()
    loss = model(batch.chunk(world)[rank])
    torch.testing.assert_close(loss.detach(), expected[rank].detach())
    loss.backward()
    for param, other in zip(sharded.parameters(), reference.parameters(), strict=True):
        assert other.grad is not None and param.grad is not None
        here = stored_here(param, other.grad)
        if here is not None:
            torch.testing.assert_close(local(param.grad), here, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", HOW)
def test_parameters_inside_forward(two: Ranks, how: str) -> None:
    """What a forward computes from `self.parameters()` has the unsharded model's values and gradients."""
    two.run(_penalty, how)
