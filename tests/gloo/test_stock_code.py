"""Code that was written for unsharded models, on sharded ones: right, or refused with a reason."""

import copy
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile import fully_shard
from fsdp_compile.core.unit import unit_of

from .ranks import Ranks
from .training import local, stored_here


class _Penalized(nn.Module):
    """Adds a penalty on its parameters, and scales by the norm of one, inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        penalty = sum(param.pow(2).sum() for param in self.parameters())
        factor = next(self.blocks[0].parameters()).norm()
        return self.head(x).square().mean() * factor + 0.1 * penalty


def _penalty(rank: int) -> None:
    reference = _Penalized()
    model = fully_shard(copy.deepcopy(reference))
    world = dist.get_world_size()
    batch = torch.randn(4 * world, 7, generator=torch.Generator().manual_seed(1))
    expected = torch.stack([reference(part) for part in batch.chunk(world)])
    expected.mean().backward()
    loss = model(batch.chunk(world)[rank])
    torch.testing.assert_close(loss.detach(), expected[rank].detach())
    loss.backward()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert other.grad is not None and param.grad is not None
        here = stored_here(param, other.grad)
        if here is not None:
            torch.testing.assert_close(local(param.grad), here, rtol=1e-4, atol=1e-6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"used a sharded parameter, as from parameters\(\)"):
        compiled(batch.chunk(world)[rank])


def test_parameters_inside_forward(two: Ranks) -> None:
    """What a forward computes from `self.parameters()` has the unsharded model's values and gradients.

    Compiled, it is refused.
    """
    two.run(_penalty)


# --- forward on the instance ------------------------------------------------------------------------------------------


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def _twice(self: nn.Sequential, x: Tensor) -> Tensor:
    return 2 * self[2](self[1](self[0](x)))


def _set_forward(model: nn.Module, how: str) -> None:
    if how == "replaced":
        model.forward = MethodType(_twice, model)  # type: ignore[method-assign]  # what is tested
    else:  # as accelerate patches autocast around a forward
        patched = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
        model.forward = MethodType(patched, model)  # type: ignore[method-assign]  # what is tested


def _own_forward(rank: int, how: str, when: str, strategy: str) -> None:
    reference, sharded = _net(), _net()
    _set_forward(reference, how)
    if when == "before":
        _set_forward(sharded, how)
    fully_shard(sharded, sharding_strategy=ShardingStrategy[strategy])
    if when == "after":
        _set_forward(sharded, how)
    world = dist.get_world_size()
    batch = torch.randn(4 * world, 7, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        reference(batch).float().square().mean().backward()
        sharded(batch.chunk(world)[rank]).float().square().mean().backward()
    close = {"rtol": 3e-2, "atol": 3e-3} if how == "autocast" else {"rtol": 1e-4, "atol": 1e-6}
    for param, other in zip(sharded.parameters(), reference.parameters(), strict=True):
        assert param.grad is not None and other.grad is not None
        here = stored_here(param, other.grad)
        if here is not None:
            torch.testing.assert_close(local(param.grad), here, **close)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_forward_set_on_the_instance(two: Ranks, strategy: str) -> None:
    """A `forward` that was set on the module itself, before or after sharding, runs with parameters gathered."""
    for how in ("replaced", "autocast"):
        for when in ("before", "after"):
            two.run(_own_forward, how, when, strategy)


# --- refused ----------------------------------------------------------------------------------------------------------


def _added(rank: int) -> None:
    model = fully_shard(_net())
    model.append(nn.Linear(3, 3))
    x = torch.ones(2, 7)
    for run in (model, torch.compile(model, backend="eager")):
        with pytest.raises(ValueError, match=r"parameter 3.weight was added after fully_shard"):
            run(x)
    model[3].requires_grad_(False)  # what does not train may be there
    model(x).sum().backward()
    with pytest.raises(ValueError, match=r"module is what torch.compile made of"):
        fully_shard(torch.compile(_net()))
    with pytest.raises(RuntimeError, match=r"parameter weight of Linear is part of a unit"):
        fully_shard(_net(), auto_wrap_policy=None)[0].double()


def test_refused(two: Ranks) -> None:
    """Trained parameters that nobody would average, compiled wrappers and the conversion of a part are refused."""
    two.run(_added)


def _data_parallel(rank: int) -> None:
    world = dist.get_world_size()
    batch = torch.randn(4 * world, 7, generator=torch.Generator().manual_seed(1))
    reference = _net()
    reference(batch).square().mean().backward()
    for options in ({}, {"init_sync": False}):
        inner = _net()
        inner.register_buffer("shift", torch.full((7,), float(rank)))  # is broadcast
        fully_shard(inner[0])
        before = [local(param).clone() for param in inner.parameters()]
        for wrapped in (inner, inner[0], fully_shard(_net())):
            model = DistributedDataParallel(wrapped, **options)
            with pytest.raises(ValueError, match=r"weight is averaged by DistributedDataParallel around .* too"):
                model(batch)
        assert all(torch.equal(local(param), old) for param, old in zip(inner.parameters(), before, strict=True))
    for apply in (replicate, replicate_with_fsdp):
        with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
            apply(fully_shard(_net()))
    inner = _net()
    fully_shard(inner[0])
    model = replicate(inner)
    for _ in range(2):
        model.zero_grad()
        model(batch.chunk(world)[rank]).square().mean().backward()
        for param, other in zip(inner.parameters(), reference.parameters(), strict=True):
            assert param.grad is not None and other.grad is not None
            here = stored_here(param, other.grad) if unit_of(param) else other.grad
            if here is not None:
                torch.testing.assert_close(local(param.grad), here, rtol=1e-4, atol=1e-6)
    assert len(replicate.state(model)._ddp_weakref()._module_parameters) == 2


def test_data_parallel_around_a_sharded_module(two: Ranks) -> None:
    """DistributedDataParallel around sharded modules is refused in the first forward, and so is `replicate` of one.

    Weights stay as they were. `replicate` around sharded modules averages the gradients of the others alone.
    """
    two.run(_data_parallel)
