"""`unshard` and `reshard`: gathering ahead by hand, and never computing with older values."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from models import MLP, MODELS, Case, squared_error, vectors
from tiers import all_strategies
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile import FSDPModule, fully_shard, summon_full_params

from ..ranks import on_ranks
from ..training import (
    assert_same_gradients,
    backward,
    build,
    follow,
    local,
    mine,
    reference_and_model,
    shard,
    units,
    whole,
)
from ..wire import wire


def _unshard_all(model: nn.Module, async_op: bool) -> None:
    handles = [module.unshard(async_op=async_op) for module in FSDPModule.fsdp_modules(model)]
    assert all((handle is not None) == async_op for handle in handles)
    for handle in handles[::2]:
        if handle is not None:
            handle.wait()
            handle.wait()


@pytest.mark.parametrize("async_op", [False, True])
@all_strategies
@on_ranks(2)
def test_the_next_forward_does_not_gather(strategy: str, async_op: bool) -> None:
    """What was gathered by hand is used, once, waited for or not; a second call gathers nothing (E-PRE-7)."""
    reference, model = reference_and_model(MLP, strategy)
    for seed in range(2):
        with wire() as calls:
            _unshard_all(model, async_op)
            _unshard_all(model, async_op)
        gathers = sum(call.kind == "gather" for call in calls)
        assert gathers == (0 if strategy == "NO_SHARD" else len(units(model)))
        with wire() as calls:
            loss = MLP.loss(model, mine(MLP, seed))
        assert not any(call.kind == "gather" for call in calls)
        backward(reference, MLP, whole(MLP, seed))
        loss.backward()
        assert_same_gradients(model, reference)
    for each in (reference, model):
        each.zero_grad()
    follow(model, reference, MLP)


def _change(model: nn.Module, how: str) -> None:
    params = list(model.parameters())
    for index, param in enumerate(params):
        if how == "in place":
            param.mul_(0.5)
        elif how == "data":
            param.data = param.data * 0.5
        elif (
            how == "on one rank" and index == len(params) - 1 and local(param).numel()
        ):  # it lies on the last rank alone
            param.mul_(0.5)
    if how == "summoned":
        with summon_full_params(model):
            for param in model.parameters():
                param.data.mul_(0.5)


@pytest.mark.parametrize("how", ["in place", "data", "on one rank", "summoned"])
@on_ranks(2)
def test_older_values_are_not_used(how: str) -> None:
    """Parameters that changed after `unshard`, on any rank, are gathered again by all (E-STRAT-10, E-PRE-7)."""
    model, expected = shard(MLP), shard(MLP)
    _unshard_all(model, True)
    with torch.no_grad():
        _change(model, how)
        _change(expected, how)
        assert torch.equal(model(mine(MLP, 1)[0]), expected(mine(MLP, 1)[0]))


@on_ranks(2)
def test_within_a_forward() -> None:
    """Hooks may gather the next block while one computes; no other collective is needed then (E-PRE-7)."""
    reference, model = reference_and_model(MLP)
    for here, following in zip(model.blocks, [*model.blocks[1:], None], strict=True):
        if following is not None:
            here.register_forward_pre_hook(lambda module, args, following=following: following.unshard(True) and None)
    follow(model, reference, MLP)
    with wire() as calls, torch.no_grad():
        model(mine(MLP, 1)[0])
    assert [call.kind for call in calls] == ["gather"] * len(units(model))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_reshard(strategy: str) -> None:
    """`reshard` frees what is gathered, also between forward and backward, which then gathers again."""
    reference, model = reference_and_model(MLP, strategy)
    _unshard_all(model, True)
    for module in FSDPModule.fsdp_modules(model):
        module.reshard()
    assert all(unit.prefetched is None for unit in units(model))
    backward(reference, MLP, whole(MLP, 1))
    loss = MLP.loss(model, mine(MLP, 1))
    for module in FSDPModule.fsdp_modules(model):
        module.reshard()
    for unit in units(model):
        for gathered in unit.awaiting_backward:
            assert all(buffer.is_free for buffer in gathered.buffers)
    loss.backward()
    assert_same_gradients(model, reference)
    model.zero_grad()
    reference.zero_grad()
    follow(model, reference, MLP)


@on_ranks(2)
def test_unsharded_without_gradients() -> None:
    """What was gathered under no_grad or inference_mode trains: views are made by the forward (E-VIEW-3)."""
    reference, model = reference_and_model(MLP)
    for context in (torch.inference_mode(), torch.no_grad(), nullcontext()):
        entered: AbstractContextManager = context
        with entered:
            _unshard_all(model, True)
        follow(model, reference, MLP, steps=1)


# --- a module inside a unit, alone ------------------------------------------------------------------------------------


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(7, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x[:, None])[0][:, 0]


_RECURRENT = Case(_Recurrent, vectors, squared_error)


class _ReachesIn(nn.Module):
    """Runs a layer of its first block from outside of that block too, as some diffusion transformers do."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7)) for _ in range(2))
        self.head, self.recomputes = nn.Linear(7, 5), recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.blocks[0][0]  # type: ignore[index]  # a Sequential
        ahead = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + ahead)  # type: ignore[no-any-return]  # a module's result


@pytest.mark.parametrize("recomputes", [False, True])
@on_ranks(2)
def test_a_module_inside_a_unit_run_alone(recomputes: bool) -> None:
    """Run outside of the unit's forward it computes what it does unsharded, and one warning for each parameter says
    what that costs (E-FWD-11, E-LIM-2)."""
    case = Case(partial(_ReachesIn, recomputes), vectors, squared_error)
    reference, model = build(case), build(case)
    for each in (*model.blocks, model):  # type: ignore[misc]  # a ModuleList
        fully_shard(each)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        follow(model, reference, case, steps=3)
    said = [str(each.message) for each in caught if "runs alone" in str(each.message)]
    expected = ["parameter blocks.0.0.bias, shape (7,)", "parameter blocks.0.0.weight, shape (7, 7)"]
    assert [text.partition(" is used")[0] for text in said] == expected, said
    assert all("call fully_shard on the module" in text for text in said)


@pytest.mark.parametrize("order", ["any", "tree"])
@on_ranks(2)
def test_a_module_run_alone_under_no_sync(order: str) -> None:
    """What it gives its parameters is added to what has accumulated, and reduced with it; a tree refuses it by name."""
    case = Case(partial(_ReachesIn, False), vectors, squared_error)
    reference, model = build(case), build(case)
    for each in (*model.blocks, model):  # type: ignore[misc]  # a ModuleList
        fully_shard(each, reduction_order=order)
    for seed in range(4):
        backward(reference, case, whole(case, seed))
        model.set_requires_gradient_sync(seed in (1, 3))  # type: ignore[operator]  # a method of FSDPModule
        if order == "tree" and seed == 1:
            with pytest.raises(RuntimeError, match=r"blocks.0.0.* was changed inside no_sync, which .* cannot"):
                backward(model, case, mine(case, seed))
            return
        backward(model, case, mine(case, seed))
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_what_a_module_computes_alone(rank: int) -> None:
    """It computes the same bits as unsharded, with and without gradients, and the model still trains afterwards."""
    reference, model = reference_and_model(MLP)
    recurrent, plain = fully_shard(build(_RECURRENT)), build(_RECURRENT)
    x = torch.randn(3, 7)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            assert torch.equal(model.stem(x), reference.stem(x))
            assert torch.equal(recurrent.cell(x[None])[0], plain.cell(x[None])[0])
    with summon_full_params(model), torch.no_grad():
        assert torch.equal(model.stem(x), reference.stem(x))
    follow(model, reference, MLP)
    squared_error(recurrent, vectors(rank, 3)).backward()
    replicated = shard(MLP, "NO_SHARD")
    replicated.stem(x)


@on_ranks(2)
def test_a_fused_step_is_a_change() -> None:
    """Fused optimizers do not count as changes for autograd; what was gathered before their step is not used."""
    model = shard(MODELS["mlp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    x = torch.ones(2, 7)
    model.unshard()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(model(x), model(x)), "the first forward reads what unshard gathered before the step"
