"""Sharded training equals training one process on the whole batch: eager and by aot_eager bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODELS

from .ranks import Ranks
from .training import (
    OPTIMIZERS,
    backward,
    backward_in_pairs,
    build,
    executor,
    full_parameters,
    mine,
    relative_difference,
    shard,
    whole,
)

STEPS = 10
TOLERANCE = 1e-5  # on the relative difference of each full parameter, where it is not zero
LATE = pytest.mark.nightly


def _worst(rank: int, name: str, how: str, strategy: str) -> dict[str, float]:
    """Train sharded and unsharded with each optimizer; the largest relative difference of a parameter for each."""
    case, worst = MODELS[name], {}
    options: dict[str, Any] = {"reduction_order": "tree"} if _is_exact(how, strategy) else {}
    for optimizer, make in OPTIMIZERS.items():
        reference, model = build(case), shard(case, strategy, **options)
        run, both = executor(model, how), [make(reference.parameters()), make(model.parameters())]
        for step in range(STEPS):
            if options:
                backward_in_pairs(reference, case, step)
            else:
                backward(reference, case, whole(case, step))
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                backward(run, case, mine(case, step))
            for each in both:
                each.step()
                each.zero_grad()
        found = full_parameters(model)
        worst[optimizer] = max(relative_difference(found[n], p.detach()) for n, p in reference.named_parameters())
    dist.barrier()
    return worst


def _is_exact(how: str, strategy: str) -> bool:
    """Whether sums have an order: one process then adds up in it too."""
    return how in ("eager", "aot_eager") and strategy != "NO_SHARD"


def _check(ranks: Ranks, name: str, how: str, strategy: str = "FULL_SHARD") -> None:
    for rank, worst in enumerate(ranks.run(_worst, name, how, strategy)):
        print(f"{name} {how} {strategy} rank {rank} of {ranks.world_size}: {worst}")
        assert set(worst) == set(OPTIMIZERS)
        tolerance = 0.0 if _is_exact(how, strategy) else TOLERANCE
        assert all(difference <= tolerance for difference in worst.values()), worst


@pytest.mark.parametrize("name", [pytest.param(n, marks=LATE if n in ("mlp", "gpt", "conv") else ()) for n in MODELS])
def test_eager_on_two(two: Ranks, name: str) -> None:
    """Two eager ranks end where one unsharded process does, with SGD and with AdamW.

    E-TEST-2, E-ERR-1, E-ERR-56, E-GRAD-3, E-LIM-17.
    """
    _check(two, name, "eager")


@pytest.mark.parametrize("name", [pytest.param(name, marks=LATE if name != "tied" else ()) for name in MODELS])
def test_eager_on_four(four: Ranks, name: str) -> None:
    """Four eager ranks end where one unsharded process does."""
    _check(four, name, "eager")


@LATE  # a row of the feature table runs Inductor every day
@pytest.mark.parametrize("name", MODELS)
def test_inductor_on_two(two: Ranks, name: str) -> None:
    """Two ranks that run plain `torch.compile` end where one unsharded process does."""
    _check(two, name, "inductor")


@LATE
@pytest.mark.parametrize("name", MODELS)
def test_inductor_on_four(four: Ranks, name: str) -> None:
    """Four ranks that run plain `torch.compile` end where one unsharded process does."""
    _check(four, name, "inductor")


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("gpt", "eager"),
        ("tied", "aot_eager"),
        *(pytest.param(*each, marks=LATE) for each in (("tied", "eager"), ("gpt", "aot_eager"))),
    ],
)
def test_other_strategies(two: Ranks, how: str, name: str, strategy: str) -> None:
    """The strategy decides where parameters are, not what is computed."""
    _check(two, name, how, strategy)


@LATE
def test_backend(two: Ranks) -> None:
    """The backend `fsdp_compile` computes what plain `torch.compile` does."""
    _check(two, "mlp", "backend")


@LATE
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_inductor_with_other_strategies(two: Ranks, strategy: str) -> None:
    """Inductor's graphs without a second gather, and without any, train the same."""
    _check(two, "mlp", "inductor", strategy)
