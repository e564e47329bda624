"""What the benchmark computes from what it measures."""

from pathlib import Path
from typing import Any

import pytest
import tool
import torch

from bench import parts, report
from bench.__main__ import COMMANDS
from bench.copies import copied
from bench.models import WORKLOADS
from bench.systems import SYSTEMS


def call(kind: str, begin: float, end: float, waits: Any = ()) -> dict[str, Any]:
    return {"kind": kind, "nbytes": 1000, "begin": begin, "end": end, "waits": list(waits), "origin": 0.0}


SEEN = {
    "calls": 2,
    "step": 12.0,
    "list": [
        call("all_gather", 0, 1, [(0, 1)]),
        call("all_gather", 1, 3),
        call("all_gather", 6, 8, [(6, 8)]),
        call("reduce_scatter", 8, 9),
        call("reduce_scatter", 9, 11, [(10, 11)]),
    ],
}


def test_the_bound_on_a_step() -> None:
    """The first gather and the last reduce cannot hide; the rest hides behind computing where that is longer."""
    long = parts.least(SEEN, {"forward": 4.0, "backward": 10.0, "step": 11.0})
    assert long == {"step": 1 + 4 + 6 + 2 + 1, "unavoidable": 3.0, "dependent": 3 + 2 + 3, "communication": 8.0}
    short = parts.least(SEEN, {"forward": 1.0, "backward": 2.0, "step": 2.0})
    assert short["step"] == 1 + 2 + 3 + 2


def test_losses_must_agree() -> None:
    """A peer that trains something else is an error, and so is one whose loss is no number."""
    ours = [5.0, 4.0, 3.0]
    parts.check_losses({"fsdp2": [5.0, 4.001, 3.0], "unsharded": [5.0, 3.0, 2.0], "ours": ours}, bf16=False)
    for wrong in ([5.0, 4.0, 3.1], [5.0, float("nan"), 3.0]):
        with pytest.raises(RuntimeError, match="expected losses as of ours"):
            parts.check_losses({"fsdp2": wrong, "ours": ours}, bf16=False)


def test_copies_of_library_calls() -> None:
    """Bytes that are written count, once; computing does not."""
    x = torch.ones(6)
    assert copied(lambda: x * 2) == 0
    assert copied(lambda: torch.cat([x, x])) == 48
    assert copied(lambda: torch.empty(6).copy_(x)) == 24
    assert copied(lambda: torch._foreach_copy_([torch.empty(6), torch.empty(6)], [x, x])) == 48
    assert copied(lambda: x.bfloat16()) == 12
    assert copied(lambda: torch.split_with_sizes_copy(x, [2, 4], out=[torch.empty(2), torch.empty(4)])) == 24


def test_parts_name_what_exists() -> None:
    """What parts, the page and tools/gpu_day.py name: systems, models, passes, commands and files."""
    from fsdp_compile.passes import PASSES

    known = {each.name for each in PASSES}
    for part in parts.PARTS.values():
        assert part.model in WORKLOADS
        for name in part.systems:
            system, _, option = name.partition(":")
            meant = known | {"autocast", "float8"} if system == "ours_compiled" else {"in_backward", "ends"}
            assert system in SYSTEMS and (not option or meant.issuperset(option.split("+")))
    named = {match[1].split()[3] for match in report.COMMAND.finditer(report.PAGE.read_text())}
    assert {"gloo", "link", "fit"} <= named <= COMMANDS.keys() | parts.PARTS.keys()
    files = [word for part in tool.load("gpu_day").parts(seed=3) for word in part.command if word.startswith("tests/")]
    assert len(files) > 4 and all((Path(__file__).parents[2] / each).exists() for each in files)
