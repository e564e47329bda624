"""Plans may come from anybody: what is wrong with a file is one error with the file and the place."""

import math
import os
import re
from pathlib import Path

import pytest

from fsdp_compile.config import CompileConfig
from fsdp_compile.passes.cost.hardware import Hardware, Link, link
from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.post_grad.plan_by_cost import plans_in_file

PLANS = {
    "a number": (
        "forward:\nat 0 gather a\nat NaN wait a\n",
        r"forward, line 3: expected the number of a task, found NaN",
    ),
    "a long number": (f"forward:\nat {'9' * 9000} wait a\n", "forward, line 2: expected the number of a task, found 9"),
    "negative": ("forward:\nat -1 wait a\n", "forward, line 2: expected the number of a task, found -1"),
    "a kind": ("forward:\nat 0 fetch a\n", "forward, line 2: expected one of gather, wait, .*, found fetch"),
    "no unit": ("forward:\nat 0 gather\n", "forward, line 2: expected 'at TASK KIND UNIT...', found 'at 0 gather'"),
    "in the second plan": ("backward:\nat 0 gather a\n\nforward:\nat x wait a\n", "forward, line 5: .* task, found x"),
    "no heading": ("at 0 gather a\n", "to have plans under 'forward:' and 'backward:', found no heading"),
    "two of a heading": ("forward:\nforward:\n", "to have one plan under 'forward:', found two"),
    "JSON": ('{"forward": []}', "to have plans under 'forward:' and 'backward:', found no heading"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_is_none(tmp_path: Path, name: str) -> None:
    """The error names the file, the heading and the line."""
    path = tmp_path / "plan.txt"
    text, message = PLANS[name]
    path.write_text(text)
    with pytest.raises(PlanError, match=f"^plan: .*{re.escape(str(path))}.*{message}"):
        plans_in_file(str(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A folder, a pipe, a missing file, bytes that are no text and a huge file are refused before anything is read."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{}")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate((1 << 28) + 1)
    messages = {"folder": "no regular file", "pipe": "no regular file", "absent": "no regular file",
                "bytes": "can't decode byte 0xff", "huge": "268435457 bytes, and 268435456 are the most"}  # fmt: skip
    for name, message in messages.items():
        path = str(tmp_path / name)
        for read in (
            lambda path=path: plans_in_file(path),
            lambda path=path: CompileConfig(plan=path).file_contents,
        ):
            expected = f"^plan: (expected|cannot read) .*{re.escape(path)}.*{message}"
            with pytest.raises(ValueError, match=expected):
                read()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, "1", True, None])
def test_links_and_devices_of_the_caller(bad: object) -> None:
    """A figure of a link or a device that is no finite number is refused by its name."""
    for name in ("latency", "bandwidth", "hop"):
        figures = {"latency": 1.0, "bandwidth": 1.0, "hop": 0.0} | {name: bad}
        with pytest.raises(ValueError, match=f"^link mine, {name}: expected a finite number .* 0, found {bad!r}$"):
            Link("mine", source="this test", **figures)
    near = Link("mine", 1.0, 1.0, "this test")
    for name in ("bandwidth", "memory", "product_efficiency", "peak"):
        figures = {"peak": 1.0, "bandwidth": 1.0, "memory": 1, "product_efficiency": 1.0} | {name: bad}
        peak = {"float32": figures.pop("peak")}
        if name == "memory" and bad is None:
            continue  # memory that is not known
        with pytest.raises(
            ValueError, match=f"^hardware mine, {name}.*: expected a finite number above 0, found {bad!r}$"
        ):
            Hardware("mine", peak, node=near, network=near, **figures)


@pytest.mark.parametrize("text", ["nan,1", "inf,1", "-1,1", "1,-1", "1,0", "1e999,1", "a,b", "1", "1,2,3"])
def test_links_as_text(text: str) -> None:
    """`custom:LATENCY,BANDWIDTH` takes finite numbers alone."""
    with pytest.raises(ValueError, match=f"expected custom:LATENCY,BANDWIDTH .* found 'custom:{text}'"):
        link(f"custom:{text}")
