"""Profiles and plans may come from anybody: what is wrong with a file is one error with the file and the place."""

import json
import math
import os
import re
from pathlib import Path

import pytest
from workloads import blocks

from fsdp_compile.config import CompileConfig
from fsdp_compile.passes.cost.hardware import Hardware, Link, link
from fsdp_compile.passes.cost.roofline import with_profile
from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.post_grad.plan_by_cost import plans_in_file

GRAPH = "forward of 1 products"
SECONDS = re.escape("expected seconds from 0 to 1,000,000, found ")
NAMED = "expected the name of a graph, such as 'forward of 10 products'"
DEEP = "[" * 200_000 + "]" * 200_000
PROFILES = {  # by what is wrong: the text, and what is said of it
    "NaN": (f'{{"{GRAPH}": [0.5, NaN]}}', f"'{GRAPH}', number 1 of its list: {SECONDS}nan"),
    "infinity": (f'{{"{GRAPH}": [Infinity, 1]}}', f"'{GRAPH}', number 0 of its list: {SECONDS}inf"),
    "overflow": (f'{{"{GRAPH}": [1e999, 1]}}', f"number 0 of its list: {SECONDS}inf"),
    "a large integer": (f'{{"{GRAPH}": [1{"0" * 400}, 1]}}', f"number 0 of its list: {SECONDS}1000"),
    "a longer integer": (
        f'{{"{GRAPH}": [1{"0" * 9000}, 1]}}',
        "to be JSON as profile_step writes it, found Exceeds",
    ),
    "negative": (f'{{"{GRAPH}": [0.5, -1e-9]}}', f"number 1 of its list: {SECONDS}-1e-09"),
    "text": (f'{{"{GRAPH}": [0.5, "1"]}}', f"number 1 of its list: {SECONDS}'1'"),
    "a bool": (f'{{"{GRAPH}": [true, 1]}}', f"number 0 of its list: {SECONDS}True"),
    "null": (f'{{"{GRAPH}": [null, 1]}}', f"number 0 of its list: {SECONDS}None"),
    "no list": (f'{{"{GRAPH}": 1}}', f"'{GRAPH}': expected a list of 2 seconds, one more than products, found 1"),
    "too few": (f'{{"{GRAPH}": [1]}}', r"expected a list of 2 seconds, one more than products, found \[1\]"),
    "too many": (f'{{"{GRAPH}": [1, 2, 3]}}', r"expected a list of 2 seconds, .* found \[1, 2, 3\]"),
    "another name": ('{"sideways of 1 products": [1, 1]}', f"'sideways of 1 products': {NAMED}"),
    "a nested layout": ('{"version": 2, "graphs": {}}', f"'version': {NAMED}"),
    "a list": ("[[1, 2]]", r"to be an object of seconds by graph, found \[\[1, 2\]\]"),
    "a number": ("3", "to be an object of seconds by graph, found 3"),
    "too deep": (DEEP, "to be JSON as profile_step writes it, found JSON that is nested too deeply"),
    "a deep value": (f'{{"{GRAPH}": {DEEP}}}', "found JSON that is nested too deeply"),
    "a deep number": (f'{{"{GRAPH}": [1, {"[" * 200}{"]" * 200}]}}', f"number 1 of its list: {SECONDS}"),
    "no JSON": ("forward:\n", "to be JSON as profile_step writes it, found Expecting value"),
    "cut off": (f'{{"{GRAPH}": [0.5,', "to be JSON as profile_step writes it, found Expecting value"),
    "empty": ("", "to be JSON as profile_step writes it, found Expecting value"),
}
PLANS = {
    "a number": (
        "forward:\nat 0 gather a\nat NaN wait a\n",
        r"forward, line 3: expected the number of a task, found NaN",
    ),
    "a long number": (f"forward:\nat {'9' * 9000} wait a\n", "forward, line 2: expected the number of a task, found 9"),
    "negative": ("forward:\nat -1 wait a\n", "forward, line 2: expected the number of a task, found -1"),
    "a kind": ("forward:\nat 0 fetch a\n", "forward, line 2: expected one of gather, wait, .*, found fetch"),
    "in the second plan": ("backward:\nat 0 gather a\n\nforward:\nat x wait a\n", "forward, line 5: .* task, found x"),
    "no heading": ("at 0 gather a\n", "to have plans under 'forward:' and 'backward:', found no heading"),
    "two of a heading": ("forward:\nforward:\n", "to have one plan under 'forward:', found two"),
    "JSON": ('{"forward": []}', "to have plans under 'forward:' and 'backward:', found no heading"),
}


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_that_is_none(tmp_path: Path, name: str) -> None:
    """NaN, infinities, negative seconds, other types, layouts and deep nesting are refused, with file and field."""
    path = tmp_path / "profile.json"
    text, message = PROFILES[name]
    path.write_text(text)
    workload = blocks(2)
    for read in (
        lambda: with_profile(workload, [0] * len(workload.tasks), "forward", str(path)),
        lambda: with_profile(workload, [0] * len(workload.tasks), "joint", str(path)),
    ):
        with pytest.raises(PlanError, match=f"^profile: .*{re.escape(str(path))}.*{message}"):
            read()


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
            lambda path=path: with_profile(blocks(2), [0] * len(blocks(2).tasks), "forward", path),
            lambda path=path: plans_in_file(path),
            lambda path=path: CompileConfig(link="cpu-gloo", profile=path).file_contents,
            lambda path=path: CompileConfig(plan=path).file_contents,
        ):
            expected = f"^(profile|plan): (expected|cannot read) .*{re.escape(path)}.*{message}"
            with pytest.raises(ValueError, match=expected):
                read()


def test_a_profile_is_read(tmp_path: Path) -> None:
    """What is right is read: integers and fractions, 0 among them."""
    path, workload = tmp_path / "profile.json", blocks(2)
    path.write_text(json.dumps({GRAPH: [0, 1.5]}))
    measured = with_profile(workload, [0, *[1] * (len(workload.tasks) - 1)], "forward", str(path))
    assert measured.tasks[0].seconds == 0 and sum(task.seconds for task in measured.tasks) == pytest.approx(1.5)


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


@pytest.mark.parametrize("text", ["nan,1", "1,nan", "inf,1", "1,inf", "-1,1", "1,-1", "1,0", "1e999,1", "1", "1,2,3"])
def test_links_as_text(text: str) -> None:
    """`custom:LATENCY,BANDWIDTH` takes finite numbers alone."""
    with pytest.raises(ValueError, match=f"expected custom:LATENCY,BANDWIDTH .* found 'custom:{text}'"):
        link(f"custom:{text}")
