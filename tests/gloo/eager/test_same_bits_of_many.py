"""`reduction_order="tree"` with many models, and in many ways, on 1, 2, 4 and 8 ranks: the same bits (nightly)."""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, THIRD_PARTY
from models import Case
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision

from ..ranks import Ranks
from ..same_bits import CASES, first, resized, stepped, trained

WORLDS, STEPS, MICROBATCHES = (1, 2, 4, 8), 20, 8
ALL: dict[str, Case] = {
    **CASES,
    **{name: case for name, case in THIRD_PARTY.items() if name != "unet"},
    **FAMILIES,
}
OPTIMIZERS = ("sgd", "adamw", "adafactor", "muon")
HALF = MixedPrecision(torch.bfloat16, torch.bfloat16)
COMPILED = (*CASES, "gpt2", "llama", "bert", "t5", "vit", "mixtral", "qwen3", "gemma2", "gpt_oss", "bart", "whisper")
# While it is traced, it makes a mask, and repeats keys and values for that; eagerly it gives grouped ones to attention.
BRANCHES = ("qwen3",)
BY_INDUCTOR = ("mlp", "gpt", "conv", "tied", "frozen", "gpt2")
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


def _train(
    rank: int, name: str, how: str, ways: tuple[tuple[str, dict[str, Any]], ...], worlds: tuple[int, ...] = WORLDS
) -> list[str]:
    """Which of the ways, an optimizer and options, differ between numbers of ranks; by aot_eager also from eager."""
    wrong = []
    as_eager = how == "aot_eager" and name not in BRANCHES
    for optimizer, options in ways:
        found = []
        for world, by in (*([(1, "eager")] if as_eager else ()), *((world, how) for world in worlds)):
            group = _group(world)
            if rank < world:
                recipe: Any = {"microbatches": MICROBATCHES, "dropout": 0.1, "process_group": group, **options}
                found.append(trained(ALL[name], group, by, optimizer, STEPS, **recipe))
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


@pytest.mark.parametrize(("name", "optimizer"), [*zip(COMPILED, OPTIMIZERS * len(COMPILED), strict=False)])
def test_aot_eager(eight: Ranks, name: str, optimizer: str) -> None:
    """So in compiled steps, which equal eager ones: every model with one of the optimizers."""
    assert eight.run(_train, name, "aot_eager", ((optimizer, {}),)) == [[]] * max(WORLDS)


@pytest.mark.parametrize(("name", "optimizer"), [*zip(BY_INDUCTOR, OPTIMIZERS * 2, strict=False)])
def test_inductor(eight: Ranks, name: str, optimizer: str) -> None:
    """Steps of Inductor's code, whose kernels round otherwise than eager ones, are equal on 1, 2 and 4 ranks."""
    assert eight.run(_train, name, "inductor", ((optimizer, {}),), (1, 2, 4)) == [[]] * max(WORLDS)


def _updates_in_backward(rank: int) -> list[str]:
    """Which placements of a whole step with updates in backward differ from one rank that accumulates."""
    meshes = [init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards"))]
    run = partial(stepped, options={"update_in_backward": True}, microbatches=MICROBATCHES)
    expected = run(_group(1), process_group=_group(1)) if rank == 0 else None
    dist.barrier()
    ways: list[dict[str, Any]] = [
        {},
        {"mesh": meshes[0]},
        {"reshard_after_forward": 2},
        {"mesh": meshes[0], "backend": "aot_eager"},
        {"reshard_after_forward": 2, "backend": "aot_eager"},
    ]
    found = [(run(None, **options), options) for options in ways]
    return [str(options) for each, options in found if rank == 0 and each != expected]


def test_updates_in_backward(eight: Ranks) -> None:
    """A whole step that updates in backward, flat, hybrid or in two stages, equals one rank that accumulates."""
    assert eight.run(_updates_in_backward) == [[]] * max(WORLDS)


@pytest.mark.parametrize(("optimizer", "how"), [("adamw", "eager"), ("muon", "eager"), ("adafactor", "aot_eager")])
def test_resizing_in_the_middle(eight: Ranks, tmp_path: Path, optimizer: str, how: str) -> None:
    """8, 4, 2 and 8 ranks in turn, through checkpoints: losses, norms, parameters and state of 8 ranks all along."""
    eight.run(resized, str(tmp_path), (8, 4, 2, 8), optimizer, how, 2, MICROBATCHES)
