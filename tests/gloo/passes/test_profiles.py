"""Ranges in profiles: each phase of each unit, and each collective of generated code."""

import re
import sys
from itertools import pairwise

import pytest
import torch
from models import mlp
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fsdp_compile import fully_shard
from fsdp_compile.comm.collectives import profiled

from ..ranks import Ranks

Range = tuple[str, str, str, int, int]  # direction, phase, unit, begin, end


def _ranges(whole: nn.Module, inputs: Tensor, backend: str | None = None) -> list[Range]:
    """Those of the second step, in order."""
    model = fully_shard(whole, reshard_after_forward=True)
    run = model if backend is None else torch.compile(model, backend=backend)
    run(inputs).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run(inputs).sum().backward()
    found = []
    for event in profiler.events():
        match = re.fullmatch(r"fsdp_compile\.(\w+)\.(\w+) (.+)", event.name)
        if match is not None:
            found.append((*match.groups(), event.time_range.start, event.time_range.end))
    return sorted(found, key=lambda each: each[3])  # type: ignore[return-value]  # three strings, two numbers


def _within(inner: Range, outer: Range) -> bool:
    return outer[3] <= inner[3] and inner[4] <= outer[4]


def _eager(rank: int) -> None:
    ranges = _ranges(mlp(), torch.randn(2, 7))
    units = list(
        dict.fromkeys(unit for direction, phase, unit, *_ in ranges if (direction, phase) == ("forward", "pre"))
    )
    assert len(units) == 4 and all(units)
    for unit in units:
        mine = [each for each in ranges if each[2] == unit]
        kinds = [(direction, phase) for direction, phase, *_ in mine]
        for direction in ("forward", "backward"):
            for phase in ("pre", "all_gather", "wait_all_gather", "post"):
                if (direction, unit) != ("backward", units[0]) or phase in ("pre", "post"):  # the root stays unsharded
                    assert kinds.count((direction, phase)) == 1, (direction, phase, unit, kinds)
        assert kinds.count(("backward", "reduce")) == kinds.count(("backward", "wait_reduce")) == 1
        of = {each[:2]: each for each in mine}
        for direction in ("forward", "backward"):
            waits, opens = of.get((direction, "wait_all_gather")), of[direction, "pre"]
            assert waits is None or _within(waits, opens)  # of the same unit
            starts = of.get((direction, "all_gather"))
            assert starts is None or any(_within(starts, each) for each in ranges if each[:2] == (direction, "pre"))
            assert of[direction, "pre"][4] <= of[direction, "post"][3]
        assert _within(of["backward", "reduce"], of["backward", "post"])
    for one, other in pairwise(ranges):  # of one thread: beside or within each other
        assert other[3] >= one[4] or _within(other, one)


def _compiled(rank: int) -> None:
    ranges = _ranges(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), torch.randn(2, 7), "inductor")
    kinds = [(direction, phase) for direction, phase, *_ in ranges]
    assert kinds.count(("forward", "all_gather")) == kinds.count(("forward", "wait_all_gather")) == 2
    assert kinds.count(("backward", "reduce")) == kinds.count(("backward", "wait_reduce")) == 2
    assert kinds.count(("backward", "all_gather")) == kinds.count(("backward", "wait_all_gather")) == 1
    assert all(not unit.endswith("elements") for _, _, unit, *_ in ranges)


@pytest.mark.parametrize("step", [_eager, pytest.param(_compiled, marks=pytest.mark.nightly)])
def test_a_step_has_ranges_with_units_and_directions(two: Ranks, step: object) -> None:
    """Each phase of each unit is a range, nested as the phases are; so is each collective in generated code."""
    two.run(step)


def test_ranges_cost_nothing_without_a_profiler() -> None:
    """While no profiler runs, a range calls one Python function and makes no object."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    with profiled("pre", "layers.0"):
        pass
    sys.setprofile(None)
    assert calls == ["profiled"] and profiled("pre", "a") is profiled("post", "b")
