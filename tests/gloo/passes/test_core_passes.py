"""The passes of the story: a graph needs no others to be right, and the last one changes no bit."""

import pytest
import torch
from models import MODELS

from fsdp_compile import MixedPrecision
from fsdp_compile.passes import backend
from fsdp_compile.passes.hooks import CORE_PASSES

from ..ranks import on_ranks
from ..training import assert_bitwise, backward, build, follow, mine, shard

CASE = MODELS["mlp"]


@on_ranks(2)
def test_the_story_compiles_alone() -> None:
    """With `CORE_PASSES` alone nothing is priced, searched or compared, and training is that of one process."""
    model = shard(CASE, reshard_after_forward="auto")
    follow(torch.compile(model, fullgraph=True, backend=backend(CORE_PASSES, link=None)), build(CASE), CASE)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_the_pin_changes_no_bit(dtype: torch.dtype) -> None:
    """Gradients are equal bit for bit with the order pinned and without."""
    case = MODELS["gpt"]
    pinned, free = (shard(case, mixed_precision=MixedPrecision(dtype)) for _ in range(2))
    for model, disable in ((pinned, ()), (free, ("pin_order",))):
        run = torch.compile(model, fullgraph=True, backend=backend(disable=disable))
        backward(run, case, mine(case, 1))
    assert_bitwise(pinned, free, str(dtype))
