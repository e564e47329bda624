"""Models and optimizers with known values, as any rank of any number sees them.

with as_rank(1, 3):
    model, optimizer = known(case, strategy)      every element of parameters and of state is known by its name
    assert_known(model, optimizer)                whatever the sharding
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from models import Case, seeded
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compile import fully_shard
from fsdp_compile.core.sharding import clean_names
from fsdp_compile.core.unit import unit_of
from fsdp_compile.state_dict.sharded_value import managed
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
}


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Play one rank of a group in which nothing is communicated."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def known_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The known full tensor that belongs to a name."""
    generator = seeded(zlib.crc32(f"{name} {seed}".encode()))
    return torch.rand(shape, generator=generator)


def shard(case: Case, strategy: str | None, **options: Any) -> nn.Module:
    """The case's model, sharded over all ranks; None: not at all."""
    torch.manual_seed(0)
    model = case.build()
    if strategy is None:
        return model
    if strategy == "neighbours":
        return fully_shard(model, reshard_after_forward=2)
    if "HYBRID" in strategy:
        options["devices_per_node"] = dist.get_world_size() // 2
    return fully_shard(model, sharding_strategy=ShardingStrategy[strategy], **options)


def start(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer that has stepped once, so that it has state."""
    optimizer = make(model.parameters())
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    """Give every element of parameters and state its known value."""
    for key, value, expected in _values(model, optimizer, seed):
        assert value.shape == expected.shape, key
        value.copy_(expected)


def assert_known(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    """Every element of parameters and state has its known value, bit for bit, and there is state wherever it is due."""
    for key, value, expected in _values(model, optimizer, seed):
        apart = (value != expected).sum()
        assert torch.equal(value, expected), f"{key}: {apart} of {value.numel()} elements differ"


def _values(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    for param, name in clean_names(model).items():
        yield name, *_pair(param, param.detach(), known_tensor(name, tuple(param.shape), seed))
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                assert value.shape in (param.shape, torch.Size()), f"{name} {key}: {tuple(value.shape)}"
                assert managed(param) is None or not value.dim() or isinstance(value, ShardedTensor), f"{name} {key}"
                yield f"{name} {key}", *_pair(param, value, known_tensor(f"{name} {key}", tuple(value.shape), seed))


def _pair(param: nn.Parameter, value: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank stores of a value that belongs to `param`, and of `full`, in the same shape."""
    if not isinstance(value, ShardedTensor):
        return value, full
    unit, index = unit_of(param)
    record = unit.records[index]
    here = full.reshape(-1)[record.first : record.last + 1] if record else full.new_empty(0)
    return value.to_local(), here
