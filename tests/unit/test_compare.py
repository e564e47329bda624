"""`compare` without ranks: what it refuses, what its rows say, and what models are given."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile.compare.comparison_report import Comparison, Row
from fsdp_compile.compare.pool import Launch
from fsdp_compile.compare.rounds import Failed, Running, Side, predict
from fsdp_compile.compare.systems import SYSTEMS, Task, Turn
from fsdp_compile.explain.batch import batch_of
from fsdp_compile.passes.cost.hardware import reported_device
from fsdp_compile.tools.cli import main
from fsdp_compile.tools.commands.compare import COMPARED
from fsdp_compile.tools.files import load_factory

MODEL = """
from torch import nn

def make():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

not_a_function = 3
"""
ODD = "def make(): ...\ndef example_inputs(batch): ..."


def task(**changes: Any) -> Task:
    return Task(**{"batch": 2, "sequence": 4, "bf16": False, "device": "cpu", **changes})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{folder}/none.py:make"], "none.py: expected a Python file, found none"),
        (["{model}"], "expected a file, a colon and the name of a function, found "),
        (["{model}:missing"], "expected a function missing() without arguments, found none"),
        (["{model}:not_a_function"], "expected a function not_a_function() without arguments, found none"),
        (["{broken}:make"], "expected a file that runs, found ModuleNotFoundError: No module named 'nowhere'"),
        (["{odd}:make"], "expected a function example_inputs(batch, sequence) beside it, found "),
        (["{model}:make", "--systems", "eager,zero"], "--systems: expected one of eager, compiled, step, fsdp2, "),
        (["{model}:make", "--ranks", "0"], "--ranks: expected a whole number of at least 1, found '0'"),
        (["{model}:make", "--steps", "0"], "--steps: expected a whole number of at least 1, found '0'"),
        (["{model}:make", "--batch", "-1"], "--batch: expected a whole number of at least 1, found '-1'"),
        (["{model}:make", "--seq", "many"], "--seq: expected a whole number of at least 1, found 'many'"),
        (["{model}:make", "--ranks", "9", "--device", "cuda"], "--ranks 9: expected at most 8, one for each GPU here"),
        (["{model}:make", "--json", "{folder}/no/out.json"], "no/out.json: expected its folder to exist, found none"),
        (["{model}:make", "--json", "{folder}"], "expected the name of a file, found a folder"),
        (["{model}:make", "--json", "{folder}/locked"], "locked: expected a place that can be written to, found one"),
        (["{model}:make", "--hardware", "h1000", "--device", "cpu"], "hardware: expected one of a100-40, "),
        (["{model}:make", "--precision", "int4"], "invalid choice: 'int4'"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each names what is wrong, nothing runs, and the status is 2."""
    for name, text in {"model": MODEL, "broken": "import nowhere", "odd": ODD}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked")
    (tmp_path / "locked").write_text("")
    paths = {name: tmp_path / f"{name}.py" for name in ("model", "broken", "odd")} | {"folder": tmp_path}
    try:
        status = main(["compare", *(each.format(**paths) for each in options)])
    except SystemExit as error:  # as argparse ends the program
        status = error.code  # type: ignore[assignment]  # a number here
    printed = capsys.readouterr()
    assert status == 2 and message in printed.err.splitlines()[-1] and not printed.out
    assert not any("Traceback" in line for line in printed.err.splitlines())


FILE = """
from __future__ import annotations

import pickle
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

assert __name__ != "__main__"


@dataclass
class Shape:
    width: int = 4


class Model(nn.Module):
    def forward(self, x):
        return F.relu(x) * Shape().width


def make():
    return pickle.loads(pickle.dumps(Model()))
"""


def test_a_file_is_a_module(tmp_path: Path) -> None:
    """Its models can be compiled, where forwards read the file's names, and pickled; it may have dataclasses."""
    (tmp_path / "my model.py").write_text(FILE)
    model = load_factory(f"{tmp_path}/my model.py:make")[0]()
    compiled = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]


def test_torchrun_has_the_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number is refused."""
    (tmp_path / "model.py").write_text(MODEL)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert main(["compare", f"{tmp_path}/model.py:make", "--ranks", "2", "--device", "cpu"]) == 2
    assert "--ranks 2: expected 4, as torchrun has started; leave it out" in capsys.readouterr().err


def turn(seconds: list[float], losses: list[float], first: float | None = None) -> Turn:
    return Turn(seconds, losses, first, 1000, "tokens", 10)


def test_rows() -> None:
    """Median and spread are of all steps; losses go on where processes do, and are compared where ranks share them."""
    turns = [turn([0.1, 0.3], [2.0, 1.0], 5.0), turn([0.2, 0.2], [0.5])]
    eager, again = (Row.of("eager", turns, None, 0.1, again) for again in (False, True))
    assert (eager.step, eager.low, eager.high, eager.first, eager.speed) == (0.2, 0.1, 0.3, 5.0, 50.0)
    assert eager.losses == (2.0, 1.0, 0.5) and again.losses == (2.0, 1.0)
    other = Row.of("compiled", [turn([0.1], [2.0, 1.1, 0.5], 1.0)], None, None, False)
    alone = Row.of("unsharded", [turn([0.1], [7.0, 7.0, 7.0], 1.0)], None, None, False)
    failed = Row.of("fsdp2", [], "ValueError: <no>", None, False)
    found = Comparison({"model": "<M>", "precision": "fp32"}, (eager, other, failed, alone), "predicted for cpu")
    assert [found.apart(row) for row in found.ran] == [None, pytest.approx(0.1), None]
    assert [text.partition(":")[0] for text in found.differences()] == [
        "losses of compiled differ by up to 10.0% from those above"
    ]
    text = str(found)
    assert "fsdp2 failed: ValueError: <no>" in text and "predicted for cpu" in text
    assert json.loads(found.to_json())["rows"][1]["apart"] == pytest.approx(0.1)
    none = Comparison({"model": "M", "precision": "fp32"}, (failed,))
    assert "fsdp2 failed" in str(none)


class _Fails(Running):
    def __init__(self, system: str, *_: Any) -> None:
        raise Failed(REASONS[system])


REASONS: dict[str, str] = {}


def test_the_same_failure_twice_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that no system can train is one line, after two of them; different failures are rows."""
    monkeypatch.setattr("fsdp_compile.compare.rounds.Running", _Fails)
    launched = Launch((0,), 1, "", None, 0)  # type: ignore[arg-type]  # nothing starts
    REASONS.update(dict.fromkeys(COMPARED, "IndexError: no"))
    with (
        Side(COMPARED, "m.py:make", nn.Identity, task(), launched) as side,
        pytest.raises(ValueError, match=r"m.py:make: no system can train it: IndexError: no"),
    ):
        side.run(2, 1)
    assert list(side.failed) == ["eager", "compiled"]
    REASONS["compiled"] = "ValueError: another"
    with Side(COMPARED, "m.py:make", nn.Identity, task(), launched) as side:
        side.run(2, 1)
    assert side.failed == REASONS


def test_each_system_has_a_prediction() -> None:
    """By the setting that it is; one name more or less is noticed."""
    assert tuple(SYSTEMS) == COMPARED

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))

    def inputs(batch: int, sequence: int) -> tuple[torch.Tensor]:
        return (torch.ones(batch * sequence, 64),)

    found, note = predict(make, inputs, task(), 2, list(SYSTEMS), lambda: reported_device("cpu", 0))
    assert note == "predicted for cpu"
    assert [each.setting.world_size for each in found.values()] == [2, 2, 2, 2, 2, 2, 1]
    assert found["unsharded"].step < found["compiled"].step and all(each.step > 0 for each in found.values())
    assert reported_device("NVIDIA H100 80GB HBM3", 80 << 30).name == "h100-80"
    with pytest.raises(ValueError, match="there is none for 'Some GPU'"):
        reported_device("Some GPU", 1)


class _Takes(nn.Module):
    def __init__(self, known: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(known, 4)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens).sum() + targets.sum()


def test_what_a_model_is_given() -> None:
    """Tokens that its embedding knows, and the next one as target; zeros for predictions; the file's own inputs."""
    (ids, targets), named = batch_of(_Takes(5), None, 2, 64, draws=True)
    assert ids.shape == (2, 64) and int(ids.max()) == 4 and torch.equal(targets, ids.roll(-1, 1)) and named == {}
    (zeros, _), _ = batch_of(_Takes(5), None, 2, 64)
    assert not zeros.any()
    assert batch_of(_Takes(5), lambda batch, sequence: (batch, sequence), 2, 3) == ([2, 3], {})
