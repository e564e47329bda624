"""`fsdp-compile checkpoint`: from every format to every other, bit for bit, with bounded memory and clear errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import fsdp_compile
from fsdp_compile import checkpoint
from fsdp_compile.checkpoint import hugging_face
from fsdp_compile.checkpoint.convert import convert, open_source
from fsdp_compile.tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model() -> dict[str, Tensor]:
    """Tensors of odd shapes and several dtypes, and views that are computed when they are read."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(60, generator=generator)
    complexes = torch.randn(3, 4, dtype=torch.complex64, generator=generator)
    return {
        "block.weight": numbers.view(5, 12),
        "block.turned": numbers.view(6, 10).t(),
        "low": numbers.bfloat16()[:7],
        "scalar": numbers[3].clone(),
        "none": numbers[:0].view(0, 4),
        "count": torch.arange(4),
        "conjugate": complexes.conj(),
        "negative": complexes.clone().conj().imag,
    }


def state() -> dict[str, Any]:
    """A model beside nested tensors, and values that are no tensors."""
    return {
        "model": model(),
        "optimizer": {"state": {"block.weight": {"m": torch.ones(5, 12)}}, "param_groups": [{"lr": 0.1}, {"lr": 0.2}]},
        "rng": [torch.arange(3), torch.arange(4)],
        "epoch": 3,
    }


def equal(found: Any, expected: Any) -> bool:
    """Whether nested states are the same, bit for bit."""
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return found == expected


def run(*arguments: Any) -> int:
    """The command's exit status."""
    return main(["checkpoint", *map(str, arguments)])


def write(path: Path, what: str) -> None:
    """Write `state()`, or the model for safetensors, in a format, without our code where that is possible."""
    if what == "torch":
        torch.save(state(), path)
    elif what == "safetensors":
        path.mkdir()
        save_file(
            {name: t.clone().resolve_conj().resolve_neg().contiguous() for name, t in model().items()},
            path / "model.safetensors",
        )
    elif what == "dcp":
        dcp.save(state(), checkpoint_id=path)
    else:
        checkpoint.save(state(), path, 7)


def load(path: Path, what: str, like: dict[str, Any]) -> dict[str, Any]:
    """Read it back, without our code where that is possible."""
    if what == "torch":
        return torch.load(path)
    if what == "safetensors":
        return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}
    dcp.load(like, checkpoint_id=path)
    checkpoint.load(like, path)
    return like


def blank(tree: Any) -> Any:
    """The same nested state with zeros."""
    if isinstance(tree, dict):
        return {key: blank(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [blank(value) for value in tree]
    return torch.zeros_like(tree) if isinstance(tree, Tensor) else None


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
@pytest.mark.parametrize("source", ["ours", "dcp", "safetensors", "torch"])
def test_every_format_to_every_other(tmp_path: Path, source: str, to: str) -> None:
    """Nested states stay what they are; safetensors has the model alone, under the model's own names."""
    write(tmp_path / "a", source)
    assert run("convert", tmp_path / "a", tmp_path / "b", "--format", to) == 0
    expected: dict[str, Any] = model() if "safetensors" in (source, to) else state()
    if source == "safetensors" and to == "torch":
        assert equal(load(tmp_path / "b", to, {}), model())  # names with dots are names, not paths
    else:
        assert equal(load(tmp_path / "b", to, blank(expected)), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("source", ["ours", "torch"])
def test_tied_tensors_are_written_once(tmp_path: Path, source: str) -> None:
    """A tensor of two names takes its bytes once in every format; safetensors has the first name, the others both."""
    weight = torch.randn(100, 30, generator=torch.Generator().manual_seed(0))
    state = {
        "model": {"tokens.weight": weight, "norm.weight": torch.ones(5), "head.weight": weight, "turned": weight.t()}
    }
    if source == "ours":
        dcp.save(state, storage_writer=checkpoint.DirectoryWriter(tmp_path / "a", 3))
    else:
        torch.save(state, tmp_path / "a")
    ways = [("a", "dcp"), ("dcp", "dcp_again"), ("a", "torch"), ("torch", "torch_again"), ("a", "safetensors")]
    for begin, end in ways:
        assert run("convert", tmp_path / begin, tmp_path / end, "--format", end.removesuffix("_again")) == 0
        files = [path for path in (tmp_path / end, *(tmp_path / end).rglob("*")) if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 2.9 * weight.nbytes, "tied once, and a transposed copy"
    assert open_source(tmp_path / "a").tied == {"model.head.weight": "model.tokens.weight"}
    like = blank(state)
    for path in ("dcp", "dcp_again"):
        assert equal(load(tmp_path / path, "dcp", like), state)
    found = torch.load(tmp_path / "torch_again")["model"]
    assert equal(found, state["model"]) and found["head.weight"].data_ptr() == found["tokens.weight"].data_ptr()
    file = tmp_path / "safetensors" / "model.safetensors"
    assert load_file(file).keys() == {"tokens.weight", "norm.weight", "turned"}
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "tokens.weight"}


def test_files_of_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a limit, as those of `save_safetensors`; `--world-size` is told to be of no effect."""
    write(tmp_path / "a", "ours")
    monkeypatch.setattr(hugging_face, "MOST", 300)
    assert run("convert", tmp_path / "a", tmp_path / "b", "--format", "safetensors", "--world-size", "9") == 0
    assert len([*(tmp_path / "b").glob("model-*-of-00003.safetensors")]) == 3
    assert equal(load(tmp_path / "b", "safetensors", {}), model())


def test_part(tmp_path: Path) -> None:
    """`--part` takes what lies under one key, in any format; an unknown one is refused with those that exist."""
    write(tmp_path / "a", "dcp")
    assert run("convert", tmp_path / "a", tmp_path / "b", "--format", "torch", "--part", "optimizer") == 0
    assert equal(torch.load(tmp_path / "b"), state()["optimizer"])


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names, dtypes, shapes, bytes, the step, and what is no tensor."""
    write(tmp_path / "a", "ours")
    assert run("show", tmp_path / "a") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model.block.weight", "float32", "5", "x", "12", "240"] in lines
    assert ["model.low", "bfloat16", "7", "14"] in lines
    assert ["model.scalar", "float32", "()", "4"] in lines
    assert ["other", "values:", *["optimizer.param_groups.0.lr,", "optimizer.param_groups.1.lr,", "epoch"]] in lines
    last = "11 tensors, 970 bytes, step 7, torch.distributed.checkpoint in 1 file(s)"
    assert lines[-1] == last.split()
    for what, end in (("torch", "torch.save"), ("safetensors", "safetensors")):
        write(tmp_path / what, what)
        assert run("show", tmp_path / what) == 0
        assert f"step not known, {end} in 1 file(s)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["show", "missing"], 2, "found no such file"),
        (["show", "text"], 1, "expected a file of safetensors"),
        (["show", "empty"], 2, "found none of these"),
        (["show", "list"], 1, "expected a torch.save of a dict, found list"),
        (["convert", "a", "text", "--format", "torch"], 2, "text: expected a path that does not exist yet"),
        (["convert", "a", "b", "--format", "dcp", "--part", "x"], 2, "part 'x': expected one of model, optimizer, rng"),
        (["convert", "truncated", "b", "--format", "dcp"], 1, "truncated/__0_0.distcp, with .*: expected"),
        (
            ["convert", "altered", "b", "--format", "dcp"],
            1,
            r"altered/__0_0.distcp, with model\.block\.weight: ",
        ),
    ],
)
def test_errors(
    tmp_path: Path, arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One line that says what was expected and found, status 2 for what was asked, 1 for files; nothing is left."""
    monkeypatch.chdir(tmp_path)
    write(Path("a"), "ours")
    Path("text").write_text("text")
    Path("empty").mkdir()
    torch.save([1], "list")
    for name in ("truncated", "altered"):
        Path("a", "step-00000007").rename(name) if name == "truncated" else write(Path("c"), "ours")
    os.rename("c/step-00000007", "altered")
    os.truncate("truncated/__0_0.distcp", 1000)
    segments = json.loads(Path("altered/manifest.json").read_text())["manifest"]["files"]["__0_0.distcp"]
    with open("altered/__0_0.distcp", "r+b") as file:
        file.seek(next(start for name, start, *_ in segments if name == "model.block.weight") + 700)
        file.write(b"?")
    write(Path("a"), "ours")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run(*arguments) == status
    error = capsys.readouterr().err
    assert error.startswith("fsdp-compile: error: ") and error.count("\n") == 1
    assert re.search(said, error), error
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
def test_files_are_closed_after_an_error(tmp_path: Path, to: str) -> None:
    """Of what was being written nothing stays, neither open nor on the disk."""
    write(tmp_path / "a", "torch")

    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    source = open_source(tmp_path / "a")
    source.read = fail
    with pytest.raises(OSError, match="No space left") as caught:  # holds the frames, and so what they have open
        convert(source, tmp_path / "b", to)
    assert not [path for path in Path("/proc/self/fd").iterdir() if "/.b." in os.path.realpath(path)], caught
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


CONVERT = ["checkpoint", "convert", "a", "b"]


@pytest.mark.parametrize(
    "arguments",
    [[], ["checkpoint"], CONVERT, [*CONVERT, "--format", "zip"], [*CONVERT, "--format", "dcp", "--world-size", "0"]],
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments that make no sense end with status 2 and a line on how to use it."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: fsdp-compile" in capsys.readouterr().err


_MEASURE = """
import ctypes, sys, torch
import fsdp_compile
from fsdp_compile import checkpoint
from fsdp_compile.tools.cli import main

def resident(what):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what))

ctypes.CDLL(None).mallopt(-3, 65536)  # large blocks go back to the system at once: what is counted is what is held
for name, count in ("small", 1), ("large", 1 << 22):
    checkpoint.save({str(n): torch.full((count,), float(n)) for n in range(4)}, name, 0)
    source = name
    for number, to in enumerate(("safetensors", "dcp")):
        open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
        before = resident("VmRSS")
        assert main(["checkpoint", "convert", source, f"{name}{number}", "--format", to]) == 0
        print("grew", to, resident("VmHWM") - before)
        source = f"{name}{number}"
"""


def test_memory_is_bounded_by_a_tensor(tmp_path: Path) -> None:
    """Converting 4 tensors of 16 MiB takes one of them, and one of its chunks while it is read.

    From one chunk each to safetensors, from there to DCP. Resident memory.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(fsdp_compile.__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "-c", _MEASURE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    grew = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("grew")]
    tensors = [(to, int(size) / (1 << 24)) for to, size in grew][2:]
    assert [to for to, _ in tensors] == ["safetensors", "dcp"]
    assert all(0.9 <= count <= 2.25 for _, count in tensors), tensors
