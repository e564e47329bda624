"""A rank leaves out a unit, or communicates by itself: all ranks raise within seconds, and none uses wrong values."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Ordered
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile import ShardingStrategy, fully_shard
from fsdp_compile.comm import comparison, waits

from ..ranks import on_ranks
from ..training import assert_same_gradients

KEPT: list[dist.ProcessGroup] = []  # with collectives that never end


class _Block(nn.Module):
    """Leaves out its layer, in one of several ways."""

    how = ""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.how in ("input", "other"):
            return x if self.how == "input" else x * 1.5
        with torch.set_grad_enabled(self.how != "no_grad"):
            y = x + self.layer(x).tanh()
        return y.detach() if self.how == "detached" else y


class _Model(nn.Module):
    """Blocks of one size, of which a rank leaves out the middle one, also within a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(8, 8)
        self.how = ""

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.blocks
        middle.how = self.how
        x = first(x)
        if self.how == "not in the loss":
            x = x + 0 * middle(x).detach()
        elif self.how == "not called":
            x = last(x)
        elif self.how == "checkpoint":
            x = checkpoint(lambda x: middle(x), x, use_reentrant=False)
        else:
            x = middle(x)
        return self.head(last(x))


@contextmanager
def _watching() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (waits, comparison):
            stack.enter_context(mock.patch.object(module, "LONG", timedelta(seconds=0.2)))
        yield


def _model(strategy: str) -> nn.Module:
    KEPT.append(dist.new_group(timeout=timedelta(seconds=100)))
    model = _Model()
    for module in (*model.blocks, model):
        fully_shard(module, sharding_strategy=ShardingStrategy[strategy], process_group=KEPT[-1])
    return model


def _batch(rank: int) -> Tensor:
    torch.manual_seed(rank)
    return torch.randn(2, 8)


LEFT_OUT = [
    (strategy, how, first)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for how in ("input", "other", "detached", "no_grad", "not in the loss")
    for first in (False, True)
]
LEFT_OUT += [("FULL_SHARD", "not called", first) for first in (False, True)]
DAILY = [
    ("FULL_SHARD", "input", False),
    ("FULL_SHARD", "detached", True),
    ("FULL_SHARD", "not called", False),
    ("SHARD_GRAD_OP", "not in the loss", False),
    ("NO_SHARD", "other", False),
]


@pytest.mark.parametrize("rows", [DAILY, pytest.param(LEFT_OUT, marks=pytest.mark.nightly)], ids=len)
@on_ranks(2)
def test_a_rank_leaves_out_a_unit(rank: int, rows: list[tuple[str, str, bool]]) -> None:
    """Its output is not of its parameters, is detached, without gradients or not in the loss, or it is not called, on
    one rank, in the first step or the second: both raise, with what each of them began, long before the timeout.
    """
    said = r"ranks communicate different things: rank \d began .*, and rank \d .* instead;|order of units: expected"
    for strategy, how, in_first_step in rows:
        model = _model(strategy)
        if not in_first_step:
            model(_batch(rank)).sum().backward()
        dist.barrier()
        before = time.monotonic()
        model.how = how if rank == 1 else ""
        with _watching(), pytest.raises(RuntimeError, match=said):
            model(_batch(rank)).sum().backward()
            model(_batch(rank))
        assert time.monotonic() - before < 20, (strategy, how)


OPERATOR = r" that an operator needs for a sharded tensor of shape \(8, 8\)"
ALONE = {  # what rank 0 does alone: what both are told
    "norm": (lambda weight: weight.norm(), "the all-reduce"),
    "full": (lambda weight: weight.full_tensor(), "the gather"),
    "grad": (lambda weight: weight.grad.sum(), "the all-reduce"),
}


@on_ranks(2)
def test_an_operator_on_one_rank(rank: int) -> None:
    """`if rank == 0: print(weight.norm())`, `full_tensor()` or a gradient's sum: both ranks raise, with the tensor's
    shape, as soon as the other one communicates something else.
    """
    for run, said in ALONE.values():
        model = _model("SHARD_GRAD_OP")
        model(_batch(rank)).sum().backward()
        before = time.monotonic()
        with _watching(), pytest.raises(RuntimeError, match=said + OPERATOR):
            if rank == 0:
                run(model.head.weight)
            model(_batch(rank)).sum().backward()
        assert time.monotonic() - before < 20


@on_ranks(2)
def test_all_ranks_leave_out_a_unit(rank: int) -> None:
    """Ranks that all depart from the first step's order in the same way go on, with the gradients of an unsharded
    model, None where no loss uses a unit (E-NONE-3); a step in that order compares nothing.
    """
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model, reference = _model(strategy), _Model()
        for how in ("", "detached", "input", "not called", "", "checkpoint", "not in the loss", ""):
            model.zero_grad()
            reference.zero_grad()
            model.how = reference.how = how
            out = model(_batch(rank))
            torch.testing.assert_close(out, reference(_batch(rank)))
            out.sum().backward()
            for each in range(2):
                (reference(_batch(each)).sum() / 2).backward()
            assert_same_gradients(model, reference)
            assert how != "input" or all(param.grad is None for param in model.blocks[1].parameters())
        with mock.patch.object(comparison._Round, "verdict", side_effect=AssertionError):
            model(_batch(rank)).sum().backward()


# --- units, graphs and models that are alike --------------------------------------------------------------------------


def _other_way(rank: int, runs: list[Any], models: list[Ordered]) -> Tensor:
    models[0].order = ((0, 1), (0, 2))[rank]
    return runs[0](_batch(0))


def _other_model(rank: int, runs: list[Any], models: list[Ordered]) -> Tensor:
    return runs[rank](_batch(0))


def _no_backward(rank: int, runs: list[Any], models: list[Ordered]) -> Tensor:
    output = runs[0](_batch(0))
    if rank == 0:
        output.sum().backward()
    return runs[0](_batch(0))


@pytest.mark.parametrize(
    ("how", "grad"),
    [
        ("eager", True),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("aot_eager", True), ("inductor", False))),
    ],
)
@on_ranks(2)
def test_what_is_alike_is_not_mixed_up(rank: int, how: str, grad: bool) -> None:
    """One rank runs another unit, graph or model of the same sizes, or leaves out a backward: all ranks raise and none
    reads values of another one, although all of these have run before."""
    for differ in (_other_way, _other_model, *([_no_backward] if grad else [])):
        torch._dynamo.reset()
        KEPT.append(dist.new_group(timeout=timedelta(seconds=100)))
        models = [Ordered((0, 1)), Ordered((0, 1))]
        for model in models:
            for module in (*model.layers, model):
                fully_shard(module, process_group=KEPT[-1])
        runs = [model if how == "eager" else torch.compile(model, backend=how) for model in models]
        with torch.set_grad_enabled(grad), _watching():
            for run in runs * 2:
                for model in models:
                    for way in ((0, 1), (0, 2)):
                        model.order = way
                        output = run(_batch(0))
                        if grad:
                            output.sum().backward()
            with pytest.raises(
                RuntimeError, match=r"ranks communicate different things|order of models|compiled graph"
            ):
                differ(rank, runs, models)
                runs[0](_batch(0))
