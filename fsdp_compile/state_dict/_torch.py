"""Private names of torch that sharded values need. Checked on torch 2.11 and 2.13; when torch moves, look for:

DTensorSpec, TensorMeta          what a DTensor says of itself: mesh, placements, shape, strides, dtype
DTensor.__new__(cls, local, spec, requires_grad=...)   how a subclass of DTensor is made from its local tensor
torch.distributed._shard.sharded_tensor                what torch.distributed.checkpoint.optimizer loads states into
torch._C._disabled_torch_function_impl                 a tensor function as if nobody had overridden it
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor as ChunkedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_flatten_with_path, tree_map_only, tree_unflatten

__all__ = [
    "ChunkedTensor",
    "DTensorSpec",
    "call_plainly",
    "new_dtensor",
    "replicated_spec",
    "tree_flatten_with_path",
    "tree_map_only",
    "tree_unflatten",
]


def replicated_spec(
    mesh: DeviceMesh, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """The description of a DTensor that claims to be replicated over `mesh`, which is 1-D."""
    return DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))


def new_dtensor(kind: type, local: Tensor, spec: DTensorSpec) -> Any:
    """A DTensor of the subclass `kind` whose local tensor, of any shape, is `local`."""
    return DTensor.__new__(kind, local, spec, requires_grad=False)


def call_plainly(function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """What the tensor function `function` returns if no class overrides it."""
    return torch._C._disabled_torch_function_impl(function, types, args, kwargs or {})
