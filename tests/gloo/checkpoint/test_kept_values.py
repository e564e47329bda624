"""Values beside models and optimizers in checkpoints: what has grown or changed, and what each rank has alone."""

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_compile import checkpoint, fully_shard
from fsdp_compile.checkpoint import CheckpointError, PerRank

from ..ranks import Ranks, on_ranks


class Progress:
    """An object whose state is what it is given."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """What it has."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take all of it."""
        self.state = dict(state)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


SAVED = {
    "ints": {"shard-3": 120, "shard-7": 5},
    "numbers as keys": {3: 120, (1, 2): 5},
    "floats": [0.5, 0.25],
    "a tensor": torch.tensor(0.25),
    "tensors": {"w": torch.ones(3)},
    "a list of tensors": [torch.ones(2), torch.zeros(2)],
    "a tuple with tensors": (torch.ones(2), {"a": [torch.ones(1), "text"]}),
    "milestones": Counter({30: 1, 80: 2}),
    "ordered": OrderedDict(b=1, a=torch.ones(1)),
    "emptied": {},
    "emptied list": [],
    "shorter": [torch.ones(2)],
    "a number": 0.25,
    "grown": torch.arange(5.0),
    "within a list": [{}, {1: "x"}, []],
}
BEFORE = {
    **dict.fromkeys(SAVED, None),
    "ints": {},
    "numbers as keys": {3: 1},
    "floats": [],
    "a tensor": 1.5,
    "tensors": {},
    "milestones": Counter({30: 1}),
    "emptied": {"old": 1},
    "emptied list": [torch.ones(3)],
    "shorter": [torch.zeros(2), torch.zeros(2)],
    "a number": torch.tensor(1.0),
    "grown": torch.zeros(0),
}


@on_ranks(2)
def test_what_has_grown_or_changed(tmp_path: Path) -> None:
    """An object gets the state that was saved, whatever its own is at loading: names, kinds, types and keys."""
    checkpoint.save({"progress": Progress(**SAVED)}, tmp_path, 1)
    progress = Progress(**BEFORE)
    checkpoint.load({"progress": progress}, tmp_path)
    for name, value in SAVED.items():
        assert _same(progress.state[name], value), (name, progress.state[name], value)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0), [2, 2, 5])
    checkpoint.save({"scheduler": scheduler}, tmp_path, 2)
    checkpoint.load({"scheduler": scheduler}, tmp_path)
    assert scheduler.milestones == Counter({2: 2, 5: 1})


@on_ranks(2)
def test_values(tmp_path: Path) -> None:
    """Dicts, lists and tensors are changed in place, to what was saved; what does not fit is an error by name."""
    kept = torch.zeros(2)
    checkpoint.save(
        {"seen": {"a": 1, "b": {"c": 2}}, "log": [1.0, 2.0], "best": 0.25, "kept": torch.ones(2)}, tmp_path, 1
    )
    seen: dict[str, Any] = {"b": {}}
    state = {"seen": seen, "log": [], "best": torch.tensor(2.0), "kept": kept}
    checkpoint.load(state, tmp_path)
    assert state["seen"] is seen and seen == {"b": {"c": 2}, "a": 1}
    assert state["log"] == [1.0, 2.0] and state["best"] == 0.25
    assert state["kept"] is kept and kept.eq(1).all()
    dcp.save({"seen": {"a": 1}}, checkpoint_id=tmp_path / "plain")
    seen = {"b": {}}
    checkpoint.load({"seen": seen}, tmp_path, partial=True)
    assert seen == {"b": {}}
    with pytest.raises(
        FileNotFoundError, match=r"a folder of torch.distributed.checkpoint; .* checkpoint convert .* NEW"
    ):
        checkpoint.load({"seen": seen}, tmp_path / "plain")
    with pytest.raises(ValueError, match=r"found \['values_of_ranks'\], which checkpoints use themselves"):
        checkpoint.save({"values_of_ranks": 1}, tmp_path, 2)
    for wrong, said in (
        ({"seen": {"d": 0}}, r"state\['seen'\] has names that the checkpoint does not have: seen.d"),
        ({"kept": torch.zeros(3)}, r"kept: expected shape \(3,\), as in state, found \(2,\) in the checkpoint"),
        ({"note": 1}, "state has 'note', and the checkpoint has not: it has seen, log, best, kept"),
    ):
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(wrong, tmp_path)


class _Grows(nn.Module):
    """A layer with extra state."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(3, 3), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@on_ranks(2)
def test_models(tmp_path: Path) -> None:
    """Extra state may have grown; names on one side only, and values in the place of tensors, are errors by name.

    A sharded tensor that `state` does not have is loaded in full."""
    for index, (saved, here) in enumerate(
        [({"amax": torch.ones(4), "steps": {3: 1}}, {}), (torch.arange(6), torch.zeros(2)), ([], [torch.ones(1)])]
    ):
        checkpoint.save({"model": fully_shard(_Grows(saved))}, tmp_path, index)
        model = fully_shard(_Grows(here))
        checkpoint.load({"model": model}, tmp_path)
        assert _same(model.extra, saved), (model.extra, saved)
    larger = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    smaller = fully_shard(nn.Sequential(nn.Linear(3, 3)))
    optimizer = torch.optim.SGD(smaller.parameters(), 0.1)
    checkpoint.save({"model": fully_shard(larger), "opt": torch.optim.SGD(larger.parameters(), 0.1)}, tmp_path, 9)
    with pytest.raises(CheckpointError, match=r"names that state\['model'\] does not have: 1.w"):
        checkpoint.load({"model": smaller}, tmp_path)
    checkpoint.load({"model": smaller, "opt": optimizer}, tmp_path, partial=True)
    with pytest.raises(CheckpointError, match=r"'model'\] has names that the checkpoint does not have: 2.w"):
        checkpoint.load({"model": fully_shard(nn.Sequential(*larger, nn.Linear(3, 3)))}, tmp_path)
    for wrong in ([], 3, {"a": 1}):
        checkpoint.save({"model": {"0.weight": wrong, "0.bias": torch.ones(3)}}, tmp_path, 10)
        with pytest.raises(CheckpointError, match=r"model.0.weight: expected a tensor in the checkpoint"):
            checkpoint.load({"model": smaller}, tmp_path)
    wide = fully_shard(nn.Linear(7, 9)).weight.detach()
    checkpoint.save({"mean": {"w": wide}}, tmp_path, 11)
    mean: dict[str, Any] = {}
    checkpoint.load({"mean": mean}, tmp_path)
    assert torch.equal(mean["w"], wide.full_tensor())


def _save_by_rank(rank: int, root: Path) -> None:
    torch.manual_seed(100 + rank)
    sampler = Progress(
        seed=7, epoch=rank, order=[rank, 1], seen={f"shard-{rank}": {rank: 5}}, equal={"a": (1, "b" * 3)}
    )
    state = {"sampler": sampler, "rng": torch.get_rng_state(), "same": {"x": torch.ones(3), "y": [1, 2]}}
    state["explicit"] = {"rng": PerRank(torch.full((2,), float(rank))), "equal": PerRank("same")}
    checkpoint.save(state, root, 1)


def _load_by_rank(rank: int, root: Path, saved_by: int) -> None:
    world = dist.get_world_size()
    sampler, rng = Progress(seed=0, epoch=9), torch.get_rng_state()
    same = {"x": torch.zeros(3), "y": []}
    state = {"sampler": sampler, "rng": rng, "same": same}
    if world != saved_by:
        with pytest.raises(CheckpointError, match=r"rng differs between the 2 ranks .* checkpoint.PerRank\(value\)"):
            checkpoint.load({"rng": rng}, root)
        with pytest.raises(CheckpointError, match=r"sampler\..* differs between the 2 ranks"):
            checkpoint.load({"sampler": sampler}, root)
        checkpoint.load({"same": same}, root)
    else:
        checkpoint.load(state, root)
        torch.manual_seed(100 + rank)
        assert torch.equal(rng, torch.get_rng_state())
        expected = {"seed": 7, "epoch": rank, "order": [rank, 1], "seen": {f"shard-{rank}": {rank: 5}}}
        assert sampler.state == expected | {"equal": {"a": (1, "bbb")}}
    assert same["y"] == [1, 2] and same["x"].eq(1).all()
    mine: dict[str, Any] = {"rng": PerRank(None), "equal": PerRank(None)}
    of_all = PerRank(torch.zeros(1))
    checkpoint.load({"explicit": mine, "rng": of_all}, root)
    assert [int(value[0]) for value in mine["rng"].of_ranks] == list(range(saved_by))
    assert mine["equal"].of_ranks == ["same"] * saved_by
    if world == saved_by:
        assert mine["rng"].value.eq(rank).all() and torch.equal(of_all.value, rng)
    else:
        assert mine["rng"].value is None and of_all.value.eq(0).all() and len(of_all.of_ranks) == saved_by


def test_values_of_each_rank(two: Ranks, three: Ranks, tmp_path: Path) -> None:
    """Values and tensors that differ between ranks come back by rank; other ranks have to ask by `PerRank`."""
    two.run(_save_by_rank, tmp_path)
    two.run(_load_by_rank, tmp_path, 2)
    three.run(_load_by_rank, tmp_path, 2)


class _WithNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.nothing = nn.Linear(3, 3), nn.Parameter(torch.zeros(0, 4))


@on_ranks(2)
def test_a_tensor_without_elements(tmp_path: Path) -> None:
    """A sharded tensor without elements in a dict or list is saved and loaded."""
    model = fully_shard(_WithNothing())
    kept = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, tensors in (("dict", kept), ("list", list(kept.values()))):
        checkpoint.save({"kept": tensors, "model": model}, tmp_path / name, 1)
        empty = [torch.zeros_like(value) for value in kept.values()]
        found = dict(zip(kept, empty, strict=True)) if name == "dict" else empty
        checkpoint.load({"kept": found}, tmp_path / name)
        assert all(torch.equal(a, b) for a, b in zip(empty, kept.values(), strict=True))


@on_ranks(2)
def test_stages_of_a_pipeline(rank: int, tmp_path: Path) -> None:
    """Ranks with other layers save and load them under one key, with the groups of their optimizers."""

    def stage(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(10 * seed + rank)
        model = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3), "shared": nn.Linear(3, 3)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + rank)
        for param in model.parameters():
            param.grad = torch.full_like(param, float(seed + rank))
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        return model, optimizer

    model, optimizer = stage(0)
    checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path, 1)
    other, other_optimizer = stage(1)
    checkpoint.load({"model": other, "optimizer": other_optimizer}, tmp_path)
    assert other_optimizer.param_groups[0]["lr"] == (0.1 + rank) * 0.5
    assert torch.equal(other[f"layer{rank}"].weight, model[f"layer{rank}"].weight)
    found = other_optimizer.state[other[f"layer{rank}"].weight]
    assert torch.equal(found["exp_avg"], optimizer.state[model[f"layer{rank}"].weight]["exp_avg"])
    fewer = {"model": nn.ModuleDict({"shared": nn.Linear(3, 3), f"layer{2 * rank - 1}": nn.Linear(3, 3)})}
    if not rank:
        del fewer["model"]["layer-1"]
    with pytest.raises(CheckpointError, match=r"names that state\['model'\] does not have: layer0.weight, layer0.bias"):
        checkpoint.load(fewer, tmp_path)
