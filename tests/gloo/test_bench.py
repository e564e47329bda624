"""The benchmark from end to end, small."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench import parts, pictures, report


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_two_systems_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 and ours take turns on an emulated link; figures, table, pictures and traces come out."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    found = parts.run("smoke", replace(parts.PARTS["smoke"], looks=("calls", "copies", "memory")))
    free, slow = found["settings"]
    for name, gathers in (("fsdp2", 5), ("ours", 4)):  # of three units, of which both keep the root, and ours the last
        assert len(free["systems"][name]["losses"]) == 4
        assert slow["systems"][name]["exposed"] > 0  # how much is a matter of the machine's load: two steps of 6 ms
        calls = found["calls"][name]["summary"]["calls"]["0"]
        assert calls == {"all_gather": gathers, "reduce_scatter": 3}
    parameters = 4 * 118_016  # bytes, with what padding there is
    assert found["copies"]["ours"] == pytest.approx(parameters, rel=0.2)  # packing, eagerly
    assert found["copies"]["fsdp2"] == pytest.approx(3 * parameters, rel=0.2)  # both sides of gathers, and packing
    shown = {**found, "date": report.today(), "commit": "0123456", "machine": "here", "versions": {"torch": "2"}}
    table = report.tables({"smoke": shown})
    assert "| ours, eager | " in table and "shortest possible step" in table
    report.save("smoke", found)
    report.write_traces("smoke", found)
    drawn = pictures.draw("smoke", report.load()["smoke"])
    assert [path.name for path in drawn] == ["smoke-speed.png", "smoke-timeline.png", "smoke-memory.png"]
    assert all(path.stat().st_size > 5_000 for path in drawn)
    assert (tmp_path / "traces" / "smoke-ours.json").exists()
