"""The commands `explain` and `calibrate`: what they print and write, and what they refuse."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_compile import explain
from fsdp_compile.passes.cost.hardware import device, to_json
from fsdp_compile.tools.cli import main

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def make():
    return Tiny()

def on_a_gpu():
    return Tiny().to("cuda")

def fails():
    raise RuntimeError("no such checkpoint")

def makes_a_list():
    return [1]
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "tiny.py").write_text(MODEL)
    return str(tmp_path / "tiny.py")


def test_command(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One prediction for each combination is printed, and written as JSON and trace."""
    written = {name: tmp_path / f"step.{name}" for name in ("json", "trace")}
    options = [text for name, path in written.items() for text in (f"--{name}", str(path))]
    assert main(["explain", f"{model}:make", "--gpus", "8,64", "--batch", "1,2", "--seq", "128", *options]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Tiny, ") and " in 4 settings\n" in printed and "tokens/s per GPU, MFU" in printed
    made = json.loads(written["json"].read_text())["predictions"]
    shown = [(each["setting"]["world_size"], each["setting"]["batch"]) for each in made]
    assert shown == [(8, 1), (8, 2), (64, 1), (64, 2)]
    assert made[0]["parameters"] == 256 * 64 + 64 * 256 + 256 + 3 * (2 * 64 + 64 * 192 + 192 + 64 * 64 + 64)
    for each in made:
        assert each["step"] == pytest.approx(sum(each[part] for part in ("forward", "backward", "update", "exposed")))
    assert json.loads(written["trace"].read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{model}:make", "--hardware", "h1000"], "expected one of a100-40, "),
        (["{model}:make", "--gpus", "-8"], "--gpus: expected a whole number of at least 1, found '-8'"),
        (["{model}:make", "--batch", "1,x"], "--batch: expected a whole number of at least 1, found 'x'"),
        (["{model}:make", "--seq", "0"], "--seq: expected a whole number of at least 1, found '0'"),
        (["{model}:make", "--strategy", "ZERO3"], "--strategy: expected one of FULL_SHARD, "),
        (["{model}:make", "--checkpointing", "some"], "checkpointing: expected one of none, full, "),
        (["{model}:make", "--precision", "int4"], "--precision: expected one of fp32, "),
        (["{model}:make", "--shard-size", "3"], "shard_size: expected a divisor of world_size 8, found 3"),
        (
            ["{model}:make", "--hardware", "{nan}"],
            "chain_efficiency: expected a finite number above 0, found nan",
        ),
        (["{model}:make", "--trace", "{model}.d/step.trace"], "expected its folder to exist, found none"),
        (["{model}x:make"], "expected a Python file, found none"),
        (["{model}:fails"], "it raised RuntimeError: no such checkpoint"),
        (["{model}:makes_a_list"], "expected a function that makes a module, found one that makes list"),
        (["{model}:on_a_gpu"], "model: expected "),
        (["--runs", "{model}"], "unrecognized arguments: --runs"),
        ([], "FILE.py:FUNCTION: name the file and the function that makes the model"),
    ],
)
def test_bad_input(
    options: list[str], message: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What makes no sense is one line that names it, with status 2, and nothing is written."""
    nan = tmp_path / "nan.json"
    text = to_json(device("h100-80"))
    at = text.index('"value"', text.index('"chain_efficiency"'))
    nan.write_text(text[:at] + '"value": NaN' + text[text.index(",", at) :])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    given = [each.format(model=model, nan=nan) for each in options]
    try:
        status = main(["explain", *given])
    except SystemExit as error:  # as argparse ends the program
        status = error.code  # type: ignore[assignment]  # a number here
    printed = capsys.readouterr()
    assert status == 2 and message in printed.err.splitlines()[-1] and not printed.out
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


class _Block(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(64, 64), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.linear(x)
        return x


def test_forwards_of_instances() -> None:
    """Blocks whose instances have a forward of their own, as wrappers of modules set it, are traced with that one."""

    def wrapped() -> nn.Module:
        blocks = [_Block(1) for _ in range(3)]
        for each in blocks:
            each.forward = lambda x, each=each: each.linear(each.linear(x))
        return nn.Sequential(*blocks)

    def inputs(batch: int, sequence: int) -> tuple[torch.Tensor]:
        return (torch.ones(batch, 64),)

    steps = [
        explain(make, inputs, world_size=8, batch=4, sequence=1, alternatives=False).predictions[0].step
        for make in (wrapped, lambda: nn.Sequential(*(_Block(2) for _ in range(3))))
    ]
    assert steps[0] == steps[1]


def test_model_stays_as_it_is() -> None:
    """A model that is passed in is not changed, and an option that is no field is a TypeError."""
    made = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    before = [(name, id(each), each.data_ptr(), each.clone()) for name, each in made.named_parameters()]
    explained = explain(made, lambda batch, sequence: (torch.ones(batch, 16),), world_size=[4, 8], batch=4, sequence=1)
    assert [each.setting.world_size for each in explained.predictions] == [4, 8]
    after = [(name, id(each), each.data_ptr(), each) for name, each in made.named_parameters()]
    assert all(a[:3] == b[:3] and torch.equal(a[3], b[3]) for a, b in zip(before, after, strict=True))
    assert type(made) is nn.Sequential
    with pytest.raises(TypeError, match="batches: expected one of world_size, batch, "):
        explain(made, world_size=8, batches=4)
    with pytest.raises(ValueError, match="world_size: expected a whole number of at least 1, found -8"):
        explain(made, world_size=-8)
    with pytest.raises(ValueError, match="batch: expected at least one value, found none"):
        explain(made, world_size=8, batch=[])
