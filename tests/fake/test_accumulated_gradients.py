"""What `.grad` shows while gradients are accumulated without communication."""

from typing import Any
from unittest import mock

import pytest
import torch
from models import Residual
from torch import Tensor, nn

from fsdp_compile import ShardingStrategy, fully_shard
from fsdp_compile.comm import collectives
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.unsharded_tensor import UnreducedGradient


def _step(model: nn.Module) -> None:
    model(torch.ones(3, 7)).sum().backward()


def test_accumulated_gradients_hide_reduced_ones() -> None:
    """`.grad` is this rank's sum, one tensor as long as that grows, also where it was a reduced gradient before; which
    returns, the same tensor, when the sum is reduced (E-ACC-3, E-GRAD-6, E-GRAD-11)."""
    model = fully_shard(nn.Sequential(Residual(7, 9), nn.Linear(7, 2)), auto_wrap_policy={Residual})
    params = list(model.parameters())
    _step(model)
    reduced = [param.grad for param in params]
    assert {type(grad) for grad in reduced} == {ShardedTensor}
    with model.no_sync():
        _step(model)
        shown = [param.grad for param in params]
        assert {type(grad) for grad in shown} == {UnreducedGradient}
        assert [grad.shape for grad in shown] == [param.shape for param in params]
        _step(model)
        assert all(param.grad is grad for param, grad in zip(params, shown, strict=True))
    with pytest.raises(RuntimeError, match=r"0\.up\.weight: its gradient was accumulated under no_sync and not"):
        torch.optim.SGD(params, 0.1).step()
    _step(model)
    assert {type(param.grad) for param in params} == {ShardedTensor}
    assert all(param.grad.shape == param.shape for param in params)


@pytest.mark.parametrize(
    "options",
    [{}, {"sharding_strategy": ShardingStrategy.NO_SHARD}, {"reduction_order": "tree"}],
    ids=["FULL_SHARD", "NO_SHARD", "tree"],
)
def test_accumulated_gradients_add_up(options: dict[str, Any]) -> None:
    """`.grad` is the sum of this rank's gradients so far after each of several equal backward passes; of a tree too,
    whose sum is one of its parts at first, and has memory of its own later."""
    model, seen = fully_shard(nn.Linear(7, 2), **options), []
    with model.no_sync():
        for _ in range(4):
            _step(model)
            seen.append(model.bias.grad.sum().item())
        model.bias.grad = None
        _step(model)
        seen.append(model.bias.grad.sum().item())
    assert seen == [6.0, 12.0, 18.0, 24.0, 6.0]  # of three samples and two outputs


class _Chooses(nn.Sequential):
    """Runs one of its blocks."""

    chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self[self.chosen](x)


def test_ranks_ask_each_other_only_after_no_sync() -> None:
    """Whether anything is accumulated of a unit that a backward pass leaves out: nobody asks where no_sync was never in
    force, each unit is asked for once after it was, and has reduced then."""
    model = fully_shard(_Chooses(Residual(7, 9), Residual(7, 9)), auto_wrap_policy={Residual})
    with mock.patch.object(collectives, "holds_on_all_ranks", wraps=collectives.holds_on_all_ranks) as asks:
        model.set_requires_gradient_sync(True)
        _step(model)
        assert asks.call_count == 0
        with model.no_sync():
            _step(model)
            assert type(model[0].up.bias.grad) is UnreducedGradient
        model.chosen = 1
        for _ in range(2):
            _step(model)
            assert asks.call_count == 1 and type(model[0].up.bias.grad) is ShardedTensor


class _Halves(nn.Module):
    """One unit of two layers, of which one is left out at times."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.both = nn.Linear(7, 2), nn.Linear(7, 2), True

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x) if self.both else self.one(x)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_what_is_not_used_keeps_its_reduced_gradient(strategy: str) -> None:
    """A parameter that no backward pass under no_sync has used shows the gradient that was reduced before, however
    many passes there are, and shows the sum once one has used it (E-ACC-3)."""
    model: Any = fully_shard(_Halves(), sharding_strategy=ShardingStrategy[strategy])
    _step(model)
    reduced, model.both = model.other.bias.grad, False
    values = reduced.to_local().clone() if isinstance(reduced, ShardedTensor) else reduced.clone()
    with model.no_sync():
        for passes in (1, 2, 3):
            _step(model)
            assert model.other.bias.grad is reduced and model.one.bias.grad.sum().item() == 6.0 * passes
        now = reduced.to_local() if isinstance(reduced, ShardedTensor) else reduced
        assert torch.equal(now, values)
        model.both = True
        _step(model)
        assert model.other.bias.grad.sum().item() == 6.0 and model.one.bias.grad.sum().item() == 24.0
