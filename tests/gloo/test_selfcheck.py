"""`fsdp-compile selfcheck` on two ranks and on one, and what it says of seeded faults."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import selfcheck as module
from fsdp_compile.cli import main
from fsdp_compile.comm import direct
from fsdp_compile.core import flat_collectives
from fsdp_compile.core.flat_collectives import Averaging
from fsdp_compile.passes import PASSES, GraphContext, Pass, backend, tagged
from fsdp_compile.selfcheck import compare_order, selfcheck

from .ranks import Ranks

ROWS = ["names", "eager", "aot_eager", "inductor", "order"]


def _early(self: direct.DirectCollectives, full: torch.Tensor) -> None:
    """What computation may read if it does not wait."""
    WAIT(self, full)
    full.zero_()


def _swap_waits(context: GraphContext) -> None:
    """Let each of the two blocks wait for the all-gather of the other one, and compute with its parameters."""
    sizes = {wait: wait.meta["val"].numel() for wait in tagged(context.graph, "wait")}
    pair = [wait for wait in sizes if list(sizes.values()).count(sizes[wait]) == 2]
    if pair and context.direction == "forward":
        first, second = pair
        first.args, second.args = second.args, first.args
        SWAPPED.append(context.graph_index)


def _swapped_waits() -> dict[str, Any]:
    at = [each.name for each in PASSES].index("check_order") + 1
    passes = (*PASSES[:at], Pass("swap_waits", "post_grad", _swap_waits), *PASSES[at:])
    return {"inductor": backend(passes=passes)}


WAIT = direct.DirectCollectives.wait
SWAPPED: list[int] = []  # graphs


def _fails(way: str, owner: Any, name: str, fault: Any) -> None:
    """With a fault in the place of a name, the row of `way` fails on all ranks, and no other."""
    with mock.patch.object(module, "WAYS", {way: module.WAYS[way]}), mock.patch.object(owner, name, fault):
        report = selfcheck(torch.device("cpu"))
    assert [row.name for row in report.rows if not row.holds] == [way] and not report.holds, str(report)
    assert any("differs from that of one process by" in row.found for row in report.rows), str(report)


def _sums(way: str) -> None:
    _fails(way, flat_collectives, "averaging", lambda dtype, ranks: Averaging("sum", 1.0, 1.0))


def _dropped_average(rank: int) -> None:
    with mock.patch.object(module, "_order_is_the_plan", lambda device: "not looked at"):
        _sums("eager")


def _faults_of_graphs(rank: int) -> None:
    with mock.patch.object(module, "_order_is_the_plan", lambda device: "not looked at"):
        _sums("aot_eager")
        SWAPPED.clear()
        _fails("inductor", module, "WAYS", _swapped_waits())
    assert len(SWAPPED) == 1


def _all(rank: int) -> None:
    report = selfcheck(torch.device("cpu"))
    assert [row.name for row in report.rows] == ROWS and report.holds, str(report)
    assert report.rows[-1].found.endswith("ran as planned") and not report.rows[-1].found.startswith("0 ")
    _fails("inductor", direct.DirectCollectives, "wait", _early)


LATE = pytest.mark.nightly  # they compile


@pytest.mark.parametrize(
    "case", [_dropped_average, pytest.param(_faults_of_graphs, marks=LATE), pytest.param(_all, marks=LATE)]
)
def test_two_ranks(two: Ranks, case: Any) -> None:
    """All rows hold. Gradients that are summed, swapped waits and reading too early make a row fail, which is named."""
    two.run(case)


def test_the_command_on_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes a group of its own, prints the rows and writes them, and warns of nothing that is meant."""
    assert not dist.is_initialized()
    monkeypatch.setattr(module, "WAYS", {"eager": None, "aot_eager": "aot_eager"})
    assert main(["selfcheck", "--json", str(tmp_path / "report.json")]) == 0
    rows = [name for name in ROWS if name != "inductor"]
    (printed, warned), written = capsys.readouterr(), json.loads((tmp_path / "report.json").read_text())
    assert "fsdp-compile: warning" not in warned
    assert written["holds"] and [row["name"] for row in written["rows"]] == rows and written["where"]["ranks"] == 1
    assert printed.endswith("all hold\n") and all(f"ok    {name}" in printed for name in rows)


def test_order_is_compared() -> None:
    """A collective that came too early, too late or not at all is named."""
    planned = [("all_gather", "a"), ("all_gather", "b"), ("reduce", "b")]
    compare_order(planned, planned)
    for ran, number in ((planned[::-1], 0), (planned[:2], 2), ([*planned, ("reduce", "a")], 3)):
        with pytest.raises(AssertionError, match=f"collective {number}: expected"):
            compare_order(planned, ran)
