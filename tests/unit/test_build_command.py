"""The command `build`: what it refuses, before it compiles anything."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_compile.tools.cli import main

SCRIPT = """
from torch import nn

def make():
    return {made}

def example_inputs():
    return {inputs}
"""


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str, script: str = SCRIPT) -> str:
    """What the command says when it ends with status 2; no process group is left, and no folder written."""
    (folder / "train.py").write_text(script)
    there = set(folder.iterdir())
    threads = torch.get_num_threads()
    with mock.patch.dict(os.environ):
        status = main(["build", f"{folder}/train.py:make", f"{folder}/out", "--world-size", "2", *arguments])
    torch.set_num_threads(threads)
    assert status == 2 and not dist.is_initialized() and set(folder.iterdir()) == there
    return capsys.readouterr().err


def test_what_is_not_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files without inputs, functions that make no step, inputs of other types, and steps that compile nothing."""
    assert "expected a function example_inputs()" in refused(tmp_path, capsys, script="def make(): ...")
    for made, inputs, message in (
        ("None", "()", "expected a model or a function that runs a step, found NoneType"),
        ("nn.Linear(2, 2)", "1", "expected a tuple, a dict, or a pair of both, found int"),
        ("lambda: None", "()", "expected a step that Inductor compiles and can cache, found none"),
    ):
        assert message in refused(tmp_path, capsys, script=SCRIPT.format(made=made, inputs=inputs))


def test_where_it_cannot_compile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA without a GPU, artifacts that would be loaded, and a folder that exists."""
    if not torch.cuda.is_available():
        assert "--device cuda: expected a GPU here" in refused(tmp_path, capsys, "--device", "cuda")
    monkeypatch.setenv("FSDP_COMPILE_ARTIFACTS", "made")
    assert "FSDP_COMPILE_ARTIFACTS: expected it not to be set" in refused(tmp_path, capsys)
    (tmp_path / "out").mkdir()
    assert "expected a folder that does not exist yet" in refused(tmp_path, capsys)
