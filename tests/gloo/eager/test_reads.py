"""Code outside of a unit's forward that reads a parameter of the unit: a parent, or a loss."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiers import compiled_late
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.tensors.shard_spec import ShardRanks
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from ..ranks import Ranks, on_ranks


class Parent(nn.Module):
    """Multiplies with the weight of its head, which does not run; `penalized` is read beside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.penalized, self.head = nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.penalized(x) * self.penalized.weight.shape[0]
        return nn.functional.linear(hidden, self.head.weight, self.head.bias) + self.penalized.weight.square().sum()


def _fused(model: Any, x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(nn.functional.linear(model.penalized(x), model.head.weight), target)


def _whole(model: Any, x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), target)


def _shard(model: Any, strategy: ShardingStrategy, root: bool) -> None:
    for each in (model.penalized, model.head, *([model] if root else [])):
        fully_shard(each, sharding_strategy=strategy, auto_wrap_policy=None)


FULL, KEPT, REPLICATED = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


@pytest.mark.parametrize(
    ("how", "strategies"),
    [
        ("eager", (FULL, KEPT, REPLICATED)),
        ("aot_eager", (FULL,)),
        pytest.param("aot_eager", (KEPT, REPLICATED), marks=pytest.mark.nightly),
    ],
)
@on_ranks(2)
def test_weights_read_outside_of_their_units(rank: int, how: str, strategies: tuple[ShardingStrategy, ...]) -> None:
    """A parent that reads a child's weight and a loss that reads the head's: gradients of one process."""
    torch.manual_seed(1)
    x, target = torch.rand(6, 4), torch.randint(6, (6,))
    mine = (x.chunk(2)[rank], target.chunk(2)[rank])
    losses: tuple[Callable[..., Tensor], ...] = (_whole, _fused)
    for strategy in strategies:
        for loss in losses:
            torch.manual_seed(0)
            reference, model = Parent(), Parent()
            model.load_state_dict(reference.state_dict())
            _shard(model, strategy, root=loss is _whole)
            run = loss if how == "eager" else torch.compile(loss, backend=how, fullgraph=True)
            for _ in range(2):
                loss(reference, x, target).backward()
                run(model, *mine).backward()
            for (name, param), other in zip(reference.named_parameters(), model.parameters(), strict=True):
                found: Any = other.grad
                if found is None and param.grad is None:  # a unit's reduce gives zeros to what was not used
                    continue
                found = found.full_tensor() if hasattr(found, "full_tensor") else found
                expected = torch.zeros_like(param) if param.grad is None else param.grad
                torch.testing.assert_close(
                    found, expected, msg=lambda text, at=(strategy, loss, name, how): f"{at}: {text}"
                )
            with torch.no_grad():
                torch.testing.assert_close(run(model, x, target), loss(reference, x, target))


class Pair(nn.Module):
    """`table` is embedded by its own forward and multiplied with outside; a unit's only parameter, and one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def _tied(model: Any, tokens: Tensor) -> Tensor:
    hidden = model(tokens) + nn.functional.linear(model.head.bias.expand(len(tokens), 6), model.table.weight.t()) @ (
        model.head.weight.t()
    )
    return hidden.square().mean() + 0.1 * sum(param.square().sum() for param in model.parameters())


def _own(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean()


def _grads_alike(model: nn.Module, reference: nn.Module, what: str) -> None:
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, msg=lambda text, at=(what, name): f"{at}: {text}")


@on_ranks(2)
def test_gradients_of_reads_add_up(rank: int) -> None:
    """What is read outside, sharded or held by every rank in full, has the mean of all gradients: with gradients to add
    to, under no_sync, after parameters were replaced, in a copy, and for `torch.autograd.grad`."""
    tokens = torch.randint(6, (8,), generator=torch.Generator().manual_seed(0))
    mine = tokens.chunk(2)[rank]
    options: list[dict[str, Any]] = [
        {},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"mesh": init_device_mesh("cpu", (2, 1))},
    ]
    for chosen in options:
        torch.manual_seed(0)
        reference = Pair()
        model = copy.deepcopy(reference)
        fully_shard(model.table, **chosen)
        fully_shard(model, **chosen)
        with mock.patch.object(ShardRanks, "average", side_effect=AssertionError):  # nothing is read outside
            _own(model, mine).backward()
        _own(reference, tokens).backward()
        _grads_alike(model, reference, "own")
        for step in range(2):  # adds to gradients that are there
            _tied(model, mine).backward()
            _tied(reference, tokens).backward()
            _grads_alike(model, reference, f"step {step}")
        with model.no_sync():
            _own(model, mine).backward()
            _tied(model, mine).backward()
        _tied(model, mine).backward()
        for loss in (_own, _tied, _tied):
            loss(reference, tokens).backward()
        _grads_alike(model, reference, "no_sync")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pickle.dumps(model.table.weight)
        other = copy.deepcopy(model)
        model.zero_grad()
        reference.zero_grad()
        model.table.weight.data = model.table.weight.detach() * 2
        reference.table.weight.data.mul_(2)
        model.head.weight = nn.Parameter(model.head.weight.detach() + 1)
        reference.head.weight.data.add_(1)
        model(mine)
        _tied(model, mine).backward()
        _tied(reference, tokens).backward()
        _grads_alike(model, reference, "replaced")
        found = torch.autograd.grad(_tied(model, mine), list(model.parameters()))
        torch.testing.assert_close(found, torch.autograd.grad(_tied(reference, tokens), list(reference.parameters())))
        reference.load_state_dict(other.state_dict())
        reference.zero_grad()
        other.zero_grad()
        _tied(other, mine).backward()
        _tied(reference, tokens).backward()
        _grads_alike(other, reference, "copy")
        assert all(len(param._backward_hooks) == 1 for param in [*model.parameters(), *other.parameters()])


def _penalty(model: Any) -> Tensor:
    """Of all elements of some parameters, and of this rank's elements of the others."""
    weights = [each.full_tensor() if isinstance(each, ShardedTensor) else each for each in model.head.parameters()]
    parts = [each.to_local() if isinstance(each, ShardedTensor) else each for each in model.penalized.parameters()]
    return (weights[0] @ weights[0].T).square().sum() + weights[1].norm() + sum(part.square().sum() for part in parts)


def _penalize(rank: int, how: str) -> None:
    torch.manual_seed(1)
    x = torch.rand(4, 4)
    torch.manual_seed(0)
    reference, model = Parent(), Parent()
    model.load_state_dict(reference.state_dict())
    world = dist.get_world_size()
    fully_shard(model, mesh=init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicas", "shards")))

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean() + _penalty(model)

    run = loss if how == "eager" else torch.compile(loss, backend=how)
    for _ in range(2):
        loss(reference, x).backward()
        run(model, x.chunk(world)[rank]).backward()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)
    if how != "eager":
        with pytest.raises(Exception, match=r"used outside of its unit's forward, as from parameters\(\)"):
            torch.compile(_penalty, backend="eager", fullgraph=True)(model)


@compiled_late
def test_penalties_on_what_is_gathered_and_on_parts(two: Ranks, four: Ranks, how: str) -> None:
    """`full_tensor()` and `to_local()` are differentiable, as those of a DTensor; a graph breaks where it has them."""
    (four if how == "eager" else two).run(_penalize, how)
