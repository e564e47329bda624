"""Construction between real ranks: equal values, groups that communicate, what is ignored, deferred or of odd shape."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MLP
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.comm.groups import resolve_groups

from ..ranks import on_ranks
from ..training import backward, build, executor, local, mine, whole

HOWS: list[Any] = ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)]


# --- groups -----------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_groups_of_nodes_communicate(rank: int) -> None:
    """Each rank sums with its node, and with its place on the other node (E-PG-7)."""
    groups = resolve_groups(None, None, ShardingStrategy.HYBRID_SHARD, True, devices_per_node=2)
    sums = []
    for group in (groups.shard, groups.replicate):
        value = torch.tensor(10.0**rank)
        dist.all_reduce(value, group=group.find())
        sums.append(value.item())
    assert sums == [[11, 101], [11, 1010], [1100, 101], [1100, 1010]][rank]


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_replicas_of_one_rank_are_averaged(rank: int, how: str) -> None:
    """Gradients 1 and 2 of two replicas that shard over one rank each become 1.5 on both (E-STRAT-9)."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    with pytest.warns(UserWarning, match="HYBRID_SHARD over one rank is NO_SHARD"):
        fully_shard(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, devices_per_node=1)
    executor(model, how)(torch.tensor([[1.0 + rank]])).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.item() == 1.5


# --- ignored, deferred, odd shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_ignored_parameters_are_not_reduced(how: str) -> None:
    """An ignored layer has its own rank's gradient, all others have the mean (E-INIT-11)."""
    reference, own, model = build(MLP), build(MLP), build(MLP)
    fully_shard(model, ignored_modules=[model.blocks[1].up], ignored_states=None)
    run = executor(model, how)
    backward(reference, MLP, whole(MLP, 1))
    backward(own, MLP, mine(MLP, 1))
    backward(run, MLP, mine(MLP, 1))
    for ours, alone in zip(model.blocks[1].up.parameters(), own.blocks[1].up.parameters(), strict=True):
        assert ours.grad is not None and alone.grad is not None
        torch.testing.assert_close(ours.grad, alone.grad)
    head = reference.head.bias.grad
    assert head is not None
    gathered = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(gathered, local(model.head.bias.grad))
    torch.testing.assert_close(torch.cat(gathered), head)
