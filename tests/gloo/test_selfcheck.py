"""`fsdp-compile selfcheck` on two ranks and on one, and what it says of seeded faults."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import fully_shard
from fsdp_compile import selfcheck as module
from fsdp_compile.comm import direct
from fsdp_compile.compare import systems
from fsdp_compile.core import flat_collectives
from fsdp_compile.core.flat_collectives import Averaging
from fsdp_compile.passes import PASSES, GraphContext, Pass, backend, tagged
from fsdp_compile.selfcheck import process_group, selfcheck
from fsdp_compile.steady import compare_order, ran, waits_within
from fsdp_compile.tools.cli import main

from .ranks import Ranks

ROWS = ["names", "eager", "aot_eager", "inductor", "order", "memory", "streams", "speed", "predicted"]
CPU = torch.device("cpu")


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
        report = selfcheck(CPU)
    assert [row.name for row in report.rows if not row.holds] == [way] and not report.holds, str(report)
    assert any("differs from that of one process by" in row.found for row in report.rows), str(report)


@contextmanager
def _values_alone() -> Iterator[None]:
    """Rows about anything else than values are left out, or are of nothing."""
    with mock.patch.object(module, "LOOKS", {}), mock.patch.object(module, "SPEED", ()):
        yield


def _sums(way: str) -> None:
    _fails(way, flat_collectives, "averaging", lambda *_: Averaging("sum", 1.0, 1.0))


def _dropped_average(rank: int) -> None:
    with _values_alone():
        _sums("eager")


def _faults_of_graphs(rank: int) -> None:
    with _values_alone():
        _sums("aot_eager")
        SWAPPED.clear()
        _fails("inductor", module, "WAYS", _swapped_waits())
    assert len(SWAPPED) == 1


def _all(rank: int) -> None:
    report = selfcheck(CPU)
    assert [row.name for row in report.rows] == ROWS and report.holds, str(report)
    found = {row.name: row.found for row in report.rows}
    assert found["order"].endswith("ran as planned") and not found["order"].startswith("0 ")
    assert "planned" in found["memory"] and "step" in found["speed"] and "predicted for cpu" in found["predicted"]
    with _values_alone():
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
    monkeypatch.setattr(module, "SPEED", ("fsdp2", "eager"))
    monkeypatch.setattr(module, "OURS", ("eager",))
    out = [text for name in ("json", "html") for text in (f"--{name}", str(tmp_path / f"report.{name}"))]
    assert main(["selfcheck", *out]) == 0
    rows = [name for name in ROWS if name != "inductor"]
    (printed, warned), written = capsys.readouterr(), json.loads((tmp_path / "report.json").read_text())
    assert "fsdp-compile: warning" not in warned
    assert written["holds"] and [row["name"] for row in written["rows"]] == rows and written["where"]["ranks"] == 1
    assert printed.endswith("all hold\n") and all(f"ok    {name}" in printed for name in rows)
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert [row["system"] for row in written["speed"]["rows"]] == ["fsdp2", "eager"]


def _row_of(name: str) -> module.Check:
    """The row of that name, of memory and of two systems side by side."""
    with (
        mock.patch.multiple(module, WAYS={}, LOOKS={"memory": module._check_memory}, SPEED=("fsdp2", "eager")),
        mock.patch.object(module, "_check_names", lambda: "not looked at"),
        process_group(CPU),
    ):
        rows = {row.name: row for row in selfcheck(CPU).rows}
    assert all(row.holds for row in rows.values() if row.name != name), rows
    return rows[name]


KEPT: list[torch.Tensor] = []


def _needing(hook: Any) -> Any:
    """`fully_shard`, and a hook behind forward."""

    def sharded(model: Any) -> None:
        fully_shard(model)
        model.register_forward_hook(hook)

    return sharded


@pytest.mark.parametrize(
    ("hook", "found"),
    [
        (lambda *_: KEPT.append(torch.empty(1000)), "a step leaves 4,000 bytes behind"),
        pytest.param(
            lambda *_: (torch.empty(4_000_000), None)[1],
            "bytes are alive at most, expected ",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_memory_that_is_kept_or_needed(hook: Any, found: str) -> None:
    """What a step leaves behind, and what it needs beside that of the unsharded model, makes the row fail."""
    with mock.patch.object(module, "fully_shard", _needing(hook)):
        row = _row_of("memory")
    assert not row.holds and found in row.found, row


def _frozen(training: Any, model: Any) -> Any:
    model.blocks.requires_grad_(False)
    return systems._make_eager(training, model)


def _raises(training: Any, model: Any) -> Any:
    raise ValueError("no such model")


@pytest.mark.nightly
def test_systems_side_by_side() -> None:
    """One of ours that trains otherwise than FSDP2 makes the row fail; FSDP2's own failure is said, and no more."""
    eager, other = systems.SYSTEMS["eager"], systems.SYSTEMS["fsdp2"]
    with mock.patch.dict(systems.SYSTEMS, {"eager": replace(eager, prepare=_frozen)}):
        row = _row_of("speed")
    assert not row.holds and "losses of eager differ by up to" in row.found
    with mock.patch.dict(systems.SYSTEMS, {"fsdp2": replace(other, prepare=_raises)}):
        row = _row_of("speed")
    assert row.holds and row.found.endswith("fsdp2 failed: ValueError: no such model")


# --- profiles of GPUs, where there is none ----------------------------------------------------------------------------


def event(name: str, start: int, end: int, device: str = "CPU", shapes: Any = ()) -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=f"DeviceType.{device}", input_shapes=shapes)


def test_waits_within_a_step() -> None:
    """Waits for the device count between begin and end of the step on the host; those for an event do not."""
    step = "fsdp_compile.steady.step"
    events = [
        event("cudaDeviceSynchronize", 0, 1), event(step, 2, 20), event(step, 5, 40, "CUDA"),
        event("aten::item", 6, 12), event("aten::_local_scalar_dense", 7, 11), event("cudaStreamSynchronize", 8, 10),
        event("cudaEventSynchronize", 13, 14), event("cudaDeviceSynchronize", 15, 16),
        event("cudaDeviceSynchronize", 25, 30),
    ]  # fmt: skip
    expected = ["cudaStreamSynchronize in aten::_local_scalar_dense", "cudaDeviceSynchronize"]
    assert [*waits_within(events)] == expected
    assert [*waits_within(events[1:4])] == []


def test_collectives_of_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where generated code calls them, as reduce-scatters on NCCL, they count beside the package's ranges."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    functional = "_c10d_functional::"
    events = [
        event(f"{functional}reduce_scatter_tensor", 3, 4, shapes=[[64]]),
        event("fsdp_compile.forward.all_gather blocks.0", 1, 2),
        event(f"{functional}all_gather_into_tensor_out", 2, 3, shapes=[[8]]),
        event(f"{functional}wait_tensor", 5, 6, shapes=[[8]]),
        event(f"{functional}reduce_scatter_tensor_coalesced", 6, 7, shapes=[[]]),
    ]
    assert [*ran(events)] == [
        ("all_gather", "blocks.0"), ("all_gather", "32 elements"), ("reduce", "64 elements"),
        ("reduce", "several units at once"),
    ]  # fmt: skip


def test_order_is_compared() -> None:
    """A collective that came too early, too late or not at all is named."""
    planned = [("all_gather", "a"), ("all_gather", "b"), ("reduce", "b")]
    compare_order(planned, planned)
    for found, number in ((planned[::-1], 0), (planned[:2], 2), ([*planned, ("reduce", "a")], 3)):
        with pytest.raises(AssertionError, match=f"collective {number}: expected"):
            compare_order(planned, found)
