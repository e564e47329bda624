"""`reduction_order="tree"` with many models: 20 steps on 1, 2, 4 and 8 ranks end with the same bits (nightly)."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES
from models import Case
from third_party import THIRD_PARTY
from torch.distributed.fsdp import MixedPrecision

from .ranks import Ranks
from .same_bits import CASES, first, trained

WORLDS, STEPS, MICROBATCHES = (1, 2, 4, 8), 20, 8
ALL: dict[str, Case] = {
    **CASES,
    **{name: case for name, case in THIRD_PARTY.items() if name != "unet"},
    **{name: case for of_family in FAMILIES.values() for name, case in of_family.items()},
}
OPTIMIZERS = ("sgd", "adamw", "adafactor", "muon")
HALF = MixedPrecision(torch.bfloat16, torch.bfloat16)
COMPILED = (*CASES, "gpt2", "llama", "bert", "t5", "vit", "mixtral", "qwen3", "gemma2", "gpt_oss", "bart", "whisper")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def eight(folder: Path) -> Iterator[Ranks]:
    """Eight ranks, on as many cores as there are."""
    ranks = Ranks(max(WORLDS), folder)
    yield ranks
    ranks.stop()


@cache
def _group(world: int) -> Any:
    return first(world)


def _train(rank: int, name: str, how: str, ways: tuple[tuple[str, dict[str, Any]], ...]) -> list[str]:
    """Which of the ways, an optimizer and options, are not equal on all numbers of ranks."""
    wrong = []
    for optimizer, options in ways:
        found = []
        for world in WORLDS:
            group = _group(world)
            if rank < world:
                recipe: Any = {"microbatches": MICROBATCHES, "dropout": 0.1, "process_group": group, **options}
                found.append(trained(ALL[name], group, how, optimizer, STEPS, **recipe))
            torch._dynamo.reset()
            dist.barrier()
        wrong += [f"{optimizer}, {options}: {found}"] if any(each != found[0] for each in found) else []
    return wrong


@pytest.mark.parametrize("name", ALL)
def test_eager(eight: Ranks, name: str) -> None:
    """Parameters, optimizer state, losses and norms, with accumulation, clipping, a schedule and dropout, for each
    optimizer; in bfloat16 too.
    """
    ways = (*((optimizer, {}) for optimizer in OPTIMIZERS), ("adamw", {"mixed_precision": HALF}))
    assert eight.run(_train, name, "eager", ways) == [[]] * max(WORLDS)


@pytest.mark.parametrize(("name", "optimizer"), zip(COMPILED, OPTIMIZERS * len(COMPILED), strict=False))
def test_aot_eager(eight: Ranks, name: str, optimizer: str) -> None:
    """So in compiled steps: every model with one of the optimizers."""
    assert eight.run(_train, name, "aot_eager", ((optimizer, {}),)) == [[]] * max(WORLDS)
