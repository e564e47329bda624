"""What is predicted, in each of its forms: text, JSON, trace."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from predictions import explanation, prediction

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


def test_text() -> None:
    """Several settings are a table; the best one is shown in detail, whose times add up to the step."""
    text = str(explanation())
    assert_expected_inline(
        text[text.index("In detail") :],
        """\
In detail, the most tokens/s per GPU that fits:

Llama, 8.03 B parameters
8 x h100-80, FULL_SHARD, batch 2 of 8,192 tokens, bf16, checkpointing none, adamw, clipped

step      401.9 ms = forward 112.0 + backward 224.0 + update 5.000 + exposed 60.9
speed     40,763 tokens/s per GPU, MFU 35.6%, HFU 38.2%
memory    70.0 GiB at most: fits into 79.6; the peak is at: the forward of blocks.7
          parameters 4.0, gradients 4.0, optimizer 8.0, activations 48.0
          logits 2.0, gathered 1.0, packed 1.0, other 2.0

collectives     links         number  GiB    ms  exposed ms
all-gather      within nodes      16  8.0  65.0        60.9
reduce-scatter  within nodes       8  4.0  32.5         0.0

largest          links           GiB     ms  exposed ms  limited by
gather blocks.0  within nodes  0.500  4.062       4.062  dependency

alternatives                  step ms  difference  tokens/s/GPU  peak GiB    memory
best: checkpoint every block    513.9      +112.0        31,879      30.0      fits
batch 8                         803.9      +401.9         9,000      90.0  too much

constants 1 data sheet, 1 fitted, 1 measured, 1 assumed; the JSON lists them with their sources
""",
    )
    assert text.startswith("Llama, 8.03 B parameters, in 8 settings\n")
    assert len(str(Report((prediction(),))).splitlines()) < len(text.splitlines()) - 8  # one setting has no table


def test_json() -> None:
    """JSON has every field of every prediction, and whether it fits."""
    table = json.loads(explanation().to_json())
    assert table["format"] == FORMAT and len(table["predictions"]) == 8
    for found in table["predictions"]:
        assert found.keys() - {"fits"} == {each.name for each in fields(Prediction)} and found["fits"] is True


def test_trace() -> None:
    """The trace has an event for each span, in its lane, and a counter that follows the memory."""
    (each,) = Report((prediction(),)).predictions
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
