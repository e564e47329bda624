"""Private names of torch that state in memory and on disk needs. Checked on torch 2.11, 2.13 and 2.14.

When torch moves, look for:

torch.distributed._shard.sharded_tensor    what FSDP1's sharded state dicts have where no mesh was given: to load it
flatten_state_dict, unflatten_state_dict   nested state to and from names joined by dots, as DCP's planners do it
_StorageInfo                               where DCP's FileSystemWriter stored an item: file, offset, length
_MEM_FORMAT_ENCODING                       what `.metadata` has in the place of a memory format
FileSystemReader._slice_file               called once per item, with the open file, before the item is loaded
_get_layout                                what a layout is pickled as: a look-up of its name
"""

from torch.distributed._shard.sharded_tensor import ShardedTensor as ChunkedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatEncoding
from torch.serialization import _get_layout as layout_named

__all__ = [
    "ChunkedTensor", "MemoryFormatEncoding", "StorageInfo", "flatten_state_dict", "layout_named",
    "unflatten_state_dict",
]  # fmt: skip
