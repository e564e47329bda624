"""Parameters beside sharded ones that nothing averages: their first step warns, by name, and nothing else does."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate

from fsdp_compile import ShardingStrategy, fully_shard

from ..ranks import Ranks


def _model(strategy: ShardingStrategy) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 2), nn.PReLU())
    fully_shard(model[1], sharding_strategy=strategy)
    return model


def _warnings(rank: int, model: nn.Module, average: bool = False, named: bool = False) -> list[str]:
    given = list(model.named_parameters()) if named else list(model.parameters())
    optimizer = torch.optim.SGD(given, lr=0.1)  # type: ignore[arg-type]  # both are accepted
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.tensor([rank, rank])).sum().backward()
            if average:
                for module in (model[0], model[2], model[3]):  # type: ignore[index]  # it is an nn.Sequential
                    for param in module.parameters():
                        dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
    return [str(each.message) for each in caught if "nothing averages them" in str(each.message)]


def _run(rank: int) -> list[list[str]]:
    full, no_shard = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
    root = fully_shard(_model(full))
    ignored = _model(full)
    fully_shard(ignored, ignored_params=[*ignored[0].parameters(), *ignored[2:].parameters()])
    replicated = replicate(_model(full))
    return [
        _warnings(rank, _model(full), named=True),
        _warnings(rank, _model(full)),
        _warnings(rank, _model(no_shard)),
        _warnings(rank, _model(full), average=True),
        _warnings(rank, root),
        _warnings(rank, ignored),
        _warnings(rank, replicated),
    ]


def test_a_forgotten_root(two: Ranks) -> None:
    """Blocks are sharded and the root is not: the rank that steps later warns, once, with names or shapes. Gradients
    that the user or `replicate` averaged, ignored parameters and a sharded root are no reason to warn.
    """
    named, unnamed, replicas, *silent = [[*a, *b] for a, b in zip(*two.run(_run), strict=True)]
    assert len(named) == len(unnamed) == len(replicas) == 1
    assert "4 others (0.weight, 2.weight, 2.bias, ...)" in named[0]
    assert "4 others (of shape (4, 8), of shape (2, 8), of shape (2,), ...)" in unnamed[0]
    assert silent == [[]] * 4
