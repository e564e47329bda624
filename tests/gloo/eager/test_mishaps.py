"""Things users do that an earlier version answered with wrong numbers, a crash or a leak."""

import gc
import time
import weakref
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from models import MLP, Residual, Stack, squared_error, vectors
from tiers import all_strategies
from torch import Tensor, nn

from fsdp_compile import fully_shard

from ..ranks import on_ranks
from ..training import executor, mine, shard, units
from ..wire import wire

every_way = pytest.mark.parametrize(
    "how", ["eager", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("aot_eager", "inductor"))]
)


class _OnesGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight * 1.0

    @staticmethod
    def backward(ctx, grad):
        return torch.ones_like(grad)


class _ConstantGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ _OnesGradient.apply(self.weight) + self.bias)


@every_way
@on_ranks(2)
def test_a_constant_gradient_is_not_taken_for_none(rank: int, how: str) -> None:
    """A gradient that is a constant in the graph arrives; only zeros stand for no gradient."""
    torch.manual_seed(0)
    model = fully_shard(_ConstantGradient())
    squared_error(executor(model, how), vectors(rank, 4)).backward()
    (unit,) = units(model)
    record = unit.records[0]
    assert record and torch.equal(model.weight.grad.to_local(), torch.ones(record.numel))


class _Passes(Residual):
    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, prompt = both
        return super().forward(x + prompt), prompt


@on_ranks(2)
def test_a_leaf_passed_through_keeps_no_forward_alive() -> None:
    """A persistent tensor that blocks hand on does not collect hooks: each step gathers each unit twice, no more."""
    model = fully_shard(nn.Sequential(_Passes(7, 9), _Passes(7, 9)), reshard_after_forward=True)
    prompt = torch.zeros(7, requires_grad=True)
    counts = []
    for seed in range(3):
        with wire() as calls:
            model((vectors(seed, 4)[0], prompt))[0].sum().backward()
        counts.append(sum(call.kind == "gather" for call in calls))
    assert counts == [4, 4, 4], counts


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("a user's backward fails")


@pytest.mark.parametrize("sync", [True, False])
@all_strategies
@on_ranks(2)
def test_a_model_whose_backward_failed_can_be_dropped(strategy: str, sync: bool) -> None:
    """Neither open views nor reduces under way keep the shards of a model that is gone."""
    model = shard(MLP, strategy)
    shards = [weakref.ref(flat.shard) for unit in units(model) for flat in unit.flats]
    model.blocks[0].register_forward_pre_hook(lambda _, args: (_FailsInBackward.apply(args[0]),))
    with pytest.raises(ArithmeticError), nullcontext() if sync else model.no_sync():
        squared_error(model, mine(MLP, 1)).backward()
    del model
    # Nodes that were ready when a backward failed stay in the queue of autograd's engine, and keep the parameters that
    # they lead to, of any model, until the next backward in this thread.
    nn.Linear(2, 2)(torch.ones(2)).sum().backward()
    gc.collect()
    assert [alive() for alive in shards] == [None] * len(shards)


def _bytes_alive() -> int:
    for _ in range(2):  # collectives that the last step began hold their buffers until the other rank has come
        dist.barrier()
    time.sleep(0.1)  # gloo's threads let go of what they have sent, for which they need the interpreter
    gc.collect()
    storages = {id(each): each for each in map(Tensor.untyped_storage, filter(_is_plain, gc.get_objects()))}
    return sum(storage.nbytes() for storage in storages.values())


def _is_plain(value: object) -> bool:
    return type(value) is Tensor


def _assert_equal_steps(model: nn.Module, other: nn.Module, how: str) -> None:
    """Three steps of both have the same bits."""
    executors = [executor(each, how) for each in (model, other)]
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (model, other)]
    for seed in range(3):
        for each, optimizer in zip(executors, optimizers, strict=True):
            squared_error(each, mine(MLP, seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for param, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param.to_local(), expected.to_local())


often = pytest.mark.parametrize("failures", [20, pytest.param(200, marks=pytest.mark.nightly)])


@often
@on_ranks(2)
def test_failures_in_a_row_leak_nothing(failures: int) -> None:
    """Memory is flat while backward passes fail that had begun to gather units; later steps have the bits of a model
    that never failed.
    """
    model, other = shard(MLP), shard(MLP)  # of which the other never fails
    hook = model.blocks[1].register_forward_pre_hook(lambda _, args: (_FailsInBackward.apply(args[0]),))
    alive = []
    for seed in range(failures):
        with pytest.raises(ArithmeticError):
            squared_error(model, mine(MLP, seed)).backward()
        model.zero_grad()
        alive.append(_bytes_alive() if seed in (3, failures - 1) else 0)
    assert alive[-1] <= alive[3], alive  # the unit before was being gathered each time
    hook.remove()
    _assert_equal_steps(model, other, "eager")


_armed = False


@torch.library.custom_op("fsdp_compile_tests::copy", mutates_args=())
def _copy(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("fsdp_compile_tests::copy_unless_armed", mutates_args=())
def _copy_unless_armed(grad: Tensor) -> Tensor:
    if _armed:
        raise ArithmeticError("a user's operator fails")
    return grad.clone()


_copy.register_fake(torch.empty_like)
_copy_unless_armed.register_fake(torch.empty_like)
_copy.register_autograd(lambda ctx, grad: _copy_unless_armed(grad))


class _MayFail(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return _copy(super().forward(x))


@often
@pytest.mark.parametrize("how", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@on_ranks(2)
def test_failures_of_compiled_backward_in_a_row_leak_nothing(how: str, failures: int) -> None:
    """Memory, and torch's list of collectives that are not waited for, are flat while an operator in a compiled
    backward fails, between collectives and their waits; later steps have the bits of a model that never failed.
    """
    global _armed
    torch.manual_seed(0)
    model = Stack([Residual(11, 9), _MayFail(11, 9), Residual(11, 9)])
    other = deepcopy(model)
    run, other = executor(fully_shard(model), how), fully_shard(other)
    squared_error(run, mine(MLP, 0)).backward()
    model.zero_grad()
    alive, in_registry = [], []
    _armed = True
    for seed in range(failures):
        with pytest.raises(ArithmeticError):
            squared_error(run, mine(MLP, seed)).backward()
        model.zero_grad()
        if seed in (3, failures - 1):
            alive.append(_bytes_alive())
            in_registry.append(torch._C._distributed_c10d._get_work_registry_size())
    _armed = False
    assert alive[1] <= alive[0] and in_registry[1] <= in_registry[0], (alive, in_registry)
    _assert_equal_steps(model, other, how)
