"""Where sharded tensors that were pickled by version 0.2 look for what they are made of."""

from fsdp_compile.tensors.as_dtensor import FlatShard as FlatShard
from fsdp_compile.tensors.sharded_tensor import ShardedTensor as ShardedTensor
from fsdp_compile.tensors.sharded_tensor import _unpickled as _unpickled
