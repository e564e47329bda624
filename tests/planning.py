"""What torch.distributed.checkpoint does, on all ranks in one process and without a process group.

saved = save(states)         one state dict for each rank; every planner's work, and what each rank would write
load(saved, states)          read it into those of other ranks
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType

from fsdp_compile.core.layout import FlatParamLayout
from fsdp_compile.tensors.shard_spec import FlatSharding, ShardRanks, ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor


class Saved(NamedTuple):
    """A checkpoint in memory."""

    metadata: Metadata
    data: dict[MetadataIndex, Any]


def ranks_seen_by(rank: int, world_size: int) -> ShardRanks:
    """`world_size` ranks as `rank` sees them; good for no communication."""
    return ShardRanks("none", world_size, rank)


def sharded(full: dict[str, Tensor], layout: FlatParamLayout, rank: int) -> dict[str, ShardedTensor]:
    """What `rank` stores of tensors in full shape that are laid out as `layout` says, in memory of its own."""
    ranks, state = ranks_seen_by(rank, layout.world_size), {}
    for name, offset in zip(layout.names, layout.offsets, strict=True):
        sharding = FlatSharding(tuple(full[name].shape), offset, layout.shard_numel)
        first, numel = sharding.local_range(rank)
        state[name] = ShardedTensor(full[name].reshape(-1)[first : first + numel].clone(), ShardSpec(sharding, ranks))
    return state


def save(states: list[dict[str, Any]]) -> Saved:
    """All ranks' state dicts, checked and written as DCP does it."""
    planners = [DefaultSavePlanner() for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, None, rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    data: dict[MetadataIndex, Any] = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(plan).items:
            assert item.index not in data, f"{item.index} is written twice"
            found = planner.resolve_data(item)
            data[item.index] = found if item.type == WriteItemType.BYTE_IO else found.detach().clone()
    return Saved(metadata, data)


def load(saved: Saved, states: list[dict[str, Any]]) -> None:
    """Read into all ranks' state dicts, in place."""
    for rank, state in enumerate(states):
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, saved.metadata, rank == 0)
        for item in planner.finish_plan(planner.create_local_plan()).items:
            found = saved.data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                found.seek(0)
                planner.load_bytes(item, found)
                continue
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                found = found.narrow(dim, offset, length)
            planner.resolve_tensor(item).copy_(found)
