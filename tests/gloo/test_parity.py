"""Sharded training equals training one process on the whole batch: eager and by aot_eager bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODELS

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


def _late(*rows: tuple[str, str, str, str]) -> list[Any]:
    return [pytest.param(*row, marks=pytest.mark.nightly) for row in rows]


WORLDS = ("two", "four")
ROWS = [  # ranks, model, how it is run, strategy
    *(("two", name, "eager", "FULL_SHARD") for name in ("tied", "frozen")),
    ("four", "tied", "eager", "FULL_SHARD"),
    *(("two", "gpt", "eager", strategy) for strategy in ("SHARD_GRAD_OP", "NO_SHARD")),
    *(("two", "tied", "aot_eager", strategy) for strategy in ("SHARD_GRAD_OP", "NO_SHARD")),
    *_late(*(("two", name, "eager", "FULL_SHARD") for name in ("mlp", "gpt", "conv"))),
    *_late(*(("four", name, "eager", "FULL_SHARD") for name in MODELS if name != "tied")),
    # A row of the feature table runs Inductor every day.
    *_late(*((world, name, "inductor", "FULL_SHARD") for world in WORLDS for name in MODELS)),
    *_late(*(("two", "mlp", "inductor", strategy) for strategy in ("SHARD_GRAD_OP", "NO_SHARD"))),
    *_late(("two", "mlp", "backend", "FULL_SHARD")),
]


@pytest.mark.parametrize(("world", "name", "how", "strategy"), ROWS)
def test_end(request: pytest.FixtureRequest, world: str, name: str, how: str, strategy: str) -> None:
    """Ranks end where one unsharded process does, with SGD and with AdamW, whatever the strategy and the compiler.

    E-TEST-2, E-ERR-1, E-ERR-56, E-GRAD-3, E-LIM-17.
    """
    for rank, worst in enumerate(request.getfixturevalue(world).run(_worst, name, how, strategy)):
        print(f"{name} {how} {strategy} rank {rank} of {world}: {worst}")
        assert set(worst) == set(OPTIMIZERS)
        tolerance = 0.0 if _is_exact(how, strategy) else TOLERANCE
        assert all(difference <= tolerance for difference in worst.values()), worst
