"""Process groups from the arguments of `fully_shard`, seen by rank 1 of 4."""

import gc
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import RANK, WORLD_SIZE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import DataParallelMeshDims, fully_shard
from fsdp_compile.comm import hops
from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.collectives import sendable
from fsdp_compile.comm.groups import Groups, NamedGroup, Placement, divide, place, resolve_groups, shared_name
from fsdp_compile.construct.arguments import mesh_to_shard

FULL, KEEP, COPY = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
HYBRID, HYBRID_KEEP = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
PLAIN, BOTH_HYBRID = (FULL, KEEP, COPY), (HYBRID, HYBRID_KEEP)


def resolve(strategy: ShardingStrategy = FULL, mesh: Any = None, group: Any = None, **options: Any) -> Groups:
    return resolve_groups(mesh, group, strategy, **{"has_policy": True, **options})


def ranks(group: NamedGroup | None) -> list[int]:
    assert group is not None
    return dist.get_process_group_ranks(group.find())


@pytest.fixture(scope="module")
def pair() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Shard group {0, 1}, replica group {1, 3}."""
    shards = [dist.new_group(members) for members in ([0, 1], [2, 3])]
    replicas = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    return shards[0], replicas[1]


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has said how many ranks a node has, nor are there accelerators to count."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.mark.parametrize("strategy", PLAIN)
def test_plain_strategies(strategy: ShardingStrategy, pair: tuple[dist.ProcessGroup, dist.ProcessGroup]) -> None:
    """The world by default, else the group or that of the mesh; no replicas (E-PG-1, 2, 10)."""
    assert resolve(strategy) == Groups.of(dist.group.WORLD)
    assert resolve(strategy, group=pair[0]) == Groups.of(pair[0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    assert resolve(strategy, mesh["inner"]) == Groups.of(mesh.get_group("inner"), mesh=mesh["inner"])
    assert resolve(strategy).data_parallel_size == WORLD_SIZE


@pytest.mark.parametrize("strategy", BOTH_HYBRID)
def test_hybrid_strategies(strategy: ShardingStrategy, pair: tuple[dist.ProcessGroup, dist.ProcessGroup]) -> None:
    """Dimension 0 of a mesh joins replicas, dimension 1 shards (E-PG-4); the mean is over both (E-PG-10). A pair is
    (shard group, replica group) (E-PG-5)."""
    assert resolve(strategy, group=pair, has_policy=False) == Groups.of(*pair)
    groups = resolve(strategy, init_device_mesh("cpu", (2, 2)), has_policy=False)
    assert ranks(groups.shard) == [0, 1] and ranks(groups.replicate) == [1, 3]
    assert (groups.replicas, groups.data_parallel_size) == (2, 4)


def test_what_gives_no_groups(pair: tuple[dist.ProcessGroup, dist.ProcessGroup], no_launcher: None) -> None:
    """Two ways to say the same, other dimensions, other things than groups, groups that would average a gradient twice
    or that this rank is not in, and sizes of nodes that cannot be or say nothing: the error names what was found.

    E-PG-1, 2, 3, 4, 5, 6, 8, E-ERR-48, 49, 50, 51.
    """
    mesh, world = init_device_mesh("cpu", (2, 2)), dist.group.WORLD
    of_others, own = dist.new_group([0, 2]), dist.new_group([1, 3])
    expected = r"process_group must be a pair \(shard group, replica group\) for HYBRID_SHARD"
    per_node = "ranks per node do not divide the world's 4 ranks; pass devices_per_node"
    cases: list[tuple[ShardingStrategy, Any, Any, dict[str, Any], str]] = [
        *((strategy, mesh, world, {}, "mesh and process_group exclude each other") for strategy in PLAIN + BOTH_HYBRID),
        *((strategy, mesh, None, {}, r"mesh has 2 dimensions, .*hybrid") for strategy in PLAIN),
        *((strategy, None, pair, {}, f"is a tuple of 2, and {strategy.name} needs one.*hybrid") for strategy in PLAIN),
        *((HYBRID, init_device_mesh("cpu", shape), None, {}, f"mesh has {len(shape)} dimensions, and HYBRID_SHARD")
          for shape in ((4,), (2, 2, 1))),
        (HYBRID, None, pair[0], {}, f"{expected}, not a ProcessGroup"),
        (HYBRID, None, [*pair], {}, f"{expected}, not a list"),
        (HYBRID, None, pair[:1], {}, rf"{expected}, not \(ProcessGroup\)"),
        (HYBRID, None, (pair[0], "world"), {}, rf"{expected}, not \(ProcessGroup, str\)"),
        (HYBRID, None, (pair[0], world), {}, r"ranks \[0, 1\] are in both"),
        (FULL, None, of_others, {}, "process_group: rank 1 is not in this group"),
        (HYBRID, None, (own, of_others), {}, "process_group: rank 1 is not in this group"),
        *((strategy, None, None, {"has_policy": False, "devices_per_node": 2},
           f"{strategy.name} without an auto_wrap_policy needs a 2-D mesh, or a pair") for strategy in BOTH_HYBRID),
        *((HYBRID, None, None, {"devices_per_node": size}, f"{size} {per_node}") for size in (3, 8, 0, -1)),
        *((*given, {"devices_per_node": 2}, "devices_per_node=2 has no effect")
          for given in ((FULL, None, None), (HYBRID, None, pair), (HYBRID, mesh, None))),
        (HYBRID, None, None, {}, "the number of ranks per node is unknown.*devices_per_node"),
    ]  # fmt: skip
    for strategy, given_mesh, group, options, message in cases:
        with pytest.raises(ValueError, match=message):
            resolve(strategy, given_mesh, group, **options)
    for given, message in (
        ({"mesh": (2, 2)}, "mesh must be a DeviceMesh, not a tuple"),
        ({"group": "world"}, "process_group must be a ProcessGroup, not 'world'"),
        ({"strategy": HYBRID, "devices_per_node": "2"}, "devices_per_node must be an int, not a str"),
    ):
        with pytest.raises(TypeError, match=message):
            resolve(**given)


def test_dimensions_of_a_mesh_by_name() -> None:
    """`dp_mesh_dims` names them, several for one role; what is no such object, or shards over none, is refused."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pods", "nodes", "ranks"))
    for shard, replicate, expected in (
        ("ranks", None, [[0, 1]]),
        (("nodes", "ranks"), "pods", [[0, 1], [1, 3]]),
        (("pods", "ranks"), None, [[0, 1, 2, 3]]),
    ):
        found = mesh_to_shard(mesh, DataParallelMeshDims(shard=shard, replicate=replicate))
        groups = resolve(FULL if replicate is None else HYBRID, found)
        assert [ranks(group) for group in (groups.shard, groups.replicate) if group is not None] == expected
    assert mesh_to_shard(mesh, None) is mesh
    with pytest.raises(TypeError, match="dp_mesh_dims: expected a DataParallelMeshDims, found str"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims="pods")
    with pytest.raises(ValueError, match="dp_mesh_dims has no dimension to shard over"):
        mesh_to_shard(mesh, DataParallelMeshDims(replicate="pods"))
    with pytest.raises(ValueError, match="shard"):
        DataParallelMeshDims()


def test_who_are_replicas_of_a_rank_alone() -> None:
    """Where one rank stores all elements, gradients are averaged over the ranks that store the same, if there are any,
    and nothing else is sent; the mesh says so, and arrays can be had."""
    alone = dist.new_group([RANK])
    cases: tuple[tuple[dict[str, Any], int], ...] = (
        ({"sharding_strategy": COPY}, WORLD_SIZE),
        ({"sharding_strategy": HYBRID, "devices_per_node": 1}, WORLD_SIZE),
        ({"sharding_strategy": COPY, "process_group": alone}, 1),
        ({"sharding_strategy": HYBRID, "process_group": (dist.new_group([RANK]), alone)}, 1),
        ({"sharding_strategy": FULL, "process_group": alone}, 1),
    )
    for options, replicas in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that this is NO_SHARD
            model = fully_shard(nn.Linear(3, 2), auto_wrap_policy=set(), **options)
        weight: Any = model.weight
        with mock.patch.object(hops, "start_all_reduce", wraps=hops.start_all_reduce) as reduce:
            model(torch.ones(1, 3)).sum().backward()
        assert reduce.called == (replicas > 1), options
        ranks = weight.spec.ranks
        assert (ranks.size, ranks.rank, weight.spec.reducing_groups) == (1, 0, ()), options
        assert (ranks.replicas is None) == (replicas == 1), options
        assert weight.device_mesh.size() == replicas and len(weight.placements) == 1, options
        assert weight.placements[0].is_replicate() == (replicas > 1), options
        assert weight.to_local().shape == (6,) and torch.equal(weight.full_tensor(), weight.to_local().view(2, 3))
        saved = model.state_dict()["weight"]
        for whole in (weight.detach(), weight.data, saved):  # where all elements are here, arrays can be had
            assert torch.equal(torch.tensor(whole.tolist()), weight.full_tensor()) and whole.numpy().shape == (2, 3)
        assert weight.detach()[1:].numpy().shape == (1, 3), options


def test_groups_from_nodes(no_launcher: None) -> None:
    """Runs of consecutive ranks shard, equal places in them replicate (E-PG-7, 8); calls in one world share them
    (E-PG-9)."""
    for size, shard, replicate in ((1, [1], [0, 1, 2, 3]), (2, [0, 1], [1, 3]), (4, [0, 1, 2, 3], [1])):
        groups = resolve(HYBRID, devices_per_node=size)
        assert groups == resolve(HYBRID_KEEP, devices_per_node=size)
        assert ranks(groups.shard) == shard and ranks(groups.replicate) == replicate
        assert groups.shard.find().rank() == shard.index(RANK)


def test_the_launcher_knows_the_node_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """`LOCAL_WORLD_SIZE`, else the number of accelerators, at most all ranks (E-PG-7, 8)."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks(resolve(HYBRID).shard) == [0, 1]
    assert ranks(resolve(HYBRID, devices_per_node=4).shard) == [0, 1, 2, 3]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for count, shard in ((2, [0, 1]), (8, [0, 1, 2, 3])):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda count=count: count)
        assert ranks(resolve(HYBRID).shard) == shard


def test_places(pair: tuple[dist.ProcessGroup, dist.ProcessGroup]) -> None:
    """What each strategy does where (E-STRAT-1)."""
    plain, hybrid, (shard, replicate) = Groups.of(pair[0]), Groups.of(*pair), map(NamedGroup.of, pair)
    assert place(FULL, plain) == Placement(shard, 2, True, True, None)
    assert place(KEEP, plain) == Placement(shard, 2, True, False, None)
    assert place(COPY, plain) == Placement(shard, 1, False, False, None)
    assert place(HYBRID, hybrid) == Placement(shard, 2, True, True, replicate)
    assert place(HYBRID_KEEP, hybrid) == Placement(shard, 2, True, False, replicate)


def test_neighbours_and_peers(no_launcher: None) -> None:
    """Runs of consecutive ranks gather again, equal places in them gather first; also in groups of some ranks, where
    they are made once."""
    stages = divide(Groups.of(dist.group.WORLD), 2).stages
    assert [ranks(group) for group in stages] == [[1, 3], [0, 1]]
    assert divide(Groups.of(dist.group.WORLD), 2).stages is stages
    for choice in (None, True, False, 1, WORLD_SIZE):
        assert divide(Groups.of(dist.group.WORLD), choice).stages is None
    refused_by = pytest.raises(
        ValueError, match=r"reshard_after_forward=4, .*does not divide the 2 ranks to shard over"
    )
    with refused_by:
        divide(resolve(HYBRID, devices_per_node=2), 4)
    groups = divide(Groups.of(dist.group.WORLD), 2)
    assert place(FULL, groups) == Placement(groups.shard, 4, True, True, None, stages)
    assert place(KEEP, groups) == Placement(groups.shard, 4, True, False, None)


def test_places_where_one_side_is_one_rank(no_launcher: None) -> None:
    """One rank to shard over: copies, averaged over all replicas (E-STRAT-6, 9). One replica: a plain strategy."""
    ones = resolve(HYBRID, devices_per_node=1)
    assert place(HYBRID, ones) == Placement(ones.replicate, 1, False, False, None)
    whole = resolve(HYBRID, devices_per_node=4)
    assert place(HYBRID, whole) == Placement(whole.shard, 4, True, True, None)
    alone = Groups(ones.shard)
    for strategy in PLAIN:
        assert place(strategy, alone) == Placement(ones.shard, 1, False, False, None)


def test_offloaded_tensors_are_sent_from_a_device_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in host memory is copied to a device that the group communicates, and stays where the group takes it.

    Norms of offloaded gradients need that in a group of NCCL alone (E-CLIP-1). "meta" stands for the device here.
    """
    tensor, group = torch.ones(3), dist.group.WORLD
    assert group is not None and sendable(tensor, group.group_name) is tensor
    for devices, sent_from in (("meta:nccl", "meta"), ("cpu:gloo,meta:nccl", "cpu")):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, devices=devices: devices)
        assert sendable(tensor, group.group_name).device.type == sent_from


def test_names_tell_forms_apart_and_groups_of_one_form() -> None:
    """Groups have a name by size and distance that all ranks give, the world keeps its own, and no two share one."""
    world = dist.group.WORLD
    assert world is not None and shared_name(world) == world.group_name
    ranks = {"3x1": [1, 2, 3], "2x2": [1, 3], "3": [0, 1, 3]}
    for form, members in ranks.items():
        first, second = dist.new_group(members), dist.new_group(members)
        names = [shared_name(group) for group in (first, second, first)]
        assert names[0] == names[2] != names[1] and all(name.startswith(f"fsdp.{form}") for name in names)
        assert [group_named(name) for name in names] == [first, second, first]


def test_the_name_of_a_group_that_is_gone_is_given_again() -> None:
    """A name does not outlive its group, so a process that makes and destroys groups does not run out of short ones."""
    group = dist.new_group([0, 1, 2])
    name = shared_name(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    with pytest.raises(RuntimeError, match="destroyed"):
        group_named(name)
    assert shared_name(dist.new_group([0, 1, 2])) == name
