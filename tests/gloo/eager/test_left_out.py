"""A unit accumulates gradients under `no_sync`, and the backward passes that reduce leave it out."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard

from ..ranks import on_ranks
from ..training import OPTIMIZERS, assert_same_gradients, assert_same_parameters, executor, local, units
from ..wire import wire

PER_RANK = 3
HYBRID = "_HYBRID_SHARD_ZERO2"


class _Aside(nn.Module):
    """A branch that not every forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.last = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor, takes_aside: bool, checkpointed: bool = False) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=True) if checkpointed else self.first(x)
        x = x.relu()
        return self.last(x + self.aside(x) if takes_aside else x)


def _models(strategy: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = _Aside()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2)) if strategy == HYBRID else None
    model = _Aside()
    for module in (model.first, model.aside, model):
        fully_shard(module, mesh=mesh, sharding_strategy=ShardingStrategy[strategy])
    return reference, model


def _loss(model: nn.Module, seed: int, rank: int, **how: bool) -> Tensor:
    """Of the batch of one rank."""
    torch.manual_seed(100 * seed + rank)
    loss: Tensor = model(torch.randn(PER_RANK, 7, requires_grad=True), **how).square().mean()
    return loss


def _reference_backward(reference: nn.Module, seed: int, ranks: range, **how: bool) -> None:
    for rank in ranks:
        (_loss(reference, seed, rank, **how) / dist.get_world_size()).backward()


def _left_out(rank: int, strategy: str, how: str, whole_model: bool, first_rank_only: bool, checkpointed: bool) -> None:
    reference, model = _models(strategy)
    run = executor(model, how)
    optimizers = [OPTIMIZERS["momentum"](each.parameters()) for each in (reference, model)]
    world = range(dist.get_world_size())
    for seed in (0, 10, 20):
        (model if whole_model else model.aside).set_requires_gradient_sync(False)
        loss = _loss(run, seed, rank, takes_aside=True)
        if rank == 0 or not first_rank_only:
            loss.backward()
        del loss
        _reference_backward(reference, seed, world[:1] if first_rank_only else world, takes_aside=True)
        model.set_requires_gradient_sync(True)
        plain = {"takes_aside": False, "checkpointed": checkpointed}
        for extra in (1, 2):
            _loss(run, seed + extra, rank, **plain).backward()
            _reference_backward(reference, seed + extra, world, **plain)
        assert_same_gradients(model, reference)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(model.clip_grad_norm_(0.1), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=seed == 0)
        assert_same_parameters(model, reference)
    assert all(unit.flats[0].accumulated is None for unit in units(model))


@pytest.mark.parametrize(
    ("world", "row"),
    [
        *(("two", (strategy, "eager", whole_model, False, False))
          for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") for whole_model in (True, False)),
        # A rank that has left out the backward under no_sync, which gathers nothing, takes part with zeros.
        *(("two", (strategy, "eager", True, True, False)) for strategy in ("SHARD_GRAD_OP", "NO_SHARD")),
        # Ranks of all replicas agree on whether there is something to reduce; one of four has gradients.
        ("four", (HYBRID, "eager", True, True, False)),
        # The backward pass within a backward pass, of a reentrant checkpoint, ends nothing.
        ("two", ("FULL_SHARD", "eager", True, False, True)),
        # Graphs for the two ways through a compiled model differ.
        ("two", ("FULL_SHARD", "aot_eager", True, False, False)),
        pytest.param("two", ("FULL_SHARD", "inductor", True, False, False), marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_left_out(request: pytest.FixtureRequest, world: str, row: tuple[Any, ...]) -> None:
    """Its gradients are reduced when the first backward outside no_sync ends, also in the norm (E-ACC-2, E-ACC-7)."""
    request.getfixturevalue(world).run(_left_out, *row)


@on_ranks(2)
def test_left_out_and_cleared(rank: int) -> None:
    """What `zero_grad` has dropped is not reduced, under any strategy."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        reference, model = _models(strategy)
        model.set_requires_gradient_sync(False)
        _loss(model, 0, rank, takes_aside=True).backward()
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        _loss(model, 1, rank, takes_aside=False).backward()
        _reference_backward(reference, 1, range(dist.get_world_size()), takes_aside=False)
        assert all(param.grad is None for param in model.aside.parameters())
        assert_same_gradients(model, reference)


@on_ranks(2)
def test_left_out_with_an_all_reduce_hook(rank: int) -> None:
    """The hook on all-reduces sees the gradients of the unit that is left out as it sees those of the others."""
    grads = []
    for factor in (1, 3):
        _, model = _models(HYBRID)
        for module in (model.first, model.aside, model):
            module.set_all_reduce_hook(lambda grad, factor=factor: grad.mul_(factor))
        with model.no_sync():
            _loss(model, 0, rank, takes_aside=True).backward()
        _loss(model, 1, rank, takes_aside=False).backward()
        grads.append([local(param.grad) for param in model.parameters()])
    for grad, tripled in zip(*grads, strict=True):
        torch.testing.assert_close(3 * grad, tripled)


@on_ranks(2)
def test_nothing_to_reduce(rank: int) -> None:
    """Where no rank has accumulated any, gradients stay None; ranks ask once, with one number, after each no_sync."""
    reference, model = _models("FULL_SHARD")
    optimizers = [OPTIMIZERS["adamw"](each.parameters()) for each in (reference, model)]
    world = range(dist.get_world_size())
    counts = []
    for seed in (0, 10):
        with model.no_sync():
            _loss(model, seed, rank, takes_aside=False).backward()
        with wire() as calls:
            for extra in (1, 2):
                _loss(model, seed + extra, rank, takes_aside=False).backward()
        for extra in (0, 1, 2):
            _reference_backward(reference, seed + extra, world, takes_aside=False)
        counts.append([call.kind for call in calls if call.numel == 1])
        assert all(param.grad is None for param in model.aside.parameters())
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)
    assert [len(each) for each in counts] == [1, 1], counts


@on_ranks(2)
def test_never_reduced(rank: int) -> None:
    """A unit whose every backward is under set_requires_gradient_sync(False): clipping and optimizer.step() raise, and
    nothing has changed; zero_grad drops its gradients. Later ones are reduced when the first synchronized backward
    ends, though that is the backward of another module alone (E-GRAD-9, E-ACC-7)."""
    reference, model = _models("FULL_SHARD")
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    model.aside.set_requires_gradient_sync(False)
    for seed in (0, 1):
        _loss(model, seed, rank, takes_aside=True).backward()
        named = r"parameter aside.weight: its gradient was accumulated under no_sync"
        with pytest.raises(RuntimeError, match=named):
            model.clip_grad_norm_(1.0)
        with pytest.raises(RuntimeError, match=r"a gradient was accumulated under no_sync"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(RuntimeError, match=named):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        assert_same_parameters(model, reference)
    _loss(model, 2, rank, takes_aside=True).backward()
    _reference_backward(reference, 2, range(dist.get_world_size()), takes_aside=True)
    model.set_requires_gradient_sync(True)
    torch.stack([net.first(torch.ones(PER_RANK, 7)).sum() for net in (model, reference)]).sum().backward()
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_a_part_of_a_compiled_model(rank: int) -> None:
    """If only a part was under set_requires_gradient_sync(False), a compiled backward without it reduces nothing of it,
    and the step raises (docs/limits.md).
    """
    _, model = _models("FULL_SHARD")
    run = executor(model, "aot_eager")
    model.aside.set_requires_gradient_sync(False)
    _loss(run, 0, rank, takes_aside=True).backward()
    model.set_requires_gradient_sync(True)
    _loss(run, 1, rank, takes_aside=False).backward()
    with pytest.raises(RuntimeError, match=r"parameter aside.weight: its gradient was accumulated under no_sync"):
        OPTIMIZERS["momentum"](model.parameters()).step()
