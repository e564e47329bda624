"""What is gathered ahead of a unit that does not come next: how much, and how long it stays."""

from typing import Any

import torch
from models import Residual
from recording import recorded
from torch import Tensor, nn

from fsdp_compile import fully_shard

NAMES = ["0", "1", "2", "3"]


class _Blocks(nn.Sequential):
    """Units of different sizes. The root has no parameters, so that the first unit is free when the last one runs."""

    def __init__(self) -> None:
        super().__init__(*(Residual(11, 23 + 32 * index) for index in range(4)))


class _LeavesOne(_Blocks):
    """Its third block feeds an output of its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self[1](self[0](x))
        left = self[2](x)
        return self[3](x), left


def _sharded(model: nn.Module, **options: Any) -> Any:
    return fully_shard(model, auto_wrap_policy={Residual}, **options)


def _gathers(model: nn.Module) -> list[str]:
    """The units that a forward gathers."""
    with torch.no_grad(), recorded(model) as log:
        model(torch.randn(3, 11))
    return [line.split()[1] for line in log.about("gather")]


def test_no_unit_is_predicted_behind_the_last() -> None:
    """With forward prefetch each forward gathers every unit once, in the order of the first one (E-PRE-2, E-ORD-1)."""
    model = _sharded(_Blocks(), forward_prefetch=True)
    assert [_gathers(model) for _ in range(4)] == [NAMES] * 4


def test_what_runs_alone_has_no_place_in_the_order() -> None:
    """The order is that of a forward of the root, whichever unit has run by itself before (E-ORD-1)."""
    model = _sharded(_Blocks(), forward_prefetch=True)
    with torch.no_grad():
        model[2](torch.randn(3, 11))
    assert [_gathers(model) for _ in range(3)] == [NAMES] * 3


def test_a_unit_that_backward_leaves_out_is_freed_by_the_next_prediction() -> None:
    """What was gathered ahead of it goes when another unit is foreseen, not at the end of the pass: so there is never
    more than one unit too many (E-PRE-3, E-PRE-5)."""
    model = _sharded(_LeavesOne())
    with recorded(model) as log:
        used, left = model(torch.randn(3, 11))
        begin = len(log.lines)
        used.sum().backward()
    freed = log.place("free 2", log.place("gather 2 in unshard", begin))
    assert freed < log.place("gather 0 in unshard", begin) < log.place("backward 1") and left.requires_grad
