"""Saving and loading between real ranks: models with optimizers, the example that goes on, ranks that fail or die."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MLP, Stack, mlp
from torch import nn

from fsdp_compile import FullyShardedDataParallel, checkpoint, fully_shard
from fsdp_compile.checkpoint.convert import open_source

from ..ranks import Ranks, RanksFailed, on_ranks
from ..training import (
    OPTIMIZERS,
    assert_bitwise,
    backward,
    build,
    executor,
    follow,
    full_parameters,
    local,
    mine,
    reference_and_model,
)

EXAMPLES = Path(__file__).parents[3] / "examples"


def trained(steps: int, first: int = 0, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model and AdamW after some steps."""
    model = fully_shard(build(MLP, seed))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, range(first, first + steps))
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    """A step on the batch of each seed."""
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, MLP, mine(MLP, seed))
        optimizer.step()


# --- models and optimizers --------------------------------------------------------------------------------------------


def _goes_on(rank: int, root: Path) -> None:
    model, optimizer = trained(2)
    checkpoint.save({"model": model, "optimizer": optimizer, "note": "here"}, root, 2)
    other, other_optimizer = trained(1, first=50, seed=1)
    state = {"model": other, "optimizer": other_optimizer, "note": None}
    assert checkpoint.load(state, root) == 2 and state["note"] == "here"
    assert state["model"] is other
    for each, opt in ((model, optimizer), (other, other_optimizer)):
        train(each, opt, range(2, 5))
    assert_bitwise(model, other, "after a resume")
    with pytest.raises(ValueError, match=r"state\['optimizer'\]: no model in state has all"):
        checkpoint.save({"optimizer": optimizer}, root, 3)


class _Scaled(nn.Module):
    """A parameter of shape (), whose optimizer state is all of shape () too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(7, 5), nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


@on_ranks(2)
def test_a_scalar_goes_on(tmp_path: Path) -> None:
    """State of a parameter of shape () is loaded by the rank that stores it, without the others."""
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = fully_shard(_Scaled())
        optimizer = torch.optim.NAdam(model.parameters())  # has scalars beside the count of steps
        model(torch.randn(3, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append({"model": model, "optimizer": optimizer})
    checkpoint.save(states[0], tmp_path, 1)
    checkpoint.load(states[1], tmp_path)
    found, expected = (state["optimizer"].state.values() for state in reversed(states))
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(local(one[key]), local(other[key])) for key in one)
        assert all(one[key].shape == other[key].shape for key in one)
    assert_bitwise(states[0]["model"], states[1]["model"], "after a resume")


def test_training_goes_on_bit_for_bit(two: Ranks, tmp_path: Path) -> None:
    """A model and its AdamW, named in one dict, train on as if nothing had happened; names are the original ones."""
    two.run(_goes_on, tmp_path)
    source = open_source(tmp_path)
    shapes = {name: tuple(param.shape) for name, param in build(MLP).named_parameters()}
    assert {name: source.tensors[f"model.{name}"].shape for name in shapes} == shapes
    assert {name: source.tensors[f"optimizer.state.{name}.exp_avg"].shape for name in shapes} == shapes


def _ends_side_by_side() -> Stack:
    """Both ends are registered before the blocks."""
    model = mlp()
    blocks = model.blocks
    del model.blocks
    model.blocks = blocks
    return model


@pytest.mark.nightly
@on_ranks(2)
def test_other_flat_parameters(tmp_path: Path) -> None:
    """Where both ends are large and side by side, each has a flat parameter; it trains as unsharded, and a checkpoint
    of one division loads into another."""
    case = replace(MLP, build=_ends_side_by_side)
    for how in ("eager", "aot_eager"):
        models = []
        for large, flats in ((2**22, 1), (2**5, 2)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("fsdp_compile.construct.units._worth_a_collective", lambda device, large=large: large)
                reference, model = reference_and_model(case)
            assert [len(unit.flats) for unit in model._fsdp.units] == [flats]
            follow(executor(model, how), reference, case)
            models.append(model)
        train(models[0], OPTIMIZERS["adamw"](models[0].parameters()), range(1))
        for saved, loaded in (models, models[::-1]):
            checkpoint.save({"model": saved}, tmp_path, 1)
            checkpoint.load({"model": loaded}, tmp_path)
            expected = full_parameters(saved)
            assert all(torch.equal(full, expected[name]) for name, full in full_parameters(loaded).items())
            train(loaded, OPTIMIZERS["adamw"](loaded.parameters()), range(1))


@on_ranks(2)
def test_wrappers_have_the_same_names(tmp_path: Path) -> None:
    """What `fully_shard` saved a compiled `FullyShardedDataParallel`, divided into other units, loads and trains on."""
    model, optimizer = trained(2)
    checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path, 2)
    wrapper = FullyShardedDataParallel(build(MLP, 1))
    other = torch.compile(wrapper, backend="eager")
    other_optimizer = OPTIMIZERS["adamw"](wrapper.parameters())
    checkpoint.load({"model": other, "optimizer": other_optimizer}, tmp_path)
    train(model, optimizer, range(2, 4))
    train(wrapper, other_optimizer, range(2, 4))
    expected, found = full_parameters(model), full_parameters(wrapper)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[f"_fsdp_wrapped_module.{name}"], tensor, rtol=1e-6, atol=1e-7)


# --- the example ------------------------------------------------------------------------------------------------------


def _example(rank: int, folder: Path, steps: int, resume: bool, compiled: bool) -> list[float]:
    sys.path.insert(0, str(EXAMPLES))
    import gpt
    import train_gpt

    args = argparse.Namespace(
        steps=steps, batch=2, layers=2, lr=1e-3, seed=0, backend="aot_eager", bf16=False, checkpointing=False,
        warmup=4, save=folder, every=2, resume=resume,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        small = gpt.GPTConfig(context=8, layers=2, heads=2, dim=20)
        patch.setattr(train_gpt, "GPTConfig", lambda **_: small)
        text = torch.arange(4096).to(torch.uint8)
        mean = train_gpt.mean_over_ranks
        patch.setattr(train_gpt, "mean_over_ranks", lambda loss: mean(loss + 0 * torch.rand(1 + rank)[0]))  # draws
        run = train_gpt.train(compiled, text, args, torch.device("cpu"))
    return run.losses


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_example_resumes_bit_for_bit(two: Ranks, tmp_path: Path, compiled: bool) -> None:
    """Stopped after 4 of 7 steps, the example goes on with the losses, weights, moments, schedule, batches and random
    numbers that it would have had, bit for bit."""
    pytest.importorskip("matplotlib", reason="the example draws its curves with it")
    uninterrupted = two.run(_example, tmp_path / "uninterrupted", 7, False, compiled)
    two.run(_example, tmp_path / "resumed", 4, False, compiled)
    resumed = two.run(_example, tmp_path / "resumed", 7, True, compiled)
    assert resumed == uninterrupted and len(resumed[0]) == 7
    label = "compiled" if compiled else "eager"
    a, b = (open_source(tmp_path / name / label) for name in ("uninterrupted", "resumed"))
    assert a.step == b.step == 7 and a.keys.keys() == b.keys.keys()
    for name in a.tensors:
        assert torch.equal(a.read(name), b.read(name)), name
    assert not torch.equal(a.read("random.rank0"), a.read("random.rank1"))
    same = [name for name in a.values if "run.seconds" not in name]
    assert {name: a.read(name) for name in same} == {name: b.read(name) for name in same}
    assert {"optimizer.state.tokens.weight.exp_avg", "batches.generator", "random.rank1"} <= a.tensors.keys()
    assert "scheduler.last_epoch" in same and "run.losses" in same


# --- ranks that fail or die -------------------------------------------------------------------------------------------


class _Counter:
    """Refuses on rank 1 what it has saved."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.rank == 1:
            raise KeyError("total")


@on_ranks(2)
def test_an_error_of_one_rank_is_an_error_of_all(rank: int, tmp_path: Path) -> None:
    """Saving: nothing is left of it. Loading: all know the file and the tensor, also where the file was not read."""
    model, _ = trained(0)
    checkpoint.save({"model": model}, tmp_path, 1)

    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(torch, "save", fail)
        with pytest.raises(checkpoint.CheckpointError, match=r"saving step 2 in .*: rank 1: .*No space left"):
            checkpoint.save({"model": model}, tmp_path, 2)
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    with open(tmp_path / "step-00000001" / "__1_0.distcp", "r+b") as file:
        file.seek(700)
        file.write(bytes([1 + rank]))
    dist.barrier()
    with pytest.raises(checkpoint.CheckpointError, match=r"rank 1: .*__1_0.distcp, with model\..*: its bytes are not"):
        checkpoint.load({"model": model}, tmp_path)
    with pytest.raises(FileNotFoundError, match="expected a checkpoint of step 9, found steps: 1"):
        checkpoint.load({"model": model}, tmp_path, 9)


@on_ranks(2)
def test_a_state_that_one_rank_refuses(rank: int, tmp_path: Path) -> None:
    """Where `load_state_dict` raises on one rank, at the end of loading, all ranks raise at once and name it."""
    state = {"counter": _Counter(rank), "note": "here"}
    checkpoint.save(state, tmp_path, 1)
    with pytest.raises(checkpoint.CheckpointError, match=r"loading .*step-00000001: rank 1: 'total'$"):
        checkpoint.load(state, tmp_path)


def _dies(rank: int, root: Path) -> None:
    model, _ = trained(0)
    checkpoint.save({"model": model}, root, 1)
    if rank == 1:
        torch.save = lambda *_: os._exit(9)  # the rank dies there
    checkpoint.save({"model": model}, root, 2)


def test_a_rank_that_dies(two: Ranks, tmp_path: Path) -> None:
    """The other raises soon; the checkpoint that was being written is never seen, and the next save removes it."""
    with pytest.raises(RanksFailed, match="the process died with exit code 9") as failed:
        two.run(_dies, tmp_path)
    assert "rank 0 in _dies:\nTraceback" in str(failed.value), "expected rank 0 to raise"
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    two.run(_goes_on, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


@on_ranks(2)
def test_buffers_of_one_rank_are_saved(rank: int, tmp_path: Path) -> None:
    """Of buffers that differ between ranks all are the first rank's: means, variances and counts belong together."""

    def make() -> nn.Module:
        blocks = (nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(3))
        return fully_shard(nn.Sequential(*blocks))

    model, loaded = make(), make()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(10 + rank)
    checkpoint.save({"model": model}, tmp_path, 1)
    checkpoint.load({"model": loaded}, tmp_path)
    assert {value for buffer in loaded.buffers() for value in buffer.flatten().tolist()} == {10.0}
    assert all((buffer == 10 + rank).all() for buffer in model.buffers())
