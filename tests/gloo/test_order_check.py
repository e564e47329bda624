"""Ranks that run units in different orders say so, instead of waiting for each other for ever."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Case, Residual, Stack, squared_error, vectors
from torch import Tensor

from fsdp_compile import fully_shard

from .ranks import Ranks
from .training import backward, build, follow, mine


class _Ordered(Stack):
    """Blocks run in the order in `order`, a list of numbers."""

    order = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


def _ordered() -> Stack:
    return _Ordered([Residual(11, 23) for _ in range(3)])


CASE = Case(_ordered, vectors, squared_error)


@contextmanager
def _debug_level(level: str) -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    try:
        yield
    finally:
        dist.set_debug_level(before)


def _differ(rank: int, orders: list[tuple[int, ...]], message: str) -> None:
    reference = build(CASE)
    with _debug_level("DETAIL"):
        group: Any = dist.new_group()  # at this level torch wraps it: that must not answer first
        model = fully_shard(build(CASE), process_group=group)
        model.order = orders[rank]
        with pytest.raises(RuntimeError, match=message):
            backward(model, CASE, mine(CASE, 1))
        model.order = (0, 1, 2)
        follow(model, reference, CASE)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (
            [(0, 1, 2), (0, 2, 1)],
            r"the same unit next on all ranks after 2 equal ones, found rank 0: blocks.1 \(up.weight, up.bias, "
            r"down.weight, ...\); rank 1: blocks.2 \(",
        ),
        ([(0, 1, 2), (0, 1)], r"after 3 equal ones, found rank 0: blocks.2 \(.*; rank 1: the end of forward"),
        ([(0,), (0, 0)], r"after 2 equal ones, found rank 0: the end of forward; rank 1: blocks.0 \("),
    ],
)
def test_orders_differ(two: Ranks, orders: list[tuple[int, ...]], message: str) -> None:
    """At debug level DETAIL all ranks raise in the first training iteration, before the gather that would hang.

    The model stays usable. E-ORD-3, E-ERR-70.
    """
    two.run(_differ, orders, message)


def _change_later(rank: int) -> None:
    with _debug_level("DETAIL"):
        model = fully_shard(build(CASE))
        model.eval()
        model.order = (2,)
        model(mine(CASE, 0)[0])  # not training: not compared, not the first iteration
        model.train()
        model.order = (0, 1, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for seed in range(2):
                backward(model, CASE, mine(CASE, seed))
        model.order = (0, 2, 1)
        with pytest.warns(UserWarning, match=r"expected blocks.1 .* next, as in the first .*, found blocks.2") as seen:
            for seed in range(3):
                backward(model, CASE, mine(CASE, seed))
        assert len(seen) == 1, [str(warning.message) for warning in seen]


def test_order_changes_later(two: Ranks) -> None:
    """Later iterations are compared with the first on each rank, with one warning per run (E-ORD-3, E-ERR-70)."""
    two.run(_change_later)


def _quiet(rank: int) -> None:
    model = fully_shard(build(CASE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for order in ((0, 1, 2), (2, 1)):
            model.order = order
            backward(model, CASE, mine(CASE, 1))
    assert model._fsdp_runtime._order_check is None


def test_nothing_is_compared_by_default(two: Ranks) -> None:
    """Below debug level DETAIL no order is compared, and none is a fault."""
    two.run(_quiet)


def _evaluate(rank: int) -> None:
    with _debug_level("DETAIL"), torch.no_grad():
        model = fully_shard(build(CASE)).eval()
        model(mine(CASE, 1)[0])
        assert model._fsdp_runtime._order_check is None


def test_evaluation_is_not_compared(two: Ranks) -> None:
    """Only iterations in training mode are compared (E-ORD-3)."""
    two.run(_evaluate)
