"""Models that other people wrote, unmodified, train sharded as they do unsharded: eager, compiled, checkpointed."""

from functools import partial
from typing import Any

import pytest
import torch
from families import FAMILIES, THIRD_PARTY
from models import Case
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from fsdp_compile import fully_shard
from fsdp_compile.tools.check import Batch, Report, check

from ..ranks import on_ranks
from ..training import PER_RANK, backward, build, mine

CASES = THIRD_PARTY | FAMILIES
EVERY_DAY = ("gpt_oss", "wav2vec2")
INDUCTOR = (*THIRD_PARTY, "qwen3", "deepseek_v3", "swin", "wav2vec2")
BREAK = {"gpt2_own_loss", "mixtral_loop"}  # cannot be one graph unsharded either
if torch.__version__ < "2.13":
    BREAK.add("t5")


class WithLoss(nn.Module):
    """The model of a case, whose loss it returns."""

    def __init__(self, case: Case, checkpoints: bool) -> None:
        super().__init__()
        self.model, self.loss = case.build(), case.loss
        if not checkpoints:
            return
        if getattr(self.model, "supports_gradient_checkpointing", False):
            model: Any = self.model
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            apply_activation_checkpointing(self.model, check_fn=lambda each: type(each).__name__ == "ConvNextV2Layer")

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss(self.model, inputs)


def _check(name: str, ways: list[str], checkpoints: bool = False) -> Report:
    case = CASES[name]
    made, batch = partial(WithLoss, case, checkpoints), lambda number: Batch(case.batch(number, PER_RANK))
    report = check(made, batch, ways=ways, resume_on=0)
    assert report.holds and not [row for row in report.rows if row.verdict == "left out"], str(report)
    return report


@on_ranks(2)
def test_every_day() -> None:
    """Eager steps of experts and of a model with frozen parameters are the unsharded model's."""
    for name in EVERY_DAY:
        [row] = _check(name, ["eager"]).rows
        assert row.verdict == "equal", f"{name}: {row}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_equal(name: str) -> None:
    """Eager steps are the unsharded model's, bit for bit; compiled ones, with checkpointed blocks, up to rounding."""
    assert _check(name, ["eager"]).rows[0].verdict == "equal"
    _check(name, ["aot_eager"], checkpoints=name in FAMILIES)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", INDUCTOR)
@on_ranks(2)
def test_inductor(name: str) -> None:
    """So they are with Inductor."""
    _check(name, ["inductor"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_graphs(name: str) -> None:
    """A compiled model has as many graphs sharded as unsharded, after each of three steps; one, unless it breaks."""
    case, counted = CASES[name], []
    for shards in (False, True):
        model = fully_shard(build(case)) if shards else build(case)
        counters.clear()
        counter, graphs = CompileCounterWithBackend("aot_eager"), []
        run = torch.compile(model, backend=counter)
        for step in range(3):
            backward(run, case, mine(case, step))
            graphs.append(counter.frame_count)
        counted.append((graphs, bool(counters["graph_break"])))
        torch._dynamo.reset()
    assert counted[0] == counted[1] and counted[0][1] == (name in BREAK), counted
