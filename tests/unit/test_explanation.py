"""What is predicted, in each of its forms: text, JSON, trace."""

import json
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
from models import GPT

from fsdp_compile import explain
from fsdp_compile.explain.prediction import (
    FORMAT,
    Alternative,
    Collective,
    CollectiveTime,
    Constant,
    Memory,
    Prediction,
    Setting,
    TimelineSpan,
)
from fsdp_compile.explain.report import Report


@cache
def explanation() -> Report:
    """A GPT in four settings, each with what else could be chosen."""
    return explain(
        GPT, lambda batch, sequence: (torch.zeros(batch, sequence, dtype=torch.long),),
        world_size=[8, 64], batch=[1, 2], sequence=9, hardware="h100-80",
    )  # fmt: skip


def test_text() -> None:
    """Several settings are a table; the best one is shown in detail, whose times add up to the step."""
    report = explanation()
    best = report.best
    assert best is not None and not best.matrices
    head, detail = str(report).split("\nIn detail, the most tokens/s per GPU that fits:\n\n")
    assert head.startswith("GPT, ") and head.splitlines()[0].endswith(" parameters, in 4 settings")
    assert [line.split()[:2] for line in head.splitlines()[3:]] == [[n, b] for n in ("8", "64") for b in ("1", "2")]
    assert str(Report((best,))) == detail, "one setting has no table"
    line = next(line for line in detail.splitlines() if line.startswith("step "))
    assert " ".join(re.findall(r"[a-z+=]+", line)) == "step ms = forward + backward + update + exposed"
    step, *parts = map(float, re.findall(r"[\d.]+", line))
    assert step == pytest.approx(1e3 * best.step, rel=0.01) == pytest.approx(sum(parts), rel=0.01)
    assert re.search(r"^memory +\S+ GiB at most: fits into [\d.]+; the peak is at: ", detail, re.MULTILINE)
    tables = {each.split()[0]: each.splitlines()[1:] for each in detail.split("\n\n")[2:]}
    assert len(tables["collectives"]) == len(best.collectives)
    assert [line.split()[:2] for line in tables["largest"]] == [each.name.split() for each in best.top if each.exposed]
    assert len(tables["alternatives"]) == len({*best.alternatives, best.best})
    assert sum(line.startswith("best: ") for line in tables["alternatives"]) == 1
    assert sum(map(int, re.findall(r"\d+", detail.splitlines()[-1]))) == len(best.constants)


def test_json() -> None:
    """JSON has every field of every prediction, and whether it fits."""
    table = json.loads(explanation().to_json())
    assert table["format"] == FORMAT and len(table["predictions"]) == 4
    for found in table["predictions"]:
        assert found.keys() - {"fits"} == {each.name for each in fields(Prediction)} and found["fits"] is True


def test_trace() -> None:
    """The trace has an event for each span, in its lane, and a counter that follows the memory."""
    each = explanation().predictions[-1]
    events = json.loads(Report((each,)).to_trace())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in spans] == [span.name for span in each.timeline]
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in spans} == {lanes["compute"], lanes["links between nodes"]}
    memory = [(event["ts"] / 1e6, event["args"]["bytes"]) for event in events if event["ph"] == "C"]
    assert memory == [(pytest.approx(seconds), size) for seconds, size in each.memory_over_time]


def test_every_field_is_documented() -> None:
    """docs/explain.md names each field of the JSON."""
    text = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    for kind in (Setting, Prediction, Memory, CollectiveTime, Collective, TimelineSpan, Alternative, Constant):
        missing = [each.name for each in fields(kind) if f"`{each.name}" not in text]
        assert not missing, (kind.__name__, missing)
