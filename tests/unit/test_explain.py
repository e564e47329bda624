import json
import re
from pathlib import Path

import pytest
from workloads import blocks, no_prefetch

from fsdp_compile.explain.prediction import Setting
from fsdp_compile.explain.report import Report
from fsdp_compile.explain.scheduled import Scheduled
from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.plan.schedule import search_plan
from fsdp_compile.passes.plan.workload import Workload, smallest_budget
from fsdp_compile.tools.cli import main


def report(workload: Workload, plan: Plan, budget: int | None = None) -> Report:
    step = Scheduled(workload, plan, budget)
    return Report((step.predict("model", 0, Setting(1), None, 1, (0, 0)),), step)


def test_printed():
    """Each collective with what is hidden and what limits it; totals; memory."""
    found = report(blocks(3), search_plan(blocks(3)).plan)
    rows, totals = str(found).split("\n\n")
    for line, each in zip(rows.splitlines()[1:], found.scheduled.collectives, strict=True):
        assert line.startswith(f"{each.name} ") and line.endswith(each.limit)
        seconds = each.seconds, each.seconds - each.exposed, each.exposed
        expected = [f"{each.bytes}", *(f"{1e3 * part:.3f}" for part in seconds)]
        assert line.removeprefix(each.name).split()[:4] == expected
    assert totals.splitlines() == [
        "step      16520.000 ms: computing 12400.000, the rest 4120.000",
        "bound     16460.000 ms, a lower bound for all plans; this one takes 0.36% more",
        "memory    471 bytes at most, budget: no limit",
        "rule      16520.000 ms, 471 bytes: the order of blocks, without a search",
    ]


def test_limits():
    """Where memory is no limit, dependencies are; within the smallest budget, memory; behind a full link, the link."""
    workload = blocks(9)
    free = report(workload, search_plan(workload).plan).scheduled
    assert {each.limit for each in free.collectives if each.exposed} == {"dependency", "link"}
    assert free.timeline.exposed == pytest.approx(sum(each.exposed for each in free.collectives))
    least = smallest_budget(workload)
    tight = report(workload, no_prefetch(workload), least).scheduled
    assert "memory" in {each.limit for each in tight.collectives}
    slow = report(blocks(9, forward=0.1), search_plan(blocks(9, forward=0.1), coalesce=1).plan).scheduled
    assert sum(each.limit == "link" for each in slow.collectives) > len(slow.collectives) / 2


def test_trace():
    """The trace has one event for each task and collective."""
    workload = blocks(3)
    found = report(workload, search_plan(workload).plan)
    events = json.loads(found.to_trace())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(workload.tasks) + len(found.scheduled.collectives)


MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Sequential(nn.Linear(64, 64)))

def example_inputs(batch, sequence):
    return (torch.ones(batch, sequence),)
"""


def test_plan_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fsdp-compile plan` prints the report on the model that a file defines, and writes its timeline."""
    (tmp_path / "model.py").write_text(MODEL)
    options = ["--link", "h100-nvlink", "--world-size", "8", "--device", "h100", "--trace", str(tmp_path / "trace")]
    options += ["--batch", "8", "--seq", "64"]
    model = f"{tmp_path}/model.py:make"
    assert main(["plan", model, *options]) == 0
    printed = capsys.readouterr().out
    old = MODEL.replace("make()", "make_model()").replace("(batch, sequence)", "()", 1)
    (tmp_path / "old.py").write_text(old.replace("(batch, sequence)", "(8, 64)"))
    assert main(["plan", str(tmp_path / "old.py"), *options]) == 0
    found = capsys.readouterr()
    assert found.out == printed and f"warning: plan {tmp_path}/old.py becomes plan " in found.err
    assert printed.startswith("collective ") and "\nreduce root " in printed and "\nbound " in printed
    assert json.loads((tmp_path / "trace").read_text())["traceEvents"]
    assert main(["plan", model, *options, "--optimizer", "adamw", "--clip"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\nupdate +[0-9.]+ ms behind these\n", printed)
    assert main(["plan", model, *options, "--clip"]) == 2
    assert "clip: expected an optimizer beside it" in capsys.readouterr().err
    for option, value in [("link", "ethernet"), ("link", "custom:1"), ("device", "h1000"), ("budget", "1")]:
        assert main(["plan", model, *options, f"--{option}", value]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 + (option == "budget")  # which tracing alone can tell, and that is said
        assert said[-1].startswith(f"fsdp-compile: error: {option}: expected"), said
