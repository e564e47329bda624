"""Units that one call launches get their own values; fewer launches expose less on a link with latency."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from models import seeded
from torch import Tensor, nn

from bench.link import LINK, start
from fsdp_compile import fully_shard

LATENCY = 3e-3  # seconds: a launch costs more than all bytes of the model


@pytest.fixture
def link() -> Iterator[None]:
    """One process that plays rank 0 of 8; gloo has no call that launches several, the emulated link does."""
    start(8, LATENCY, 1e9)
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()


class Chain(nn.Module):
    """Units of one shape and different values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return inputs.square().mean()


def trained(**options: object) -> tuple[Tensor, int, float]:
    """After three steps: rank 0's part of all parameters; launches of a step, and seconds of it that waits slept."""
    torch.manual_seed(0)
    model = fully_shard(Chain(), auto_wrap_policy={nn.Linear})
    run = torch.compile(model, backend="fsdp_compile", options=options, fullgraph=True) if options else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed in range(3):
        LINK.reset()
        run(torch.randn(8, 16, generator=seeded(seed))).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = torch.cat([parameter.detach().to_local() for parameter in model.parameters()])
    return values, len(LINK.calls), LINK.summary()["exposed"]


@pytest.mark.usefixtures("link")
def test_launched_together_and_alone() -> None:
    """Parameters after three steps equal eager's; half the launches expose less than two thirds of the time."""
    eager, alone, exposed = trained()
    planned, together, less = trained(link=f"custom:{LATENCY},1e9")
    assert (eager - planned).abs().max() <= 1e-6 * eager.abs().max()
    assert together <= 0.6 * alone and less <= 0.67 * exposed
