"""Sharded models to and from Hugging Face folders: each rank writes what it holds and reads what it needs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODELS, Case, squared_error, vectors
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import checkpoint, fully_shard, summon_full_params
from fsdp_compile.checkpoint import hugging_face

from ..ranks import Ranks, on_ranks
from ..training import backward, build, full_parameters, local, mine, units


class Normed(nn.Module):
    """Buffers, a parameter that stays unsharded, one that is frozen, one in bfloat16, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.alone = nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)
        self.inner.bias.requires_grad_(False)
        self.low, self.none = nn.Parameter(torch.randn(3, 3).bfloat16()), nn.Parameter(torch.randn(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.alone(self.norm(self.inner(x)))


CASES = {"tied": MODELS["tied"], "conv": MODELS["conv"], "normed": Case(Normed, vectors, squared_error)}


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of each part of a tensor that is written, and of each that is read."""
    moved: list[int] = []

    def read(*given: Any, real: Any = HuggingFaceStorageReader._process_read_request) -> None:
        moved.append(math.prod(given[2].lengths) * given[3].resolve_tensor(given[2]).itemsize)
        real(*given)

    def write(part: Tensor, real: Any = hugging_face.bytes_of) -> Any:
        moved.append(part.nbytes)
        return real(part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HuggingFaceStorageReader, "_process_read_request", read)
        patch.setattr(hugging_face, "bytes_of", write)
        yield moved


def _sharded(name: str, strategy: str, seed: int) -> nn.Module:
    model = build(CASES[name], seed)
    options: dict[str, Any] = {"ignored_states": [model.alone]} if name == "normed" else {}
    if strategy == "IN_PAIRS":  # ranks store shards in another order
        return fully_shard(model, reshard_after_forward=2, **options)
    options |= {"devices_per_node": 2} if "HYBRID" in strategy else {}
    return fully_shard(model, sharding_strategy=ShardingStrategy[strategy], **options)


def _values(model: nn.Module) -> dict[str, Tensor]:
    """Full parameters and saved buffers."""
    return full_parameters(model) | dict(model.named_buffers())


def _stored(model: nn.Module) -> int:
    """Bytes that this rank stores of parameters and buffers."""
    return sum(local(tensor).nbytes for tensor in (*model.parameters(), *model.buffers()))


def _there_and_back(rank: int, folder: Path, name: str, strategies: list[str]) -> None:
    for source in strategies:
        root = folder / f"{name}_{source}"
        model = _sharded(name, source, 0)
        with counted() as written:
            checkpoint.save_safetensors(model, root, max_shard_size=3000)
        total = torch.tensor(sum(written))
        dist.all_reduce(total)
        found = {n: t for file in sorted(root.glob("*.safetensors")) for n, t in load_file(file).items()}
        expected = build(CASES[name]).state_dict()
        assert sum(written) <= _stored(model)
        assert total == sum(tensor.nbytes for tensor in found.values()), "each byte is written once"
        assert set(expected) - set(found) == ({"head.weight"} if name == "tied" else set())
        for key, tensor in found.items():
            assert tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key]), key
    for target in strategies:
        model = _sharded(name, target, 1)
        with counted() as read:
            checkpoint.load_safetensors(model, folder / f"{name}_{strategies[0]}")
        assert sum(read) == _stored(model), "each rank reads what it stores, and no other byte"
        for key, tensor in _values(model).items():
            assert torch.equal(tensor, expected[key]), (target, key)


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str, two: Ranks, tmp_path: Path) -> None:
    """From any strategy to any other, bit for bit; every byte is written by one rank and read by those who store it."""
    two.run(_there_and_back, tmp_path, name, ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])


def test_replicas_write_once(four: Ranks, tmp_path: Path) -> None:
    """Hybrid sharding: of the ranks that store the same shard one writes it; the order of shards does not matter."""
    four.run(_there_and_back, tmp_path, "tied", ["HYBRID_SHARD", "FULL_SHARD", "IN_PAIRS"])


@on_ranks(2)
def test_start_on_the_meta_device(tmp_path: Path) -> None:
    """A model that never had values gets them from the files, tied parameters too."""
    checkpoint.save_safetensors(_sharded("tied", "FULL_SHARD", 0), tmp_path)
    with torch.device("meta"):
        model = CASES["tied"].build()
    fully_shard(model, param_init_fn=lambda module: module.to_empty(device=torch.get_default_device(), recurse=False))
    checkpoint.load_safetensors(model, tmp_path)
    expected = build(CASES["tied"]).state_dict()
    for name, tensor in full_parameters(model).items():
        assert torch.equal(tensor, expected[name]), name


@on_ranks(2)
def test_loaded_between_steps(tmp_path: Path) -> None:
    """The next forward computes with what was loaded, also where parameters stayed unsharded since the last one."""
    case = MODELS["mlp"]
    checkpoint.save_safetensors(fully_shard(build(case)), tmp_path)
    model = fully_shard(build(case, 1), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    with model.no_sync():  # backward leaves what it gathered to the next forward
        backward(model, case, mine(case, 0))
    assert any(unit.kept is not None for unit in units(model))
    checkpoint.load_safetensors(model, tmp_path)
    assert backward(model, case, mine(case, 0)) == backward(build(case), case, mine(case, 0))
    with summon_full_params(model), pytest.raises(ValueError, match="leave summon_full_params"):
        checkpoint.save_safetensors(model, tmp_path)
    with summon_full_params(model), pytest.raises(ValueError, match="leave summon_full_params"):
        checkpoint.load_safetensors(model, tmp_path)


@on_ranks(2)
def test_one_rank_fails(rank: int, tmp_path: Path) -> None:
    """All ranks raise and name the rank that failed; what was exported before is complete."""
    model = fully_shard(build(MODELS["mlp"]))
    checkpoint.save_safetensors(model, tmp_path)

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(hugging_face, "bytes_of", fail)
        with pytest.raises(checkpoint.CheckpointError, match=r"rank 1: .*No space left"):
            checkpoint.save_safetensors(fully_shard(build(MODELS["mlp"], 1)), tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(HuggingFaceStorageReader, "_process_read_request", fail)
        with pytest.raises(checkpoint.CheckpointError, match=r"rank 1: .*No space left"):
            checkpoint.load_safetensors(model, tmp_path)
    checkpoint.load_safetensors(model, tmp_path)
    for name, tensor in full_parameters(model).items():
        assert torch.equal(tensor, build(MODELS["mlp"]).state_dict()[name])
