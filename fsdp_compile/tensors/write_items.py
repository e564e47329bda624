"""How torch.distributed.checkpoint (DCP) writes a sharded tensor: each chunk of a rank is an item, or its rows are."""

# Note [Writers that keep one item]
# A range of elements is up to `2 * ndim - 1` chunks, which DCP tells apart by their offsets. Writers of safetensors, as
# torch's HuggingFaceStorageWriter, keep tensors by name: of several chunks of a rank all but the last would be lost,
# and nothing would be said. So a writer that is not known to keep chunks gets what every sharding of DTensor gives it,
# one item for each rank: the rows that `torch.chunk` gives to it. Ranks gather the tensor for that while they plan,
# before a file is written, which they cannot do in the background: there, the plan is refused. A writer says by
# `keeps_chunks = True` that it keeps them.

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdp_compile.core.settings import warn_caller
from fsdp_compile.tensors._torch import locals_of, save_state_dict
from fsdp_compile.tensors.shard_spec import ShardSpec

_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # writers
_ROWS = "_rows_to_write"  # an attribute of a tensor between planning and writing


def write_items(value: Any, name: str, _: Any) -> list[WriteItem]:
    """What DCP writes of `value`, of which this rank has `chunks`; RuntimeError if its writer would lose some of it."""
    spec: ShardSpec = value.spec
    chunks = chunks_of(value)
    if save := locals_of(save_state_dict):  # its arguments
        _warn_of_shared_group(save, value.local.device)
        if not _keeps_chunks(save["storage_writer"]):
            _check_writer(name, value, save)
            if not spec.is_one_chunk_on_all_ranks:
                rows = spec.gather_split(value.local.detach())[spec.torch_rows].clone()
                setattr(value, _ROWS, rows)
                offsets = [spec.torch_rows.start, *[0] * (rows.dim() - 1)]
                chunks = [ChunkStorageMetadata(torch.Size(offsets), rows.shape)] if rows.numel() else []
    properties, kind = TensorProperties.create_from_tensor(value.local), WriteItemType.SHARD
    described = [(chunk, TensorWriteData(chunk, properties, value.shape)) for chunk in chunks]
    return [WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=data) for chunk, data in described]


def with_own_storage(tensor: Tensor) -> Tensor:
    """The memory of a contiguous CPU tensor over a storage without other bytes, which writers would copy or write."""
    start = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


def chunks_of(value: Any) -> list[ChunkStorageMetadata]:
    """Its chunks as DCP describes them; one of a tensor without elements, which otherwise had no name there."""
    if not value.numel():
        return [ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)]
    return [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in value.chunks]


def tensor_of(value: Any, index: MetadataIndex) -> Any:
    """The chunk, or the rows, that belong to an item; ValueError if this rank has none at these offsets."""
    if (rows := value.__dict__.pop(_ROWS, None)) is not None:
        return rows
    if not value.numel():
        return value.local.new_empty(value.shape)
    for chunk in value.chunks:
        if chunk.offsets == index.offset:
            return value.view_of(chunk)
    raise ValueError(
        f"{index.fqn}: expected the offsets of one of this rank's chunks, {[chunk.offsets for chunk in value.chunks]}, "
        f"found {index.offset}"
    )


def _keeps_chunks(writer: Any) -> bool:
    """Whether it tells chunks of one name apart, as the files of `torch.save` do."""
    if hasattr(writer, "keeps_chunks"):
        return bool(writer.keeps_chunks)
    is_torch_save = getattr(writer, "serialization_format", None) is SerializationFormat.TORCH_SAVE
    return type(writer).write_data is getattr(FileSystemWriter, "write_data", None) and is_torch_save


def _warn_of_shared_group(save: dict[str, Any], device: torch.device) -> None:
    """Warn once of a save in the background through the process group that training communicates by, too."""
    writer, is_shared = save["storage_writer"], save["process_group"] is None and device.type == "cpu"
    if is_shared and writer not in _warned and threading.current_thread() is not threading.main_thread():
        _warned.add(writer)
        warn_caller(
            "async_save plans in the background through the default process group; on a CPU collectives of training go "
            "through it as well, and ranks wait for each other until its timeout. Pass "
            'process_group=torch.distributed.new_group(backend="gloo"), made once on all ranks, or wait for the result '
            "before training goes on"
        )


def _check_writer(name: str, value: Any, save: dict[str, Any]) -> None:
    what, spec, writer = None, value.spec, save["storage_writer"]
    if save["no_dist"] or not getattr(writer, "save_distributed", True):
        what = "writes what one rank has, which is a part of it"
    elif not spec.is_one_chunk_on_all_ranks and threading.current_thread() is not threading.main_thread():
        what = "keeps one item of each name, for which ranks gather each tensor, and cannot in the background"
    elif getattr(value, "geometry", None) or not (spec.is_one_chunk_on_all_ranks or spec.tensor_parallel is None):
        what = "keeps one item of each name, and of a view, or with tensor parallelism, this rank has several"
    if what is not None:
        raise RuntimeError(
            f"{name}: {type(writer).__name__} {what}; save full tensors, as get_model_state_dict gives them with "
            f"StateDictOptions(full_state_dict=True), or use fsdp_compile.checkpoint.save_safetensors; of torch's "
            f"HuggingFaceStorageWriter, dcp.save with save_distributed=True"
        )
