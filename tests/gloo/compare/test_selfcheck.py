"""`fsdp-compile selfcheck` on two ranks, and what it takes for a fault."""

import json
from pathlib import Path

import pytest

from fsdp_compile import selfcheck as module
from fsdp_compile.compare.comparison_report import Comparison
from fsdp_compile.compare.comparison_report import Row as System
from fsdp_compile.compare.verdicts import Report, Row
from fsdp_compile.selfcheck import SelfCheck
from fsdp_compile.tools.cli import main


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts ranks, prints both tables and writes them, and warns of nothing that is meant."""
    monkeypatch.setattr(module, "WAYS", ("eager",))
    monkeypatch.setattr(module, "SYSTEMS", ("fsdp2", "eager"))
    monkeypatch.setattr(module, "OURS", ("eager",))
    assert main(["selfcheck", "--device", "cpu", "--json", str(tmp_path / "report.json")]) == 0
    (printed, said), written = capsys.readouterr(), json.loads((tmp_path / "report.json").read_text())
    assert "fsdp-compile: warning" not in said
    assert printed.endswith("this installation works\n") and "equal bit for bit" in printed and "\nfsdp2 " in printed
    assert written["holds"] and written["values"]["where"]["ranks"] == written["systems"]["where"]["ranks"] == 2
    assert [row["way"] for row in written["values"]["rows"]] == ["eager"]
    assert [row["system"] for row in written["systems"]["rows"]] == ["fsdp2", "eager"]


def _found(verdict: str = "equal", failed: str = "", loss: float = 2.0) -> SelfCheck:
    rows = [System(name, name, "it raised" if name == failed else None, losses=(loss if name == "step" else 2.0,))
            for name in module.SYSTEMS]  # fmt: skip
    systems = Comparison({"precision": "fp32"}, tuple(rows))
    return SelfCheck(Report({}, (Row("eager", 2, "equal"), Row("inductor", 2, verdict))), systems)


def test_what_fails() -> None:
    """Values that differ, a way of ours that raises, and losses that are not FSDP2's; not a failure of FSDP2."""
    assert _found().holds and _found("rounding").holds and _found(failed="fsdp2").holds
    assert not _found("differs").holds and not _found("failed").holds
    assert not _found(failed="compiled").holds and not _found(loss=2.1).holds
    assert str(_found(loss=2.1)).endswith("this installation fails\n")
