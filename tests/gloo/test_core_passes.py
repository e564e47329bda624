"""The passes of the story without any layer's: a graph needs no other to be right."""

from typing import Any

import torch
from models import MODELS

from fsdp_compile.passes import backend
from fsdp_compile.passes.hooks import CORE_PASSES

from .ranks import Ranks
from .training import build, follow, shard

CASE = MODELS["mlp"]


def _train(rank: int, how: Any) -> None:
    run = torch.compile(shard(CASE, reshard_after_forward=how), fullgraph=True, backend=backend(CORE_PASSES, link=None))
    follow(run, build(CASE), CASE)


def test_the_story_compiles_alone(two: Ranks) -> None:
    """With `CORE_PASSES` alone nothing is priced, searched or compared, and training is that of one process."""
    two.run(_train, "auto")
