"""Code outside of a unit's forward that reads a parameter of the unit: a parent, or a loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard

from .ranks import Ranks


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


def _read(rank: int, how: str) -> None:
    torch.manual_seed(1)
    x, target = torch.rand(6, 4), torch.randint(6, (6,))
    mine = (x.chunk(2)[rank], target.chunk(2)[rank])
    losses: tuple[Callable[..., Tensor], ...] = (_whole, _fused)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        if strategy is ShardingStrategy.NO_SHARD and how == "eager":
            continue  # its parameters are plain ones, whose gradients autograd adds up on each rank
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


def test_weights_read_outside_of_their_units(two: Ranks) -> None:
    """A parent that reads a child's weight and a loss that reads the head's: gradients of one process."""
    for how in ("eager", "aot_eager"):
        two.run(_read, how)
