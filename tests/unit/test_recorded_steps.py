"""Steps that follow from two recordings are those that a recording finds, to the last bit."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fsdp_compile.optim import recorded_steps
from fsdp_compile.optim.flat import ELEMENTWISE
from fsdp_compile.optim.program import NotRecordable, Recorded, UpdateProgram, record
from fsdp_compile.optim.recorded_steps import RecordedSteps

OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {}, "Adam": {"weight_decay": 0.1, "amsgrad": True}, "SGD": {"momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr_decay": 0.1}, "RMSprop": {"momentum": 0.5, "centered": True},
}  # fmt: skip
ALWAYS = {"RAdam", "NAdam"}
"""Whose step compares its count, or multiplies a number of the state."""


def stepped(kind: Any) -> tuple[Any, dict[str, Any]]:
    """An optimizer that has made its one step, and the state of its parameter."""
    param = nn.Parameter(torch.ones(4))
    optimizer = kind([param], lr=0.1, foreach=False, **OPTIONS.get(kind.__name__, {}))
    param.grad = torch.ones(4)
    optimizer.step()
    return optimizer, optimizer.state[param]


def assert_alike(found: Recorded, expected: Recorded) -> None:
    assert found.program.operations == expected.program.operations
    assert found.numbers == expected.numbers, "to the last bit"
    assert [each.dtype for each in found.scalars] == [each.dtype for each in expected.scalars]
    assert found.state.keys() == expected.state.keys()
    for name, value in expected.state.items():
        assert type(found.state[name]) is torch.Tensor and found.state[name].dtype == value.dtype
        assert found.state[name].equal(value)


def follow(optimizer: Any, state: dict[str, Any], numbers: range, change: Any = lambda number: None) -> int:
    """Compare steps with what a recording finds, which moves on the counts; return how many were recorded."""
    (group,) = optimizer.param_groups
    steps = RecordedSteps(dict[Any, UpdateProgram]())
    with patch.object(recorded_steps, "record", wraps=record) as recording:
        for number in numbers:
            group["lr"] = 0.1 * math.cos(number / 100)
            change(number)
            found = steps.step(optimizer, group, state, torch.float32)
            expected = record(optimizer, group, state, torch.float32)
            assert_alike(found, expected)
            for name, value in expected.state.items():
                state[name].copy_(value)
        return recording.call_count


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_steps_follow(kind: Any) -> None:
    """Under a schedule two steps are recorded, but of optimizers that look at what changes."""
    optimizer, state = stepped(kind)
    try:
        record(optimizer, optimizer.param_groups[0], state, torch.float32)
    except NotRecordable:
        pytest.skip("is not recorded at all")
    recorded = follow(optimizer, state, range(1, 30))
    assert recorded == (29 if kind.__name__ in ALWAYS else 2)


@pytest.mark.parametrize("begin", [1, 340, 100_000])
def test_counts(begin: int) -> None:
    """Also where a correction rounds to one, so that numbers have several explanations for a while."""
    optimizer, state = stepped(torch.optim.AdamW)
    state["step"].fill_(begin)
    assert follow(optimizer, state, range(1, 30)) <= 29


def test_other_options() -> None:
    """What has changed beside the schedule is seen: weight decay, betas, and a count that was set back."""
    optimizer, state = stepped(torch.optim.AdamW)
    (group,) = optimizer.param_groups
    changes: dict[int, Any] = {
        5: lambda: group.update(weight_decay=0.3), 6: lambda: group.update(weight_decay=0.4),
        9: lambda: group.update(weight_decay=0.0), 12: lambda: group.update(betas=(0.8, 0.9)),
        15: lambda: state["step"].fill_(1), 18: lambda: group.update(lr=torch.tensor(0.1)),
        21: lambda: group.update(eps=1e-3, weight_decay=0.1),
    }  # fmt: skip
    recorded = follow(optimizer, state, range(1, 30), lambda number: changes.get(number, lambda: None)())
    assert 2 < recorded < 20
