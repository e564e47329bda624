"""`summon_full_params`: what is seen inside, which edits stay."""

import copy

import pytest
import torch
import torch.nn.functional as F
from models import MLP, MODELS, Residual, seeded
from tiers import all_strategies
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_compile import FullyShardedDataParallel, fully_shard, summon_full_params
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.unsharded_tensor import UnshardedTensor

from ..ranks import on_ranks
from ..training import (
    assert_same_gradients,
    assert_same_parameters,
    backward,
    build,
    executor,
    follow,
    full_parameters,
    mine,
    reference_and_model,
    shard,
    whole,
)
from ..wire import wire

# --- what is seen -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("name", ["mlp", "tied", "frozen"])
@on_ranks(2)
def test_full_parameters(name: str, strategy: str) -> None:
    """Inside, the same objects are in full shape under clean names, without padding; after, sharded, and train.

    E-SUM-1, E-SUM-5, E-SUM-13, E-SUM-15, E-MOD-4, E-VIEW-6, E-VIEW-7, E-VIEW-8, E-VIEW-9.
    """
    reference, model = reference_and_model(MODELS[name], strategy)
    before = dict(model.named_parameters())
    with summon_full_params(model):
        inside = dict(model.named_parameters())
        expected = dict(reference.named_parameters())
        assert list(inside) == list(expected) and list(before) == list(inside)
        for key, param in inside.items():
            assert param is before[key], f"{key} is another object"
            assert param.shape == expected[key].shape and torch.equal(param, expected[key]), key
        for ours, theirs in zip(model.modules(), reference.modules(), strict=True):
            for key, param in theirs._parameters.items():
                if param is not None:
                    assert getattr(ours, key) is ours._parameters[key] and torch.equal(getattr(ours, key), param)
    assert_same_parameters(model, reference)
    assert {type(param) for param in model.parameters()} == {ShardedTensor}
    follow(model, reference, MODELS[name])


@on_ranks(2)
def test_of_any_module() -> None:
    """Any module will do: all units with a parameter in it are gathered; recurse=False takes its own. E-SUM-1."""
    reference, model = reference_and_model(MLP)
    block = model.blocks[0]
    with wire() as calls, summon_full_params(model, recurse=False):
        assert type(model.head.weight) is UnshardedTensor and type(block.up.weight) is ShardedTensor
    assert len(calls) == 1
    with summon_full_params(block.up):
        assert torch.equal(block.up.weight, reference.blocks[0].up.weight) and type(model.head.weight) is ShardedTensor
    with summon_full_params(model.blocks), summon_full_params(model.stem):
        assert torch.equal(model.blocks[2].up.weight, reference.blocks[2].up.weight)
    with wire() as calls, summon_full_params(block.up, recurse=False), summon_full_params(nn.Linear(2, 3)):
        assert type(block.up.weight) is ShardedTensor
    assert not calls
    wrapper = FullyShardedDataParallel(build(MLP), auto_wrap_policy={Residual})
    with FullyShardedDataParallel.summon_full_params(wrapper, recurse=False):
        assert type(wrapper.head.weight) is UnshardedTensor
        assert type(wrapper.blocks[0].up.weight) is ShardedTensor


@on_ranks(2)
def test_stored_precision() -> None:
    """Full parameters have the stored dtype, whatever the unit computes in (E-MP-7, E-MP-19, E-SUM-5)."""
    reference = build(MLP)
    model = fully_shard(build(MLP), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    with summon_full_params(model):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert ours.dtype == torch.float32 and torch.equal(ours, theirs)


# --- edits ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_each_rank_keeps_its_part(rank: int) -> None:
    """Each rank fills with its number: zeros, then ones (E-SUM-8)."""
    model = fully_shard(nn.Linear(16, 4, bias=False))
    with summon_full_params(model), torch.no_grad():
        model.weight.fill_(rank)
    expected = torch.arange(2.0).repeat_interleave(2)[:, None].expand(4, 16)
    assert torch.equal(full_parameters(model)["weight"], expected)


CHANGES = ("in place", "data", "copy through data", "objects")
DAILY = ("copy through data",)  # compiled


@all_strategies
@pytest.mark.parametrize(
    ("change", "how"),
    [
        *((change, "eager") for change in CHANGES),
        *(
            pytest.param(change, "aot_eager", marks=() if change in DAILY else pytest.mark.nightly)
            for change in CHANGES
        ),
    ],
)
@on_ranks(2)
def test_edits_are_kept(how: str, strategy: str, change: str) -> None:
    """Edits in place, new data and new parameters all train on, eagerly and compiled (E-SUM-5, E-SUM-8, E-WB-3)."""
    reference, model = reference_and_model(MLP, strategy)
    run = executor(model, how)
    follow(run, reference, MLP)
    for each in (reference, model):
        with summon_full_params(each), torch.no_grad():
            for module in each.modules():
                for name, param in list(module._parameters.items()):
                    if change == "in place":
                        param.mul_(0.5)
                    elif change == "data":
                        param.data = param.data * 0.5
                    elif change == "copy through data":
                        param.data.mul_(0.5)
                    else:
                        setattr(module, name, nn.Parameter(param * 0.5))
    assert_same_parameters(model, reference)
    follow(run, reference, MLP)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_losses_of_full_parameters(rank: int, strategy: str) -> None:
    """What a rank computes from full parameters and its data gives them the mean gradient of all ranks."""
    x = torch.randn(4, 7, generator=seeded(1))
    torch.manual_seed(0)
    reference = nn.Linear(7, 5)
    model = fully_shard(copy.deepcopy(reference), sharding_strategy=ShardingStrategy[strategy])
    for is_backward_inside in (True, False):
        F.linear(x, reference.weight).square().mean().backward()
        with summon_full_params(model):
            loss = F.linear(x.chunk(2)[rank], model.weight).square().mean()
            if is_backward_inside:
                loss.backward()
        if not is_backward_inside:
            loss.backward()
        grad = model.weight.grad
        torch.testing.assert_close(
            grad.full_tensor() if isinstance(grad, ShardedTensor) else grad, reference.weight.grad
        )
    if strategy == "FULL_SHARD":
        with summon_full_params(model, rank0_only=True, writeback=False):
            loss = model.weight.square().sum() if rank == 0 else None
            if loss is not None:
                with pytest.raises(RuntimeError, match=r"a backward within summon_full_params\(rank0_only=True\)"):
                    loss.backward()


@pytest.mark.parametrize("change", ["in place", "objects"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_dropped_edits_leave_no_trace(strategy: str, change: str) -> None:
    """Without writeback edits are gone, also where a forward kept gathered parameters (E-SUM-8, E-SUM-11)."""
    reference, model = reference_and_model(MLP, strategy)
    backward(model, MLP, mine(MLP, 1))  # what a forward keeps must not be what is edited
    with torch.no_grad():
        expected = model(mine(MLP, 2)[0])
        with summon_full_params(model, writeback=False):
            for module in model.modules():
                for name, param in list(module._parameters.items()):
                    if change == "objects":
                        setattr(module, name, nn.Parameter(torch.full_like(param, 3.0)))
                    else:
                        param.fill_(3.0)
        assert torch.equal(model(mine(MLP, 2)[0]), expected)
    model.zero_grad()
    assert_same_parameters(model, reference)
    follow(model, reference, MLP)


@on_ranks(2)
def test_edits_of_replicated_parameters_persist() -> None:
    """Under NO_SHARD the parameters themselves are edited, with or without writeback (E-SUM-8)."""
    model = shard(MLP, "NO_SHARD")
    with summon_full_params(model, writeback=False), torch.no_grad():
        model.head.weight.fill_(3.0)
    assert (model.head.weight == 3.0).all()


@pytest.mark.parametrize("change", ["data", "objects"])
@on_ranks(2)
def test_replacing_by_another_shape(change: str) -> None:
    """Data of another shape is refused at once, a parameter on leaving: its unit is as it was (E-WB-4, E-ERR-32)."""
    reference, model = reference_and_model(MLP)
    found = r"expected .*\(23, 11\).* found .*\(5,\)", r"\(5,\) inside summon_full_params; keep .*\(23, 11\)"
    error = (ValueError, found[0]) if change == "data" else (RuntimeError, found[1])
    with pytest.raises(error[0], match=error[1]), summon_full_params(model), torch.no_grad():
        model.head.weight.zero_()  # another unit: kept
        reference.head.weight.zero_()
        model.blocks[0].down.weight.zero_()
        if change == "data":
            reference.blocks[0].down.weight.zero_()  # kept too: the exception is one inside
            model.blocks[0].up.weight.data = torch.zeros(5)
        else:
            model.blocks[0].up.weight = nn.Parameter(torch.zeros(5))
    assert_same_parameters(model, reference)
    follow(model, reference, MLP)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_between_forward_and_backward(strategy: str) -> None:
    """Reading parameters between a forward and its backward changes nothing, also where that keeps them gathered.

    E-SUM-14, E-LIM-6, E-VIEW-13.
    """
    reference, model = reference_and_model(MLP, strategy)
    losses = [MLP.loss(reference, whole(MLP, 1)), MLP.loss(model, mine(MLP, 1))]
    with summon_full_params(model):
        pass
    for loss in losses:
        loss.backward()
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_edits_between_forward_and_backward() -> None:
    """Edits are noticed by a backward that would gather them, even those made through `.data` (E-LIM-6)."""
    reference, model = reference_and_model(MLP)
    loss = MLP.loss(model, mine(MLP, 1))
    for each in (reference, model):
        with summon_full_params(each), torch.no_grad():
            for param in each.parameters():
                param.data.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"parameter .* was changed in place between forward and backward"):
        loss.backward()
    model.zero_grad()
    follow(model, reference, MLP)
