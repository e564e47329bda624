"""Construction between real ranks: equal values, groups that communicate, what is ignored, deferred or of odd shape."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODELS, Case, seeded, squared_error, vectors
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_compile import fully_shard
from fsdp_compile.comm.groups import resolve_groups

from ..ranks import Ranks, on_ranks
from ..training import (
    assert_same_parameters,
    backward,
    build,
    executor,
    follow,
    full_parameters,
    local,
    mine,
    whole,
)

MLP = MODELS["mlp"]
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
HOWS: list[Any] = ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)]


# --- groups -----------------------------------------------------------------------------------------------------------


def _reduce(rank: int) -> tuple[float, float]:
    groups = resolve_groups(None, None, ShardingStrategy.HYBRID_SHARD, True, devices_per_node=2)
    sums = []
    for group in (groups.shard, groups.replicate):
        value = torch.tensor(10.0**rank)
        dist.all_reduce(value, group=group.find())
        sums.append(value.item())
    return sums[0], sums[1]


def test_groups_of_nodes_communicate(four: Ranks) -> None:
    """Each rank sums with its node, and with its place on the other node (E-PG-7)."""
    assert four.run(_reduce) == [(11, 101), (11, 1010), (1100, 101), (1100, 1010)]


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


@on_ranks(2)
def test_one_node_is_plain_sharding() -> None:
    """A hybrid strategy with one replica trains as FULL_SHARD does (E-STRAT-1)."""
    reference, model = build(MLP), build(MLP)
    fully_shard(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, devices_per_node=2)
    follow(model, reference, MLP)


@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_units_of_different_strategies(how: str) -> None:
    """A `CustomPolicy` that gives each block another strategy trains as unsharded (E-INIT-5)."""
    reference, model = build(MLP), build(MLP)
    strategies = zip(model.blocks, STRATEGIES, strict=True)
    own: dict[nn.Module, Any] = {block: {"sharding_strategy": ShardingStrategy[s]} for block, s in strategies}
    fully_shard(model, auto_wrap_policy=CustomPolicy(lambda module: own.get(module, False)))
    follow(executor(model, how), reference, MLP)


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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", HOWS)
@on_ranks(2)
def test_deferred_models_train(how: str, strategy: str) -> None:
    """A model that was on meta is, from its first step on, what it is when made outright (E-META-2, 6)."""
    with torch.device("meta"):
        model = MLP.build()
    reference = MLP.build()

    def init(module: nn.Module) -> None:
        for tensor in module.parameters(recurse=False):
            nn.init.trunc_normal_(tensor, std=0.3, generator=seeded(tensor.numel()))

    def init_deferred(module: nn.Module) -> None:
        module.to_empty(device=torch.get_default_device(), recurse=False)
        init(module)

    reference.apply(init)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, sharding_strategy=ShardingStrategy[strategy], param_init_fn=init_deferred)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    assert_same_parameters(model, reference)
    follow(executor(model, how), reference, MLP)


class _Shift(nn.Module):
    """One 0-d parameter, all that its unit has."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class _Odd(nn.Module):
    """0-d parameters and parameters without elements, in units of their own and among others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = _Shift()
        self.none = nn.Parameter(torch.empty(0, 7))
        self.empty, self.net = nn.Linear(7, 0), MLP.build()

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(self.net(x) * self.scale) + (self.empty(x).sum() + self.none.sum())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["eager", "aot_eager"])
@on_ranks(2)
def test_parameters_of_odd_shapes_train(how: str, strategy: str) -> None:
    """0-d parameters and empty ones train as unsharded (E-FLAT-11, 12)."""
    case = Case(_Odd, vectors, squared_error)
    reference, model = build(case), build(case)
    fully_shard(model, sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy={nn.Linear, _Shift})
    run = executor(model, how)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (reference, model)]
    for seed in (1, 2):
        backward(reference, case, whole(case, seed))
        backward(run, case, mine(case, seed))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = full_parameters(model)
    for name, param in reference.named_parameters():
        torch.testing.assert_close(full[name], param.detach(), msg=lambda text, name=name: f"{name}: {text}")
