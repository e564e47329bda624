"""`summon_full_params` for one rank, in host memory, with gradients."""

import warnings

import pytest
import torch
import torch.distributed as dist
from models import MLP
from tiers import all_strategies
from torch import nn

from fsdp_compile import fully_shard, summon_full_params
from fsdp_compile.tensors.sharded_tensor import ShardedTensor, set_grad
from fsdp_compile.tensors.unsharded_tensor import UnshardedTensor

from ..ranks import on_ranks
from ..training import assert_same_gradients, backward, follow, local, mine, reference_and_model, units, whole
from ..wire import wire

# --- rank 0, host memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_rank0_only(rank: int, offload: bool) -> None:
    """All gather, rank 0 of the sharding group sees full parameters, others their shards.

    In host memory, too, they are the full ones, without padding (E-SUM-6, E-SUM-7, E-ERR-28).
    """
    reference, model = reference_and_model(MLP)
    sharded = {name: local(param).detach().clone() for name, param in model.named_parameters()}
    with wire() as calls, summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=offload):
        expected = dict(reference.named_parameters()) if rank == 0 else sharded
        for name, param in model.named_parameters():
            assert type(param) is (UnshardedTensor if rank == 0 else ShardedTensor)
            assert torch.equal(param if rank == 0 else local(param), expected[name]) and param.device.type == "cpu"
        with pytest.raises(AssertionError, match="forward needs sharded parameters"), torch.no_grad():
            model.blocks[0](torch.randn(2, 11))
    assert sum(call.kind == "gather" for call in calls) == len(units(model))
    follow(model, reference, MLP)


@all_strategies
@on_ranks(2)
def test_offload_on_all_ranks(strategy: str) -> None:
    """Offloading without rank0_only warns of the copies; edits return; NO_SHARD may do it too.

    With the CPU as compute device nothing is lost: full tensors in host memory are copies (E-OFF-10).
    E-SUM-3, E-SUM-6, E-ERR-45, E-LIM-10.
    """
    reference, model = reference_and_model(MLP, strategy)
    with pytest.warns(UserWarning, match="offload_to_cpu without rank0_only"):
        context = summon_full_params(model, offload_to_cpu=True)
        context.__enter__()
    with torch.no_grad():
        for each in (reference, model):
            each.head.weight.mul_(0.5)
    context.__exit__(None, None, None)
    follow(model, reference, MLP)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writeback", [True, False])
@all_strategies
@on_ranks(2)
def test_gradients(strategy: str, writeback: bool) -> None:
    """Gradients are the unsharded ones; edits are kept, or dropped; no gradient anywhere is None, without a gather.

    E-SUM-9, E-SUM-12, E-GRAD-1, E-GRAD-6.
    """
    reference, model = reference_and_model(MLP, strategy)
    with wire() as calls, summon_full_params(model, with_grads=True):
        assert all(param.grad is None for param in model.parameters())
    gathers = sum(call.kind == "gather" for call in calls)
    assert gathers == (0 if strategy == "NO_SHARD" else len(units(model))), "of parameters alone"
    backward(reference, MLP, whole(MLP, 1))
    backward(model, MLP, mine(MLP, 1))
    before = [param.grad for param in model.parameters()]
    with summon_full_params(model, with_grads=True, writeback=writeback):
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
            ours.grad.mul_(0.5)
            if writeback:
                theirs.grad.mul_(0.5)
    assert all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))
    assert_same_gradients(model, reference)
    follow(model, reference, MLP)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@on_ranks(2)
def test_ranks_without_gradients(rank: int, dtype: torch.dtype) -> None:
    """A rank without a gradient takes part with zeros of the right dtype, says so at debug level, and has none after.

    E-SUM-9, E-SUM-10, E-ERR-34.
    """
    model = fully_shard(nn.Linear(16, 4, bias=False).to(dtype))
    if rank == 0:
        model.weight.grad = torch.full_like(model.weight, 2.0)
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with summon_full_params(model, with_grads=True):
                expected = torch.tensor([2.0, 2.0, 0.0, 0.0])[:, None].expand(4, 16)
                assert model.weight.grad.dtype == dtype and torch.equal(model.weight.grad, expected.to(dtype))
                model.weight.grad.fill_(5.0)
    finally:
        dist.set_debug_level(level)
    said = [str(w.message) for w in caught if "has a gradient on other ranks" in str(w.message)]
    assert len(said) == rank and all(f"rank {rank}: parameter weight" in text for text in said)
    assert model.weight.grad is None if rank else (local(model.weight.grad) == 5.0).all()


@on_ranks(2)
def test_gradients_of_another_dtype() -> None:
    """Gradients kept in low precision are shown in the stored dtype and keep theirs (E-GRAD-2, E-SUM-9)."""
    model = fully_shard(nn.Linear(16, 4, bias=False))
    low = torch.full_like(model.weight, 2.0, dtype=torch.bfloat16)
    set_grad(model.weight, low)
    with summon_full_params(model, with_grads=True):
        assert model.weight.grad.dtype == torch.float32 and model.weight.grad.shape == (4, 16)
        model.weight.grad.add_(1.0)
    assert model.weight.grad.dtype == torch.bfloat16 and (model.weight.grad == 3.0).all()


@on_ranks(2)
def test_gradients_cleared_inside() -> None:
    """A gradient set to None inside is None after: no full gradient to write back is no error (E-ERR-47)."""
    reference, model = reference_and_model(MLP)
    backward(model, MLP, mine(MLP, 1))
    with summon_full_params(model, with_grads=True):
        model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    follow(model, reference, MLP)
