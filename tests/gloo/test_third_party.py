"""Models that other people wrote, unmodified: sharded and compiled they train as they do unsharded.

Every night, with `aot_eager` and Inductor; by day test_families.py trains three others eagerly.
"""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from models import Case
from third_party import THIRD_PARTY
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from fsdp_compile import fully_shard

from .ranks import Ranks
from .training import OPTIMIZERS, backward, build, full_parameters, mine, units, whole

STEPS = 3
TOLERANCE = 1e-5
BREAK = {"gpt2_own_loss", "mixtral_loop"}  # cannot be one graph unsharded either
if torch.__version__ < "2.13":
    BREAK.add("t5")

pytestmark = pytest.mark.nightly  # up to two minutes each


class Figures(NamedTuple):
    """How a sharded model compares with the unsharded one on all ranks' data."""

    loss: float  # largest relative difference of a loss
    parameter: float  # of a full parameter after the last step
    graphs: list[int]  # compiled after each step
    graphs_unsharded: list[int]
    breaks: bool  # unsharded


def _graphs_unsharded(case: Case) -> tuple[list[int], bool]:
    """How many graphs the unsharded model has after each step, and whether its graph breaks."""
    counters.clear()
    counter, counted = CompileCounterWithBackend("eager"), []
    run = torch.compile(build(case), backend=counter)
    for step in range(STEPS):
        backward(run, case, mine(case, step))
        counted.append(counter.frame_count)
    torch._dynamo.reset()
    return counted, bool(counters["graph_break"])


def _follow(
    run: nn.Module, model: nn.Module, case: Case, counter: CompileCounterWithBackend
) -> tuple[float, float, list[int]]:
    """Train `run`, which runs `model`, beside an unsharded model; the first three figures."""
    reference, losses, graphs = build(case), [], []
    both = [OPTIMIZERS["adamw"](each.parameters()) for each in (reference, model)]
    for step in range(STEPS):
        expected, found = backward(reference, case, whole(case, step)), backward(run, case, mine(case, step))
        graphs.append(counter.frame_count)
        dist.all_reduce(found)
        losses.append(abs(found / dist.get_world_size() / expected - 1).item())
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    full = full_parameters(model)
    # The floor is for biases of keys: their gradient is zero but for rounding, and so they stay near zero.
    apart = [(full[n] - p).norm() / p.norm().clamp(min=1e-3) for n, p in reference.named_parameters()]
    return max(losses), max(apart).item(), graphs


def _train(rank: int, name: str, how: str) -> list[Figures]:
    """Eagerly, then compiled."""
    case = THIRD_PARTY[name]
    counted, breaks = _graphs_unsharded(case)
    figures = []
    for way in ("eager", how):
        model, counter = fully_shard(build(case)), CompileCounterWithBackend(how)
        assert len(units(model)) > 2, "expected the blocks to be units"
        run = model if way == "eager" else torch.compile(model, backend=counter, fullgraph=not breaks)
        figures.append(Figures(*_follow(run, model, case, counter), counted, breaks))
    return figures


def _check(ranks: Ranks, name: str, how: str) -> None:
    for rank, (eager, compiled) in enumerate(ranks.run(_train, name, how)):
        print(f"{name} rank {rank}: eager {eager.loss:.1e} {eager.parameter:.1e}; {how} {compiled}")
        for figures in (eager, compiled):
            assert max(figures.loss, figures.parameter) <= TOLERANCE, figures
        assert compiled.breaks == (name in BREAK)
        assert eager.graphs == [0] * STEPS and compiled.graphs == compiled.graphs_unsharded


@pytest.mark.parametrize("name", THIRD_PARTY)
def test_aot_eager(two: Ranks, name: str) -> None:
    """Three steps end where the unsharded model does; compiled as a full graph if that is one, else in as many graphs.

    None is compiled again unless the unsharded model compiles again in that step.
    """
    _check(two, name, "aot_eager")


@pytest.mark.parametrize("name", THIRD_PARTY)
def test_inductor(two: Ranks, name: str) -> None:
    """So they do with Inductor."""
    _check(two, name, "inductor")
