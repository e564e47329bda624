"""Private names of torch that state in memory and on disk needs. Checked on torch 2.11, 2.13 and 2.14.

When torch moves, look for:

torch.distributed._shard.sharded_tensor    what FSDP1's sharded state dicts have where no mesh was given
flatten_state_dict, unflatten_state_dict   nested state to and from names joined by dots, as DCP's planners do it
_StorageInfo                               where DCP's FileSystemWriter stored an item: file, offset, length
_MEM_FORMAT_ENCODING                       what `.metadata` has in the place of a memory format
FileSystemReader._slice_file               called once per item, with the open file, before the item is loaded
_get_layout                                what a layout is pickled as: a look-up of its name
FakeTensorMode, _checkpoint_offset         tensors without memory; where torch.load found their values in the file
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode as no_memory
from torch.distributed._shard.sharded_tensor import Shard as ChunkOfTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor as ChunkedTensor
from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata, ShardMetadata, TensorProperties
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatEncoding
from torch.serialization import _get_layout as layout_named

__all__ = [
    "ChunkedTensor", "MemoryFormatEncoding", "StorageInfo", "chunked_tensor", "flatten_state_dict", "layout_named",
    "no_memory", "offset_in_file", "unflatten_state_dict",
]  # fmt: skip


def chunked_tensor(rows: Tensor, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    """A tensor of `shape`, not (), of which each rank of `group` has `rows`, those that `torch.chunk` gives to it."""
    most = -(-shape[0] // group.size())
    ranks = dist.get_process_group_ranks(group)
    mine, devices = dist.get_rank(), torch.accelerator.device_count() or 1
    metadata, shards = [], []
    for rank, start in zip(ranks, range(0, shape[0], most), strict=False):
        offsets = [start, *[0] * (len(shape) - 1)]
        device = rows.device if rank == mine or rows.is_cpu else f"{rows.device.type}:{rank % devices}"
        sizes = [min(most, shape[0] - start), *shape[1:]]
        metadata.append(ShardMetadata(offsets, sizes, f"rank:{rank}/{device}"))
        if rank == mine:
            shards.append(ChunkOfTensor(rows, metadata[-1]))
    described = ShardedTensorMetadata(metadata, shape, TensorProperties(dtype=rows.dtype, requires_grad=False))
    made: Tensor = ChunkedTensor._init_from_local_shards_and_global_metadata(
        shards, sharded_tensor_metadata=described, process_group=group
    )
    return made


# --- files ------------------------------------------------------------------------------------------------------------


def offset_in_file(tensor: Tensor) -> int:
    """Where the values of a tensor that was loaded under `no_memory` begin in its file."""
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None, "expected a tensor from a file"
    return offset
