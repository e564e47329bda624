"""Where sharded tensors that were pickled by version 0.2 look for what they are made of."""

from fsdp_compile.tensors.shard_spec import FlatSharding as FlatSharding
from fsdp_compile.tensors.shard_spec import ShardRanks as ShardRanks
from fsdp_compile.tensors.shard_spec import ShardSpec as ShardSpec
