"""Private names of torch that checkpoints need. Checked on torch 2.11 and 2.13; when torch moves, look for:

flatten_state_dict, unflatten_state_dict   nested state to and from names joined by dots, as DCP's planners do it
_StorageInfo                               where DCP's FileSystemWriter stored an item: file, offset, length
_MEM_FORMAT_ENCODING                       what `.metadata` has in the place of a memory format
FileSystemReader._slice_file               called once per item, with the open file, before the item is loaded
_get_layout                                what a layout is pickled as: a look-up of its name
FakeTensorMode, _checkpoint_offset         tensors without memory; where torch.load found their values in the file
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode as no_memory
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatEncoding
from torch.serialization import _get_layout as layout_named
from torch.serialization import skip_data

__all__ = [
    "MemoryFormatEncoding",
    "StorageInfo",
    "flatten_state_dict",
    "layout_named",
    "no_memory",
    "offset_in_file",
    "save_holes",
    "unflatten_state_dict",
]


def save_holes(state: Any, path: Path) -> None:
    """`torch.save` of tensors that were made under `no_memory`: the file has room for their values."""
    with skip_data(materialize_fake_tensors=True):
        torch.save(state, path)


def offset_in_file(tensor: Tensor) -> int:
    """Where the values of a tensor that was loaded under `no_memory` begin in its file."""
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None, "expected a tensor from a file"
    return offset
