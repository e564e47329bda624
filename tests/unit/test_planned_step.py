"""`compile_step` follows one plan of backward, update and the next forward."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, mlp

from bench.link import LINK
from bench.planned_step import noted
from fsdp_compile import compile_step, fully_shard
from fsdp_compile.config import CompileConfig, StepUpdate
from fsdp_compile.core.ops import RECORD_TIME
from fsdp_compile.passes.cost.roofline import measured_update
from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.post_grad.record_times import TaskProfile

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


def test_ten_lines(tmp_path: Path) -> None:
    """The plan decides how many units are gathered ahead, and the forward's own plan knows of them."""
    torch.manual_seed(0)
    model = fully_shard(mlp(blocks=2, width=16, hidden=32), reshard_after_forward="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = compile_step(model, optimizer, F.mse_loss, clip_norm=1.0, options={"link": SLOW, "record_profile": True})
    with noted() as graphs:
        step(INPUTS, target=TARGET)
    with TaskProfile() as profile:
        losses = [step(INPUTS, target=TARGET).item() for _ in range(4)]
    assert losses[3] < losses[0]
    (tmp_path / "profile.json").write_text(json.dumps(profile.seconds))

    workload, plan = graphs["forward"]
    prefetched = [unit.name for unit in workload.units if unit.arrives is not None]
    assert prefetched
    assert [gather.units for gather in plan.of("gather")][: len(prefetched)] == [(name,) for name in prefetched]
    kinds = _calls(step)
    behind = kinds[len(kinds) - kinds[::-1].index("all_reduce") :]  # the norm's, before the updates
    assert behind == ["all_gather"] * len(prefetched)
    seconds = json.loads((tmp_path / "profile.json").read_text())["update of 3 units"]
    assert len(seconds) == 5 and all(each > 0 for each in seconds)


@pytest.mark.parametrize(
    ("took", "expected", "said"),
    [
        (1.5, (1.0,), ["forward: 1500.0 ms measured, and 1000.0 expected by its plan"]),
        (0.5, (1.0,), ["forward: 500.0 ms measured, and 1000.0 expected by its plan"]),
        (1.1, (1.0,), []),
        (3.0, (), []),
    ],
)
def test_surprises(took: float, expected: tuple[float, ...], said: list[str]) -> None:
    """A graph that takes a fifth more or less than its plan expects is named; one that was not planned is not."""
    moments, name, here = iter((0.0, 0.2, 0.3, took)), "forward of 2 products", torch.device("cpu")
    with TaskProfile(lambda: next(moments)) as profile:
        for stretch, moment, of_plan in ((0, 0, expected), (0, 1, ()), (1, 2, ()), (1, 3, ())):
            RECORD_TIME(name, stretch, moment, here, *of_plan)
    assert [text.partition(";")[0] for text in profile.surprises()] == said


@LATE
def test_limited(tmp_path: Path) -> None:
    """A profile with updates makes a plan; with `prefetch=1` one unit is gathered ahead at most. It trains alike."""
    step = _step(clip_norm=1.0, options={"link": SLOW, "record_profile": True})
    losses = [step(INPUTS, target=TARGET).item()]
    with TaskProfile() as profile:
        losses += [step(INPUTS, target=TARGET).item() for _ in range(4)]
    (tmp_path / "profile.json").write_text(json.dumps(profile.seconds))
    limited = _step(clip_norm=1.0, prefetch=1, options={"link": SLOW, "profile": str(tmp_path / "profile.json")})
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
    """What is no update is refused, by the field's name."""
    for change, message in (
        ({"moves": -1.0}, "moves must be at least 0, not -1.0"),
        ({"moves": 7.0, "prefetch": -1}, "prefetch must be a number of units, at least 0, or 'auto', not -1"),
        ({"moves": 7.0, "prefetch": "all"}, "prefetch must be .*not 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            StepUpdate(**change)
    assert CompileConfig(update=StepUpdate(7.0)) != CompileConfig(update=StepUpdate(7.0, clips=True))
    with pytest.raises(ValueError, match="prefetch must be a number of units, at least 0, or 'auto', not -2"):
        _step(prefetch=-2)


def test_measured_update(tmp_path: Path) -> None:
    """A profile's update is taken as it is, or shared by bytes among another number of units; or it is refused."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"update of 2 units": [0.5, 1.0, 3.0, 0.1], "forward of 0 products": [1.0]}))
    assert measured_update(str(path), [10, 20]) == [0.5, 1.0, 3.0, 0.1]
    assert measured_update(str(path), [10, 20, 10]) == [0.5, 1.0, 2.0, 1.0, 0.1]
    path.write_text(json.dumps({"forward of 0 products": [1.0]}))
    assert measured_update(str(path), [10]) is None
    path.write_text(json.dumps({"update of 2 units": [1.0]}))
    with pytest.raises(PlanError, match="expected a list of 4 seconds, two more than units"):
        measured_update(str(path), [10])


@LATE
def test_accumulated() -> None:
    """A step of several micro-batches prefetches by the plan of the first one's forward, which reduces nothing."""
    step = _step(accumulate=2, options={"link": SLOW})
    for _ in range(2):
        kinds = _calls(step)
    assert kinds[::-1].index("reduce_scatter") >= 1
