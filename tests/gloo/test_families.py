"""Two models of each family from `transformers` train as they do unsharded: eager, compiled, checkpointed."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES
from models import Case
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from fsdp_compile import fully_shard
from fsdp_compile.core.sharding import clean_name

from .ranks import Ranks
from .training import OPTIMIZERS, backward, build, full_parameters, mine, units

STEPS = 2
CASES = {name: case for cases in FAMILIES.values() for name, case in cases.items()}
EVERY_DAY = ("gpt_oss", "mamba2", "wav2vec2")
INDUCTOR = ("qwen3", "deepseek_v3", "swin", "wav2vec2")


class Figures(NamedTuple):
    """How far a sharded model is from one process that averages the gradients of all ranks, relative to its norms."""

    loss: float
    parameter: float  # after the last step


def _checkpoint_blocks(model: nn.Module) -> None:
    """Let backward recompute each block (non-reentrant)."""
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # as transformers names it
    else:
        apply_activation_checkpointing(model, check_fn=lambda each: type(each).__name__ == "ConvNextV2Layer")


def _sum_over_ranks(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def _apart(found: Tensor, expected: Tensor) -> float:
    # The floor is for biases of keys: their gradient is zero but for rounding.
    return ((found - expected).norm() / expected.norm().clamp(min=1e-3)).item()


def _train(case: Case, how: str, checkpoint: bool) -> Figures:
    reference, model, losses = build(case), build(case), [0.0]
    if checkpoint:
        _checkpoint_blocks(model)
    fully_shard(model)
    assert len(units(model)) > 2, "expected the blocks to be units"
    run = model if how == "eager" else torch.compile(model, backend=how, fullgraph=True)
    both = [OPTIMIZERS["momentum"](each.parameters()) for each in (reference, model)]
    for step in range(STEPS):
        expected, found = (backward(each, case, mine(case, step)) for each in (reference, run))
        _sum_over_ranks(reference)
        losses.append(_apart(found, expected))
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    full = {clean_name(name): param for name, param in full_parameters(model).items()}
    return Figures(max(losses), max(_apart(full[n], p.detach()) for n, p in reference.named_parameters()))


def _run(rank: int, name: str, ways: tuple[tuple[str, bool], ...]) -> list[Figures]:
    figures = []
    for how, checkpoint in ways:
        figures.append(_train(CASES[name], how, checkpoint))
        torch._dynamo.reset()
    return figures


def _run_several(rank: int, names: tuple[str, ...]) -> list[Figures]:
    return [_train(CASES[name], "eager", False) for name in names]


def _worst(ranks: Ranks, name: str, *ways: tuple[str, bool]) -> list[float]:
    """For each way to run, an executor and whether it checkpoints, the largest difference on any rank."""
    return [max(max(figures) for figures in each) for each in zip(*ranks.run(_run, name, ways), strict=True)]


def test_every_day(two: Ranks) -> None:
    """Eager steps of experts, of a scan over time and of a model with frozen parameters are the unsharded model's."""
    for figures in two.run(_run_several, EVERY_DAY):
        assert figures == [Figures(0.0, 0.0)] * len(EVERY_DAY)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_equal(two: Ranks, name: str) -> None:
    """Eager steps are those of the unsharded model, bit for bit; one graph with checkpointed blocks is within 1e-6."""
    eager, checkpointed, compiled = _worst(two, name, ("eager", False), ("eager", True), ("aot_eager", True))
    assert eager == checkpointed == 0.0
    assert compiled <= 1e-6


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor(two: Ranks, name: str) -> None:
    """Inductor's are within 1e-5."""
    (compiled,) = _worst(two, name, ("inductor", False))
    assert compiled <= 1e-5
