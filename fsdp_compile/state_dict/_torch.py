"""Private names of torch that state in memory and on disk needs. When torch moves, look for:

DTensorSpec, TensorMeta                    what a DTensor says of itself: mesh, placements, shape, strides, dtype
DTensor.__new__(cls, local, spec, ...)     how a subclass of DTensor is made from its local tensor
torch.distributed._shard.sharded_tensor    what torch.distributed.checkpoint.optimizer loads states into
torch._C._disabled_torch_function_impl     a tensor function as if nobody had overridden it
flatten_state_dict, unflatten_state_dict   nested state to and from names joined by dots, as DCP's planners do it
_StorageInfo                               where DCP's FileSystemWriter stored an item: file, offset, length
_MEM_FORMAT_ENCODING                       what `.metadata` has in the place of a memory format
FileSystemReader._slice_file               called once per item, with the open file, before the item is loaded
_get_layout                                what a layout is pickled as: a look-up of its name
FakeTensorMode, _checkpoint_offset         tensors without memory; where torch.load found their values in the file
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode as no_memory
from torch.distributed._shard.sharded_tensor import ShardedTensor as ChunkedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatEncoding
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.serialization import _get_layout as layout_named
from torch.utils._pytree import tree_flatten_with_path, tree_map_only, tree_unflatten

__all__ = [
    "ChunkedTensor", "DTensorSpec", "MemoryFormatEncoding", "StorageInfo", "TensorMeta", "call_plainly",
    "flatten_state_dict", "layout_named", "no_memory", "offset_in_file", "tree_flatten_with_path",
    "tree_map_only", "tree_unflatten", "unflatten_state_dict",
]  # fmt: skip


def call_plainly(function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """What the tensor function `function` returns if no class overrides it."""
    return torch._C._disabled_torch_function_impl(function, types, args, kwargs or {})


# --- files ------------------------------------------------------------------------------------------------------------


def offset_in_file(tensor: Tensor) -> int:
    """Where the values of a tensor that was loaded under `no_memory` begin in its file."""
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None, "expected a tensor from a file"
    return offset
