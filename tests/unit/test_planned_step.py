"""`compile_step` follows one plan of backward, update and the next forward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, mlp

from bench.emulated import noted
from bench.link import LINK
from fsdp_compile import compile_step, fully_shard
from fsdp_compile.config import CompileConfig, StepUpdate

pytestmark = pytest.mark.usefixtures("emulated")
LATE = pytest.mark.nightly
SLOW = "custom:0,1e8"
INPUTS, TARGET = MODELS["mlp"].batch(0, 8)


def _step(**options: Any) -> Any:
    torch.manual_seed(0)
    model = fully_shard(mlp(blocks=2, width=16, hidden=32), reshard_after_forward="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return compile_step(model, optimizer, F.mse_loss, **options)


def _calls(step: Any) -> list[str]:
    """The collectives of a step, in the order in which they are issued."""
    LINK.reset()
    step(INPUTS, target=TARGET)
    return [call.kind for call in LINK.calls]


def test_ten_lines() -> None:
    """The plan decides how many units are gathered ahead, and the forward's own plan knows of them."""
    torch.manual_seed(0)
    model = fully_shard(mlp(blocks=2, width=16, hidden=32), reshard_after_forward="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = compile_step(model, optimizer, F.mse_loss, clip_norm=1.0, options={"link": SLOW})
    with noted() as graphs:
        step(INPUTS, target=TARGET)
    losses = [step(INPUTS, target=TARGET).item() for _ in range(4)]
    assert losses[3] < losses[0]

    workload, plan = graphs["forward"]
    prefetched = [unit.name for unit in workload.units if unit.arrives is not None]
    assert prefetched
    assert [gather.units for gather in plan.of("gather")][: len(prefetched)] == [(name,) for name in prefetched]
    kinds = _calls(step)
    behind = kinds[len(kinds) - kinds[::-1].index("all_reduce") :]  # the norm's, before the updates
    assert behind == ["all_gather"] * len(prefetched)


@LATE
def test_limited() -> None:
    """With `prefetch=1` one unit is gathered ahead at most. It trains alike."""
    step = _step(clip_norm=1.0, options={"link": SLOW})
    losses = [step(INPUTS, target=TARGET).item() for _ in range(5)]
    limited = _step(clip_norm=1.0, prefetch=1, options={"link": SLOW})
    with noted() as graphs:
        assert [limited(INPUTS, target=TARGET).item() for _ in range(5)] == pytest.approx(losses, rel=1e-5)
    assert sum(unit.arrives is not None for unit in graphs["forward"][0].units) == 1
    assert _calls(limited)[-2:] == ["all_reduce", "all_gather"]


@pytest.mark.parametrize(
    "options", [{"backend": "aot_eager"}, {"backend": "aot_eager", "prefetch": 1}, pytest.param({}, marks=LATE)]
)
def test_without_a_link(options: dict[str, Any]) -> None:
    """Without a link nothing is planned, and two units are prefetched, or as many as were asked for."""
    step = _step(**options)
    for _ in range(2):  # in which ranks tell each other what they use
        step(INPUTS, target=TARGET)
    assert _calls(step)[::-1].index("reduce_scatter") == options.get("prefetch", 2)


def test_settings_that_cannot_be() -> None:
    """What is no update is refused, by the field's name; options that are announced to go warn and change nothing."""
    for change, message in (
        ({"moves": -1.0}, "moves must be at least 0, not -1.0"),
        ({"moves": 7.0, "prefetch": -1}, "prefetch must be a number of units, at least 0, or 'auto', not -1"),
        ({"moves": 7.0, "prefetch": "all"}, "prefetch must be .*not 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            StepUpdate(**change)
    with pytest.warns(FutureWarning, match="profile and record_profile have no effect"):
        assert CompileConfig(link=None, profile="absent", record_profile=True) == CompileConfig(link=None)
    assert CompileConfig(update=StepUpdate(7.0)) != CompileConfig(update=StepUpdate(7.0, clips=True))
    with pytest.raises(ValueError, match="prefetch must be a number of units, at least 0, or 'auto', not -2"):
        _step(prefetch=-2)


@LATE
def test_accumulated() -> None:
    """A step of several micro-batches prefetches by the plan of the first one's forward, which reduces nothing."""
    step = _step(accumulate=2, options={"link": SLOW})
    for _ in range(2):
        kinds = _calls(step)
    assert kinds[::-1].index("reduce_scatter") >= 1
