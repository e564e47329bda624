"""Private names of torch that state in memory and on disk needs. Checked on torch 2.11, 2.13 and 2.14.

docs/upgrading_torch.md says what to look for when torch moves.
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
