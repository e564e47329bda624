"""Planned graphs on real ranks: the numbers of eager, whatever the plan."""

from typing import Any

import pytest
import torch
from models import MODULES, routed
from tiers import LATE
from torch import nn

from fsdp_compile import fully_shard

from ..ranks import on_ranks
from ..training import build, follow, shard

CASE = MODULES["tied_ends"]
SLOW = "custom:1e-6,1e6"  # seconds, bytes per second: communication takes far longer than computing
FAR = "custom:0.1,1e12"


@pytest.mark.parametrize(
    ("how", "options"),
    [
        pytest.param("auto", {"link": SLOW}, marks=LATE),
        pytest.param(True, {"link": FAR}, marks=LATE),
        pytest.param("auto", {"link": FAR}, marks=LATE),
        pytest.param(True, {"link": SLOW}, marks=LATE),
        pytest.param("auto", {"link": "h200", "device": "h200"}, marks=LATE),
        pytest.param(True, {"link": "h200", "device": "h200"}, marks=LATE),
    ],
    ids=str,
)
@on_ranks(2)
def test_planned_graphs_compute_the_same(how: Any, options: dict[str, str]) -> None:
    """Plans for a slow link, for launches that cost much, for a fast one; units kept or gathered again."""
    model = shard(CASE, reshard_after_forward=how)
    run = torch.compile(model, fullgraph=True, backend="fsdp_compile", options=options)
    follow(run, build(CASE), CASE)


@LATE
@on_ranks(2)
def test_sizes_that_depend_on_data(rank: int) -> None:
    """Experts that compute as many rows as each rank's router gives them: one graph, planned once, computes what eager
    does.
    """
    eager, model = (fully_shard(routed(), auto_wrap_policy={nn.Linear}) for _ in range(2))
    run = torch.compile(model, fullgraph=True, backend="fsdp_compile")
    for step in range(4):
        torch.manual_seed(2 * step + rank)
        x = torch.randn(6, 8)
        with torch._dynamo.config.patch(
            capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True, error_on_recompile=step > 0
        ):
            losses = [each(x).square().sum() for each in (eager, run)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
        for one, other in zip(eager.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
