"""`fsdp-compile check`: what users write, and seeded faults, each of which it finds where it is."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compile import checkpoint, fully_shard
from fsdp_compile.compare.pool import run
from fsdp_compile.core import flat_collectives
from fsdp_compile.eager.unsharded import UnshardedUnit
from fsdp_compile.tools.check import Batch, assert_trains_alike, check
from fsdp_compile.tools.cli import main

from ..ranks import on_ranks

WIDTH = 8


class Block(nn.Module):
    """Modules of each kind: with parameters, with buffers, with neither; and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU()
        self.down, self.scale = nn.Linear(2 * WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH,), 0.9))

    def forward(self, x: Tensor) -> Tensor:  # (batch, width)
        return x + self.scale * self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # (batch, 4) -> (batch, 1)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(number: int) -> Batch:
    x = torch.randn(6, 4)
    return Batch((x,), target=x.sum(1, keepdim=True))


SMALL: dict[str, Any] = {"loss": F.mse_loss, "ways": ["eager"]}


# --- faults: each is a context, and what shards the model -----------------------------------------------------------


@contextmanager
def _gathers(name: str, change: Callable[[Tensor, dict[str, Tensor]], None]) -> Iterator[Any]:
    """After each all-gather of the unit with parameter `name`, its memory is changed."""
    wait, seen = UnshardedUnit.wait, dict[str, Tensor]()

    def waits(self: UnshardedUnit) -> None:
        filled = [buffer for buffer in self.buffers if buffer.filling]
        wait(self)
        for buffer in filled:
            for own, view in zip(buffer.flat.names, buffer.views(), strict=True):
                memory = torch.empty(0).set_(  # with a version counter of its own
                    view.untyped_storage(), view.storage_offset(), view.shape, view.stride()
                )
                if own == name:
                    change(memory, seen)
                seen.setdefault(own, memory.clone())

    # The first forwards compare what they have read with the shards, and would refuse these faults by another name.
    with (
        mock.patch.object(UnshardedUnit, "wait", waits),
        mock.patch.object(UnshardedUnit, "find_changed", lambda _: []),
    ):
        yield fully_shard


def _stale(memory: Tensor, seen: dict[str, Tensor]) -> None:
    memory.copy_(seen.get("blocks.1.up.weight", memory))


def _half_is_missing(memory: Tensor, seen: dict[str, Tensor]) -> None:
    memory[memory.shape[0] // 2 :] = 0


def _rounded(memory: Tensor, seen: dict[str, Tensor]) -> None:
    memory.copy_(memory.bfloat16())


@contextmanager
def _edits(edit: Callable[[Any], Any]) -> Iterator[Any]:
    """The sharded model is edited."""

    def shard(model: nn.Module) -> nn.Module:
        sharded = fully_shard(model)
        edit(sharded)
        return sharded

    yield shard


@contextmanager
def _left_out_reduce() -> Iterator[Any]:
    """The first of a backward's four reduces, that of the last block, leaves each rank with its own gradients."""
    start, calls = flat_collectives._start_reduce_scatter, count()

    def starts(packed: Tensor, *args: Any) -> tuple[Tensor, Callable[[], None]]:
        own = packed.chunk(dist.get_world_size())[dist.get_rank()].clone()
        part, wait = start(packed, *args)
        is_first = next(calls) % 4 == 0

        def waits() -> None:
            wait()
            if is_first:
                part.copy_(own)

        return part, waits

    with mock.patch.object(flat_collectives, "_start_reduce_scatter", starts):
        yield fully_shard


def _wrong_factor(model: Any) -> None:
    model.blocks[1].set_gradient_divide_factor(1.0)


def _loses_a_buffer(model: Any) -> None:
    norm = model.blocks[1].norm

    def lose(module: Any, *_: Any) -> None:
        module.running_mean.data.zero_()

    norm.register_forward_hook(lose)


def _forgets_a_micro_batch(model: Any) -> None:
    """The second forward, the first of two that are accumulated, leaves no gradient of one weight."""
    up, calls = model.blocks[1].up, count()
    up.forward = lambda x: F.linear(x, up.weight.detach() if next(calls) == 1 else up.weight, up.bias)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def _wrong_backward(model: Any) -> None:
    act = model.blocks[1].act
    forward = act.forward
    act.forward = lambda x: forward(_Doubled.apply(x))


@contextmanager
def _state_is_lost() -> Iterator[Any]:
    """A moment is zero after each update of the sharded model."""
    step = torch.optim.AdamW.step

    def steps(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        for param, state in self.state.items():
            if hasattr(param, "full_tensor") and param.shape == (2 * WIDTH, WIDTH):
                state["exp_avg_sq"].zero_()
                return

    with mock.patch.object(torch.optim.AdamW, "step", steps):
        yield fully_shard


@contextmanager
def _load_loses_a_parameter() -> Iterator[Any]:
    load = checkpoint.load

    def loads(state: Any, folder: Path) -> None:
        load(state, folder)
        with torch.no_grad():
            state["model"].blocks[2].scale.zero_()

    with mock.patch.object(checkpoint, "load", loads):
        yield fully_shard


def _miscompiles(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """aot_eager, but that in graphs of sharded models the last GELU has become a ReLU."""
    from torch._dynamo.backends.registry import lookup_backend

    gelus = [node for node in graph.graph.nodes if "gelu" in str(node.target)]
    if any("fsdp_flat" in str(node.target) for node in graph.graph.nodes) and gelus:
        gelus[-1].target, gelus[-1].kwargs = F.relu, {}
        graph.recompile()
    return lookup_backend("aot_eager")(graph, inputs)


@contextmanager
def _miscompiled() -> Iterator[Any]:
    from torch._dynamo.backends.registry import register_backend

    with suppress(AssertionError):  # an earlier test has
        register_backend(_miscompiles, "miscompiles")
    yield fully_shard


FAULTS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "a stale weight": (partial(_gathers, "blocks.1.up.weight", _stale), {}, "output of `blocks.1.up`"),
    "a wrong divide factor": (partial(_edits, _wrong_factor), {}, "gradient of blocks.1."),
    "a lost buffer": (partial(_edits, _loses_a_buffer), {}, "buffer blocks.1.norm.running_mean"),
    "a forgotten micro-batch": (partial(_edits, _forgets_a_micro_batch), {}, "gradient of blocks.1.up.weight"),
    "a wrong backward": (partial(_edits, _wrong_backward), {}, "gradient of the input of `blocks.1.act`"),
    "a lost moment": (_state_is_lost, {}, "exp_avg_sq of blocks.0.up.weight in the optimizer"),
    "a parameter that is not loaded": (_load_loses_a_parameter, {"resume_on": 2}, "parameter blocks.2.scale after"),
}  # fmt: skip
AT_NIGHT: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "a weight that is rounded": (partial(_gathers, "blocks.0.up.weight", _rounded), {}, "output of `blocks.0.up`"),
    "a block's own parameter": (partial(_gathers, "blocks.1.scale", _half_is_missing), {}, "output of `blocks.1`"),
    "a reduce that is left out": (_left_out_reduce, {}, "gradient of blocks.2."),
    "a wrong divide factor, compiled": (
        partial(_edits, _wrong_factor),
        {"ways": ["aot_eager"]},
        "gradient of blocks.1.",
    ),
    "a wrong graph": (_miscompiled, {"ways": ["miscompiles"]}, "output of `blocks.2.act`"),
    "a wrong graph of a block": (_miscompiled, {"ways": ["blocks:miscompiles"]}, "output of `blocks.0.act`"),
    "a wrong graph of a step": (_miscompiled, {"ways": ["step:miscompiles"]}, "output of `blocks.2.act`"),
}


@pytest.mark.parametrize("name", [*FAULTS, *(pytest.param(name, marks=pytest.mark.nightly) for name in AT_NIGHT)])
@on_ranks(2)
def test_a_seeded_fault(name: str) -> None:
    """The report names what differs first: a module's output, or a gradient, buffer, state or parameter.

    So it does where the model is compiled whole, by block, or with its step.
    """
    seed, options, what = (FAULTS | AT_NIGHT)[name]
    with seed() as shard:
        report = check(Net, batch, **{**SMALL, "shard": shard, "resume_on": 0, **options})
    [row] = report.faults
    print(row)
    assert row.fault is not None and str(row.fault.difference.key).startswith(what), str(report)
    assert not report.holds and what in str(report) and "expected" in str(row.fault) and not row.fault.note


FILE = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(F.gelu(self.linear(self.norm(x))))


def make():
    return nn.Sequential(*(Block() for _ in range(2)), nn.Linear(8, 1))


def example_inputs(batch, sequence):
    return (torch.randn(batch, sequence, 8),)


def loss(output):
    return output.square().mean()
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of ten lines is all that it needs. Dropout draws alike, other ranks load what two have saved, and the JSON
    has a row for each way. Each row was already said when it was known: who stops the command keeps it.
    """
    (tmp_path / "model.py").write_text(FILE)
    asked = ["check", f"{tmp_path}/model.py:make", "--ways", "eager", "--json", str(tmp_path / "check.json")]
    assert main(asked) == 0
    (printed, said), found = capsys.readouterr(), json.loads((tmp_path / "check.json").read_text())
    assert "equal bit for bit" in printed and "all hold" in printed and found["holds"]
    assert said.count("\neager ") == 1 and said.count("eager, loaded on 3 ") == 1 and "all hold" not in said
    assert [(row["ranks"], row["resumed"], row["verdict"]) for row in found["rows"]] == [
        (2, False, "equal"),
        (3, True, found["rows"][1]["verdict"]),
    ]
    assert found["rows"][1]["verdict"] in ("equal", "rounding") and found["where"]["model"] == "Sequential"


WRONG = (
    FILE
    + """

from fsdp_compile import fully_shard


def shard(model):
    model = fully_shard(model)
    model[1].set_gradient_divide_factor(1.0)
    return model
"""
)


@pytest.mark.nightly  # it starts processes three times
def test_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong way: exit status 1, and the gradient with both values. A model that does not train: 2, and a line."""
    (tmp_path / "model.py").write_text(WRONG)
    assert main(["check", f"{tmp_path}/model.py:make", "--ways", "eager", "--resume-on", "0"]) == 1
    assert re.search(r"rank \d: gradient of 1.\w+.\w+: expected .*, found ", capsys.readouterr().out)
    (tmp_path / "model.py").write_text(FILE.replace("Linear(8, 8)", "Linear(9, 8)"))
    assert main(["check", f"{tmp_path}/model.py:make", "--ways", "eager"]) == 2
    assert "the unsharded model cannot be trained" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["blocks", "aot_eager", "inductor", "blocks:inductor", "step"])
@on_ranks(2)
def test_ways(way: str) -> None:
    """Each way holds, with accumulation, and behind a load."""
    report = assert_trains_alike(Net, batch, loss=F.mse_loss, ways=[way])
    assert [row.resumed for row in report.rows] == [False, True]
    assert way.endswith("inductor") or all(row.verdict == "equal" for row in report.rows), str(report)


def _inexact_gelu(x: Tensor, **kwargs: Any) -> Tensor:
    return F.gelu(x, **kwargs) * (1 + 1e-5)


def _computes_inexactly(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """aot_eager with a rounding error that differs from that of eager mode in all steps, sharded or not."""
    from torch._dynamo.backends.registry import lookup_backend

    for node in graph.graph.nodes:
        if "gelu" in str(node.target):
            node.target = _inexact_gelu
    graph.recompile()
    return lookup_backend("aot_eager")(graph, inputs)


@pytest.mark.nightly
@on_ranks(2)
def test_rounding_that_adds_up() -> None:
    """What a compiler has rounded in the steps before a save is rounding after the load."""
    from torch._dynamo.backends.registry import register_backend

    register_backend(_computes_inexactly, "inexact")
    report = assert_trains_alike(Net, batch, loss=F.mse_loss, ways=["inexact"], steps=2)
    assert [row.verdict for row in report.rows] == ["rounding", "rounding"], str(report)


@on_ranks(2)
def test_a_way_that_fails() -> None:
    """It is a fault like another one, and the helper for tests raises with the report."""

    def shard(model: nn.Module) -> nn.Module:
        raise ArithmeticError("of the user's code")

    with pytest.raises(AssertionError, match="rank 0, 1: ArithmeticError: of the user's code"):
        assert_trains_alike(Net, [batch(0), batch(1)], loss=F.mse_loss, shard=shard, ways=["eager"])
    with pytest.raises(
        ValueError, match="resume_on: a process group of 2 ranks exists, expected 0 or as many, found 3"
    ):
        check(Net, batch, ways=["eager"], resume_on=3)


def test_ranks_that_end() -> None:
    """What a process says that cannot answer."""
    assert [each.error for each in run(2, "cpu", os._exit, 3)] == [f"rank {n} ended with exit status 3" for n in (0, 1)]
