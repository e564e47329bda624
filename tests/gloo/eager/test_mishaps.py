"""Things users do that an earlier version answered with wrong numbers, a crash or a leak."""

import gc
import time
import weakref
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from models import MODELS, Residual, Stack, squared_error, vectors
from torch import Tensor, nn

from fsdp_compile import fully_shard

from ..comm.test_communication import _spied
from ..ranks import on_ranks
from ..training import assert_same_gradients, executor, follow, mine, reference_and_model, shard, units, whole

MLP = MODELS["mlp"]
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


def _copy_of(reference: nn.Module) -> nn.Module:
    model = MLP.build()
    model.load_state_dict(reference.state_dict())
    for mine_, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        mine_.requires_grad_(theirs.requires_grad)
    return model


@every_way
@on_ranks(2)
def test_parameters_frozen_at_first_can_be_thawed(how: str) -> None:
    """Parameters that were frozen in fully_shard, some of a unit or all, train once requires_grad is set (E-NONE-5)."""
    reference, model = reference_and_model(MLP)
    for each in (reference, model):
        each.stem.requires_grad_(False)
        each.blocks[0].requires_grad_(False)
    sharded = fully_shard(_copy_of(reference))
    run = executor(sharded, how)
    follow(run, reference, MLP, steps=1)
    for each in (reference, sharded):
        each.requires_grad_(True)
    follow(run, reference, MLP)


@on_ranks(4)
def test_data_replaced_before_a_compiled_function_is_taken_over() -> None:
    """A compiled function that calls the model trains the data that parameters were given since (E-WB-1)."""
    reference, model = reference_and_model(MLP)
    run = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
    for step in range(3):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            squared_error(run, mine(MLP, step)).backward()
        squared_error(reference, whole(MLP, step)).backward()
        assert_same_gradients(model, reference)
        for each in (model, reference):
            each.zero_grad()
            for param in each.parameters():
                param.data = param.data * 0.5


class _ReturnsWeight(Residual):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.up.weight.t()


class _Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_ReturnsWeight(7, 9) for _ in range(2))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, weight = block(x)
            x = x + weight.square().mean()
        return self.head(x)


@every_way
@on_ranks(2)
def test_a_unit_may_return_its_parameter(how: str) -> None:
    """A view of a parameter among a unit's outputs stays readable: the unit is not freed beneath it."""
    torch.manual_seed(0)
    reference = _Penalised()
    torch.manual_seed(0)
    model = fully_shard(_Penalised())
    batch = vectors(3, 4)
    for each in (reference, executor(model, how)):
        squared_error(each, batch).backward()
    assert_same_gradients(model, reference)


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
        with _spied() as calls:
            model((vectors(seed, 4)[0], prompt))[0].sum().backward()
        counts.append(sum(call.kind == "gather" for call in calls))
    assert counts == [4, 4, 4], counts


class _EmptyFirst(Residual):
    def __init__(self) -> None:
        super().__init__(11, 9)
        up, down = self.up, self.down
        del self.up, self.down
        self.nothing, self.up, self.down = nn.Parameter(torch.empty(0, 3)), up, down


@on_ranks(2)
def test_a_parameter_without_elements_may_come_first(rank: int) -> None:
    """The storage that is freed is the gathered one, whichever parameter is first (E-FLAT-12)."""
    model = fully_shard(Stack([_EmptyFirst(), _EmptyFirst()]))
    loss = squared_error(model, vectors(rank, 4))
    for block in model.blocks:
        (unit,) = units(block)
        (gathered,) = unit.awaiting_backward
        (buffer,) = gathered.buffers
        assert buffer.nbytes >= unit.flats[0].layout.numel * 4 and buffer.storage.nbytes() == 0
    loss.backward()
    assert model.blocks[0].nothing.grad is None and model.blocks[0].up.weight.grad is not None


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("a user's backward fails")


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
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


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_backward_with_other_values_than_forward_is_refused(strategy: str) -> None:
    """Parameters that are stepped between forward and backward give an error, as unsharded, not wrong gradients."""
    model = shard(MLP, strategy)
    loss = squared_error(model, mine(MLP, 1))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)
    with pytest.raises(RuntimeError, match="run backward before the optimizer's step"):
        loss.backward()
