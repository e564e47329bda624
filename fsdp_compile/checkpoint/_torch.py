"""Private torch names that checkpoints need. Checked on torch 2.11 and 2.13."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode as no_memory
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.serialization import skip_data

__all__ = [
    "DTensorSpec",
    "StorageInfo",
    "asks_only",
    "flatten_state_dict",
    "make_spec",
    "new_dtensor",
    "no_memory",
    "offset_in_file",
    "run_plainly",
    "save_holes",
    "strides_of",
    "unflatten_state_dict",
]

_ASKS = {"size", "dim", "numel", "nelement", "stride", "element_size", "ndimension", "is_floating_point"}
_ASKS |= {"is_complex", "is_contiguous", "__hash__", "__len__", "storage_offset", "untyped_storage", "is_pinned"}
_COMPUTED = {"T", "H", "mT", "mH", "real", "imag", "data"}  # attributes that are more than a question


def make_spec(mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype) -> DTensorSpec:
    """What a DTensor of `shape` and `dtype` that claims to be replicated over `mesh`, 1-D, says of itself."""
    return DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(torch.Size(shape), strides_of(shape), dtype))


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def asks_only(function: Any) -> bool:
    """Whether a tensor function only asks for the shape and the like."""
    name = getattr(function, "__name__", "")
    return name in _ASKS or (name == "__get__" and function.__self__.__name__ not in _COMPUTED)


def run_plainly(function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """What a tensor function does if nobody overrides it."""
    return torch._C._disabled_torch_function_impl(function, types, args, kwargs or {})


def new_dtensor(kind: type, local: Tensor, spec: DTensorSpec) -> Any:
    """A DTensor of the subclass `kind`."""
    return DTensor.__new__(kind, local, spec, requires_grad=False)


def save_holes(state: Any, path: Path) -> None:
    """`torch.save` of tensors that were made under `no_memory`: the file has room for their values."""
    with skip_data(materialize_fake_tensors=True):
        torch.save(state, path)


def offset_in_file(tensor: Tensor) -> int:
    """Where the values of a tensor that was loaded under `no_memory` begin in its file."""
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None, "expected a tensor from a file"
    return offset
