"""Which ranks split parameters, and which ranks hold copies of them.

16 ranks, 8 per node, hybrid                      rank 9
shard groups      0..7, 8..15                     shards with 8..15
replica groups    {0, 8}, {1, 9}, ... {7, 15}     replicates with {1, 9}

16 ranks, resharded to 8 ranks                    rank 9
peers             {0, 8}, {1, 9}, ... {7, 15}     gathers an eighth of the parameters with {1, 9}, and retains it
neighbors         0..7, 8..15                     gathers the rest with 8..15, and again in backward
"""

import os
import weakref
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile.comm._torch import (
    group_named,
    groups_counted,
    mesh_without_group,
    offer_name,
    timeout_of,
    without_groups,
)
from fsdp_compile.comm.collectives import backends
from fsdp_compile.comm.comparison import Subject, compare, exists
from fsdp_compile.comm.waits import MessageBoard, state_of

_SECONDS_TO_COME = 600.0  # that ranks wait for each other before they make a group
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
RESHARDING = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)

GroupArgument = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]


# Note [Nobody holds a process group]
# `destroy_process_group` ends a group's threads when the last reference to it goes. Where a living model holds it, a
# thread of gloo may drop its last tensors while Python ends, which aborts the process. So what lives longer than a call
# has a `NamedGroup`, and asks torch for the group. torch's meshes hold groups: we keep copies that do not, except of
# those of DTensors, which Dynamo asks for groups.


class NamedGroup(NamedTuple):
    """A process group by its shared name, equal on all ranks (Note [Names of groups]): a hop, if with formats."""

    name: str
    size: int
    gather: str = ""  # the format of parameters; empty: as they are
    reduce: str = ""  # that of gradients

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "NamedGroup":
        """The name and the size of `group`."""
        return cls(shared_name(group), group.size())

    def find(self) -> dist.ProcessGroup:
        """The group. RuntimeError if it was destroyed."""
        return group_named(self.name)


Stages = tuple[NamedGroup, NamedGroup]
"""Two groups that all-gathers go through, one after the other: peers, then neighbors."""


@dataclass(frozen=True)
class Groups:
    """The process groups of a model's units."""

    shard: NamedGroup  # its ranks split one copy of the parameters
    replicate: NamedGroup | None = None  # hybrid: its ranks hold the same slice in different copies
    stages: Stages | None = None  # of `shard`
    mesh: DeviceMesh | None = None  # that the user gave: its last dimension is `shard`, one before it `replicate`

    @classmethod
    def of(cls, shard: Any, replicate: Any = None, mesh: DeviceMesh | None = None) -> "Groups":
        """These process groups, and those of `mesh`, by their names."""
        copied = None if mesh is None else without_groups(mesh)
        return cls(NamedGroup.of(shard), None if replicate is None else NamedGroup.of(replicate), mesh=copied)

    @property
    def replicas(self) -> int:
        """How many copies there are."""
        return self.replicate.size if self.replicate else 1

    @property
    def data_parallel_size(self) -> int:
        """Over how many ranks gradients are averaged (E-PG-10)."""
        return self.shard.size * self.replicas


class Placement(NamedTuple):
    """What a strategy means for a unit."""

    group: NamedGroup  # splits parameters; if these are copied, averages gradients
    shards: int
    is_sharded: bool  # ranks store different parts; otherwise all of them have all
    reshard_after_forward: bool
    replicate: NamedGroup | None  # averages the reduced shards as well
    stages: Stages | None = None


def place(strategy: ShardingStrategy, groups: Groups, same_bits: bool = False) -> Placement:
    """How a unit of `strategy` lies in `groups`.
    With one rank to shard over, the unit is copied (E-STRAT-6), and its replicas average its gradients (E-STRAT-9);
    with `same_bits` that rank stores one shard of one, and does what each of several ranks does. NO_SHARD copies.
    """
    replicate = groups.replicate if groups.replicas > 1 else None
    if strategy is ShardingStrategy.NO_SHARD or (groups.shard.size == 1 and not same_bits):
        return Placement(replicate or groups.shard, 1, False, False, None)
    reshards = strategy in RESHARDING
    return Placement(groups.shard, groups.shard.size, True, reshards, replicate, groups.stages if reshards else None)


def check_ranks_of_tree(groups: Groups) -> None:
    """Raise ValueError unless each group of ranks is a power of two."""
    for what, size in (("shards", groups.shard.size), ("replicas", groups.replicas)):
        if size & (size - 1):
            raise ValueError(f"reduction_order='tree': {size} {what} are not a power of two; use 1, 2, 4, 8, ... ranks")


def resolve_groups(
    mesh: DeviceMesh | None,
    process_group: GroupArgument | None,
    strategy: ShardingStrategy,
    has_policy: bool,
    devices_per_node: int | None = None,
) -> Groups:
    """The groups that the arguments of `fully_shard` stand for (E-PG-1 to 9).

    Args:
        mesh: 1-D; for hybrid strategies 2-D, (replicas, shards).
        process_group: one group; for hybrid strategies the pair (shard group, replica group).
        strategy: whether it is hybrid decides what the two above must be.
        has_policy: whether an auto-wrap policy was given, so that all units get their groups in one call.
        devices_per_node: ranks of one shard group, if hybrid groups are to be made from the world.

    Raises:
        RuntimeError: no default group is initialized.
        TypeError: an argument has the wrong type.
        ValueError: the arguments contradict each other, the strategy, or the number of ranks.
    """
    if mesh is not None and process_group is not None:
        raise ValueError("mesh and process_group exclude each other; pass only one of them")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("process_group: there is no default group yet; call init_process_group before fully_shard")
    hybrid = strategy in HYBRID
    if devices_per_node is not None and not (hybrid and mesh is None and process_group is None):
        raise ValueError(
            f"devices_per_node={devices_per_node!r} has no effect with {strategy.name} and these groups: it is for a "
            f"hybrid strategy without mesh and process_group; leave it out"
        )
    if mesh is not None:
        return _of_mesh(mesh, strategy)
    if process_group is not None:
        return _pair(process_group, strategy) if hybrid else Groups.of(_single(process_group, strategy))
    if hybrid:
        return _of_nodes(strategy, has_policy, devices_per_node)
    return Groups.of(dist.group.WORLD)


def _of_mesh(mesh: DeviceMesh, strategy: ShardingStrategy) -> Groups:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, not a {type(mesh).__name__}")
    if strategy not in HYBRID:
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions, and {strategy.name} shards over one: pass mesh['name'], or a hybrid "
                f"strategy for (replicas, shards)"
            )
        return Groups.of(mesh.get_group(), mesh=mesh)
    if mesh.ndim != 2:
        raise ValueError(f"mesh has {mesh.ndim} dimensions, and {strategy.name} needs two: (replicas, shards)")
    return Groups.of(mesh.get_group(1), mesh.get_group(0), mesh)


def _single(given: Any, strategy: ShardingStrategy) -> dist.ProcessGroup:
    if isinstance(given, (tuple, list)):
        raise ValueError(
            f"process_group is a {type(given).__name__} of {len(given)}, and {strategy.name} needs one group: pass one "
            f"of them, or a hybrid strategy for (shard group, replica group)"
        )
    _check_member(given)
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(f"process_group must be a ProcessGroup, not {given!r}")
    return given


def _check_member(given: Any) -> None:
    """Refuse what `new_group` returns to ranks outside of the group (E-ERR-51)."""
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"process_group: rank {dist.get_rank()} is not in this group; pass each rank its own group")


def _pair(given: Any, strategy: ShardingStrategy) -> Groups:
    expected = f"process_group must be a pair (shard group, replica group) for {strategy.name}"
    if not isinstance(given, tuple):
        raise ValueError(f"{expected}, not a {type(given).__name__}")
    for group in given:
        _check_member(group)
    if len(given) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in given):
        raise ValueError(f"{expected}, not ({', '.join(type(group).__name__ for group in given)})")
    shard, replicate = given
    common = set(dist.get_process_group_ranks(shard)) & set(dist.get_process_group_ranks(replicate))
    if common != {dist.get_rank()}:
        raise ValueError(f"{expected} with this rank alone in both, and ranks {sorted(common)} are in both")
    return Groups.of(shard, replicate)


def _of_nodes(strategy: ShardingStrategy, has_policy: bool, devices_per_node: int | None) -> Groups:
    if not has_policy:
        raise ValueError(
            f"{strategy.name} without an auto_wrap_policy needs a 2-D mesh, or a pair of groups as process_group: "
            f"units made by separate calls must be given the same groups"
        )
    size = _node_size(devices_per_node)
    world: Any = dist.group.WORLD
    if size < 1 or world.size() % size:
        raise ValueError(
            f"{size} ranks per node do not divide the world's {world.size()} ranks; pass devices_per_node, a mesh or a "
            f"pair of groups"
        )
    known = _made.setdefault(world, {})
    if ("nodes", size) not in known:
        nodes = [list(range(first, first + size)) for first in range(0, world.size(), size)]
        make = partial(dist.new_subgroups_by_enumeration, timeout=timeout_of(world))
        shard, _ = make(nodes)  # every rank takes part in making every group (E-PG-7)
        replicate, _ = make([list(ranks) for ranks in zip(*nodes, strict=True)])
        known["nodes", size] = (NamedGroup.of(shard), NamedGroup.of(replicate))
    return Groups(*known["nodes", size])


# Note [Subgroups are made once]
# A process group has threads and communicators of its own, and all ranks must make it at the same time. So models of
# one world share what the world, or one of its shard groups, has been divided into. Nothing of torch finds a group by
# its ranks, and no model owns the world: the table is of the process, and forgets a world that is gone.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int], Stages]] = weakref.WeakKeyDictionary()


def divide(groups: Groups, neighbors: bool | int | str | None) -> Groups:
    """`groups`, with two stages if `neighbors` is a number of ranks: peers, and as many consecutive ranks.

    Only the ranks of a group take part in making it, neighbors before peers: shard groups may be any.

    Raises:
        ValueError: the shard group does not divide into groups of `neighbors`.
    """
    if neighbors is None or isinstance(neighbors, bool | str):
        return groups
    group = groups.shard.find()
    ranks = dist.get_process_group_ranks(group)
    if neighbors < 1 or len(ranks) % neighbors:
        raise ValueError(
            f"reshard_after_forward={neighbors}, the number of ranks that gather again in backward, does not divide "
            f"the {len(ranks)} ranks to shard over"
        )
    if neighbors in (1, len(ranks)):
        return groups
    known = _made.setdefault(group, {})
    if ("stages", neighbors) not in known:
        index = group.rank() % neighbors
        first = group.rank() - index
        near = _group_within(group, ranks[first : first + neighbors])
        known["stages", neighbors] = (_group_within(group, ranks[index::neighbors]), near)
    return replace(groups, stages=known["stages", neighbors])


# Note [Names of groups]
# torch names a group by a count or by a hash of its ranks. So the groups along one dimension of a mesh have another
# name on each rank, and a graph with such a name in it would be another program on each rank. Graphs, and all that may
# be traced into one, name groups by `shared_name` instead: by their number of ranks, how far these are apart, and a
# count of the groups of that form that the process has, in the order in which it came to name them.
#
#     4 ranks, 2 x 2      rank 0      rank 3      name
#     shard groups        {0, 1}      {2, 3}      fsdp.2x1
#     replica groups      {0, 2}      {1, 3}      fsdp.2x2        those of a second mesh: fsdp.2x1.1, fsdp.2x2.1
#
# torch looks a name up in the process that runs a collective, and there each name is that of one group: two models
# never share a name unless they share the group. Ranks that came to name groups in another order have other graphs, and
# communicate in the right groups all the same.


def shared_name(group: dist.ProcessGroup) -> str:
    """A name by which `group_named` finds `group`, equal on ranks for which it is the same part of a mesh."""
    if group is dist.group.WORLD:
        return group.group_name
    ranks = dist.get_process_group_ranks(group)
    steps = {later - earlier for earlier, later in pairwise(ranks)} or {1}
    form = f"fsdp.{len(ranks)}" + (f"x{min(steps)}" if len(steps) == 1 else "")
    names = (form if index == 0 else f"{form}.{index}" for index in count())
    return next(name for name in names if offer_name(name, group))


def separate_group(name: str) -> NamedGroup:
    """A second group of the ranks in the group of that name, made once; all of them must ask for it."""
    group = group_named(name)
    known = _made.setdefault(group, {})
    if ("separate", 0) not in known:
        second = _group_within(group, dist.get_process_group_ranks(group))
        known["separate", 0] = (second, second)
    return known["separate", 0][0]


def mesh_of(group: str, size: int, rank: int, device_type: str) -> DeviceMesh:
    """The `size` ranks of the group of that name, seen by `rank`, as a 1-D mesh.
    Its devices are of that type if the group communicates on these. Without such a group it cannot communicate.
    """
    try:
        process_group = group_named(group)
    except RuntimeError:  # a group of an earlier run, whose values were loaded from a file
        return mesh_without_group(size, rank, device_type)
    supported = backends(process_group)
    mesh = DeviceMesh.from_group(process_group, device_type if device_type in supported else next(iter(supported)))
    return without_groups(mesh)


_NEW_GROUP = Subject("new process group", "one", "none", "make it on all ranks at the same time")


def _group_within(group: dist.ProcessGroup, ranks: list[int]) -> NamedGroup:
    """A new group of `ranks`, some or all of those in `group`, which all make one of that size at the same time.

    torch names it after its ranks and the number of groups that the process is in, and ranks that differ in that number
    would wait for each other under different names. So those that are in fewer groups first make some of themselves.

    Raises:
        RuntimeError: a rank does not come.
    """
    board = MessageBoard.of_group(group, f"fsdp_flat/joined/{state_of(group).rounds}") if exists(group) else None
    if board is not None:
        board.post(f"{group.rank()}", f"{groups_counted()}")
    compare([(group, "a new process group")], _SECONDS_TO_COME, _NEW_GROUP)
    if board is not None:  # all have come, and posted before
        most = max(int(board.read(f"{rank}") or 0) for rank in range(group.size()))
        for _ in range(most - groups_counted()):
            alone = "gloo" if dist.is_gloo_available() else None
            dist.new_group([dist.get_rank()], backend=alone, use_local_synchronization=True)
    made = dist.new_group(ranks, timeout=timeout_of(group), use_local_synchronization=True)
    return NamedGroup.of(made)


def _node_size(given: int | None) -> int:
    """Ranks per node: as given, as the launcher says, or as many as there are accelerators (E-PG-8).
    The launcher precedes the devices: it may start fewer ranks, and show each rank only its own device.
    """
    if given is not None:
        if not isinstance(given, int):
            raise TypeError(f"devices_per_node must be an int, not a {type(given).__name__}")
        return given
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")
    if launched.isdecimal():
        return int(launched)
    if torch.accelerator.is_available():
        return min(torch.accelerator.device_count(), dist.get_world_size())
    raise ValueError(
        "the number of ranks per node is unknown: pass devices_per_node, or set LOCAL_WORLD_SIZE in the environment"
    )
