"""`fsdp-compile selfcheck` on two ranks and on one, and what it says of seeded faults."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import fully_shard
from fsdp_compile import selfcheck as module
from fsdp_compile.compare import systems, training
from fsdp_compile.core import flat_collectives
from fsdp_compile.core.flat_collectives import Averaging
from fsdp_compile.selfcheck import process_group, selfcheck
from fsdp_compile.steady import compare_order, ran, waits_within
from fsdp_compile.tools.cli import main

from ..ranks import Ranks

ROWS = ["eager", "aot_eager", "inductor", "order", "memory", "streams", "speed", "predicted"]
CPU = torch.device("cpu")


def _dropped_average(rank: int) -> None:
    """With gradients that are summed the row of values fails on all ranks, and no other."""
    with (
        mock.patch.multiple(module, LOOKS={}, SPEED=(), WAYS=("eager",)),
        mock.patch.object(flat_collectives, "averaging", lambda *_: Averaging("sum", 1.0, 1.0)),
    ):
        report = selfcheck(CPU)
    [failed] = [row for row in report.rows if not row.holds]
    assert failed.name == "eager" and not report.holds, str(report)
    assert "DIFFERS" in failed.found and "module `" in failed.found, str(report)


def _all(rank: int) -> None:
    report = selfcheck(CPU)
    assert [row.name for row in report.rows] == ROWS and report.holds, str(report)
    found = {row.name: row.found for row in report.rows}
    assert found["order"].endswith("ran as planned") and not found["order"].startswith("0 ")
    assert "planned" in found["memory"] and "step" in found["speed"] and "predicted for cpu" in found["predicted"]


@pytest.mark.parametrize("case", [_dropped_average, pytest.param(_all, marks=pytest.mark.nightly)])
def test_two_ranks(two: Ranks, case: Any) -> None:
    """All rows hold. A fault in values makes a row fail, which is named; tests of `check` have more such faults."""
    two.run(case)


def test_the_command_on_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes a group of its own, prints the rows and writes them, and warns of nothing that is meant."""
    assert not dist.is_initialized()
    monkeypatch.setattr(module, "WAYS", ("eager", "aot_eager"))
    monkeypatch.setattr(module, "SPEED", ("fsdp2", "eager"))
    monkeypatch.setattr(module, "OURS", ("eager",))
    assert main(["selfcheck", "--json", str(tmp_path / "report.json")]) == 0
    rows = [name for name in ROWS if name != "inductor"]
    (printed, warned), written = capsys.readouterr(), json.loads((tmp_path / "report.json").read_text())
    assert "fsdp-compile: warning" not in warned
    assert written["holds"] and [row["name"] for row in written["rows"]] == rows and written["where"]["ranks"] == 1
    assert printed.endswith("all hold\n") and all(f"ok    {name}" in printed for name in rows)
    assert [row["system"] for row in written["speed"]["rows"]] == ["fsdp2", "eager"]


def _row_of(name: str) -> module.Check:
    """The row of that name, of memory and of two systems side by side."""
    with (
        mock.patch.multiple(module, WAYS=(), LOOKS={"memory": module._check_memory}, SPEED=("fsdp2", "eager")),
        process_group(CPU),
    ):
        rows = {row.name: row for row in selfcheck(CPU).rows}
    assert all(row.holds for row in rows.values() if row.name != name), rows
    return rows[name]


KEPT: list[torch.Tensor] = []


def _needing(hook: Any) -> Any:
    """`fully_shard`, and a hook behind forward."""

    def sharded(model: Any) -> Any:
        fully_shard(model).register_forward_hook(hook)
        return model

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


def _frozen(model: Any) -> Any:
    model.blocks.requires_grad_(False)
    return fully_shard(model)


def _raises(*_: Any, **__: Any) -> Any:
    raise ValueError("no such model")


@pytest.mark.nightly
def test_systems_side_by_side() -> None:
    """One of ours that trains otherwise than FSDP2 makes the row fail; FSDP2's own failure is said, and no more."""
    with mock.patch.object(systems.Task, "_shard", lambda self, device, model: _frozen(model)):
        row = _row_of("speed")
    assert not row.holds and "losses of eager differ by up to" in row.found
    with mock.patch.object(training, "fsdp2", _raises):
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
