"""Sharded values through StorageWriters of torch and of others: right, or refused before a file is written."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.futures import Future

from fsdp_compile import fully_shard
from fsdp_compile.checkpoint import DirectoryWriter

from ..ranks import Ranks, on_ranks
from ..training import full_parameters


def _model(seed: int = 0) -> Any:
    """Of which shards end within rows."""
    torch.manual_seed(seed)
    return fully_shard(nn.Sequential(nn.Linear(7, 9), nn.Conv1d(3, 5, 3), nn.Linear(9, 3)))


class _ByName(dcp.FileSystemWriter):
    """Somebody's writer: a file of torch.save for each rank, with tensors by name."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """One tensor for each name."""
        found = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        assert len(found) == len(plan.items), "several items of one name"
        offsets = {item.index.fqn: item.index.offset for item in plan.items}
        torch.save((found, offsets), Path(self.path) / f"{dist.get_rank()}.pt")
        done: Future[Any] = Future()
        done.set_result([])
        return done

    def finish(self, *_: Any, **__: Any) -> None:
        """There is no metadata."""


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def _written(rank: int, root: Path) -> None:
    model, safetensors = _model(), pytest.importorskip("safetensors.torch")
    assert not all(param.spec.is_one_chunk_on_all_ranks for param in model.parameters())
    expected = full_parameters(model)
    for consolidates in (False, True):
        path = root / f"hf_{consolidates}"
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=consolidates)
        dcp.save(get_model_state_dict(model), storage_writer=writer)
        dist.barrier()
        if consolidates:
            _same(safetensors.load_file(path / "model-00001-of-00001.safetensors"), expected)
        else:
            other = _model(1)
            state = get_model_state_dict(other)
            dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)))
            other.load_state_dict(state)
            _same(full_parameters(other), expected)
    path = root / "by_name"
    path.mkdir(exist_ok=True)
    for state in (get_model_state_dict(model), dict(model.named_parameters())):
        dcp.save(state, storage_writer=_ByName(path))
        dist.barrier()
        parts = [torch.load(path / f"{each}.pt") for each in range(dist.get_world_size())]
        for name, value in expected.items():
            rows = [(offsets[name], tensors[name]) for tensors, offsets in parts if name in tensors]
            in_order = [tensor for _, tensor in sorted(rows, key=lambda row: row[0])]
            assert torch.equal(torch.cat(in_order).view_as(value), value), name
        dist.barrier()


def test_writers_that_keep_names(two: Ranks, three: Ranks, tmp_path: Path) -> None:
    """torch's writer of safetensors, and any other that keeps one item of each name, has all elements."""
    two.run(_written, tmp_path / "two")
    three.run(_written, tmp_path / "three")


def _planned(state: dict[str, Any]) -> list[Any]:
    return list(dcp.default_planner.create_default_local_save_plan(state, is_coordinator=True).items)


@on_ranks(2)
def test_writers_that_cannot(tmp_path: Path) -> None:
    """What would write a part of a tensor is refused before a file is written; chunks go to writers that keep them.

    `async_save` through the process group of training warns, and names the group that is needed.
    """
    model = _model()
    group = dist.new_group()
    state = get_model_state_dict(model)
    path = tmp_path / "alone"
    with pytest.raises(dcp.api.CheckpointException, match="HuggingFaceStorageWriter writes what one rank has") as error:
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(path)))
    assert "save_distributed=True" in str(error.value) and not list(path.glob("*.safetensors"))
    path = tmp_path / "background"
    safetensors = dcp.FileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS)
    future: Any = dcp.async_save(state, storage_writer=safetensors, process_group=group)
    with pytest.raises(dcp.api.CheckpointException, match="FileSystemWriter keeps one item of each name"):
        future.result()
    assert not list(path.glob("*distcp"))
    for path, passed in ((tmp_path / "ours", group), (tmp_path / "shared", None)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            written: Any = dcp.async_save(state, storage_writer=DirectoryWriter(path, 1), process_group=passed)
            written.result()
        said = [each for each in caught if "through the default process group" in str(each.message)]
        assert len(said) == (passed is None), caught
    names = {item.index.fqn for item in _planned(state)}
    assert names <= set(state) and len(_planned(state)) > len(names), "other planners get chunks"
