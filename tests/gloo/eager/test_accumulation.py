"""Gradients over several backward passes: `no_sync`, clearing in between, and what must not be stepped with."""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODELS, vectors
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_compile import fully_shard

from ..comm.test_communication import _assert_freed, _spied
from ..ranks import NIGHTLY, on_ranks
from ..training import (
    OPTIMIZERS,
    assert_same_gradients,
    assert_same_parameters,
    backward,
    executor,
    follow,
    mine,
    reference_and_model,
    shard,
    units,
    whole,
)

MLP = MODELS["mlp"]
all_strategies = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])


@pytest.mark.parametrize("pattern", ["ns", "nnns", "sns", "snnsns", "ss"])
@all_strategies
@on_ranks(2)
def test_patterns(pattern: str, strategy: str) -> None:
    """Backward passes with (s) and without (n) reduce, in any order, add up to the unsharded gradient.

    Nothing is sent without. E-ACC-1..4, E-RED-4.
    """
    reference, model = reference_and_model(MLP, strategy)
    optimizers = [OPTIMIZERS["momentum"](each.parameters()) for each in (reference, model)]
    for first in (0, 10):  # two rounds: nothing of the first is left in the second
        for seed, letter in enumerate(pattern, first):
            with model.no_sync() if letter == "n" else nullcontext(), _spied() as calls:
                backward(reference, MLP, whole(MLP, seed))
                backward(model, MLP, mine(MLP, seed))
            # one number: ranks agree on whether what an earlier backward kept is current
            reduced = any(call.kind != "gather" and call.numel > 1 for call in calls)
            assert reduced == (letter == "s"), (pattern, seed, calls)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)


@on_ranks(2)
def test_local_gradients_are_shown() -> None:
    """Without a reduce `.grad` is this rank's gradient in full shape and hides the reduced one, which comes back.

    E-GRAD-6, E-ACC-3. Each rank holds gradients of full size then (E-LIM-24).
    """
    model = fully_shard(nn.Linear(32, 2, bias=False))
    shape = model.weight.shape

    def once() -> None:
        model(torch.ones(1, 32)).sum().backward()

    once()
    with model.no_sync():
        once()
        assert model.weight.shape == shape and model.weight.grad.shape == (2, 32)
        torch.testing.assert_close(model.weight.grad, torch.ones(2, 32))
    once()
    assert model.weight.grad.shape == shape
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full(shape, 3.0))


@on_ranks(2)
def test_context_manager_and_decorator() -> None:
    """no_sync nests, survives exceptions, decorates; only the root has it, between steps.

    E-ACC-1, E-ACC-6, E-ERR-43, E-ERR-9.
    """
    reference, model = reference_and_model(MLP)
    (first, *_), flags = units(model), lambda: {unit.syncs for unit in units(model)}
    with pytest.raises(KeyError), model.no_sync():
        assert flags() == {False}
        raise KeyError
    assert flags() == {True}
    with model.no_sync():
        with model.no_sync():
            pass
        assert flags() == {False}
    assert flags() == {True}

    @model.no_sync()
    def local(seed: int) -> None:
        backward(model, MLP, mine(MLP, seed))

    for seed in (1, 2):
        local(seed)
        assert first.flats[0].accumulated is not None and flags() == {True}
    backward(model, MLP, mine(MLP, 3))
    for seed in (1, 2, 3):
        backward(reference, MLP, whole(MLP, seed))
    assert_same_gradients(model, reference)
    with pytest.raises(RuntimeError, match=r"no_sync: \w+ is inside another sharded module"):
        model.blocks[0].no_sync().__enter__()
    model.head.register_forward_hook(lambda module, args, out: model.no_sync().__enter__())
    with pytest.raises(ValueError, match="no_sync needs idle units"):
        MLP.loss(model, mine(MLP, 1))


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_backward_of_some_parameters(strategy: str, how: str) -> None:
    """Under no_sync `backward(inputs=...)` adds to the gradients of these alone; `torch.autograd.grad` returns reduced
    ones, without those that were accumulated, which the next backward reduces."""
    reference, model = reference_and_model(MLP, strategy)
    run = executor(model, how)
    for each, batch in ((reference, whole), (model, mine)):
        with each.no_sync() if each is model else nullcontext():
            loss = MLP.loss(run if each is model else each, batch(MLP, 1))
            loss.backward(inputs=[each.blocks[1].up.weight, *each.head.parameters()])
        backward(run if each is model else each, MLP, batch(MLP, 2))
    assert_same_gradients(model, reference)
    with model.no_sync():
        MLP.loss(run, mine(MLP, 4)).backward()
        found = torch.autograd.grad(MLP.loss(run, mine(MLP, 3)), [*model.parameters()])
    expected = torch.autograd.grad(MLP.loss(reference, whole(MLP, 3)), [*reference.parameters()])
    for mine_, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine_.full_tensor() if hasattr(mine_, "full_tensor") else mine_, theirs)
    for each, batch in ((reference, whole), (model, mine)):
        backward(run if each is model else each, MLP, batch(MLP, 5))
    backward(reference, MLP, whole(MLP, 4))
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("synced_before", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_clearing_and_scaling(set_to_none: bool, synced_before: bool) -> None:
    """zero_grad without a reduce drops local gradients and the reduced ones that they hide; scaling counts.

    E-GRAD-6.
    """
    reference, model = reference_and_model(MLP)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    if synced_before:
        backward(model, MLP, mine(MLP, 7))
    with model.no_sync():
        backward(model, MLP, mine(MLP, 8))
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, MLP, mine(MLP, 1))
        assert all(param.grad is not None and param.grad.any() for param in model.parameters())
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)
    backward(model, MLP, mine(MLP, 2))
    backward(reference, MLP, whole(MLP, 1))
    for param in reference.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)
    backward(reference, MLP, whole(MLP, 2))
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_backward_after_a_fused_step() -> None:
    """A fused step, which counts no version of plain parameters, is a change: backward of an older forward raises."""
    model = shard(MLP, "NO_SHARD")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    backward(model, MLP, mine(MLP, 1))
    loss = MLP.loss(model, mine(MLP, 2))
    optimizer.step()
    with pytest.raises(RuntimeError, match="was changed in place between forward and backward"):
        loss.backward()


@on_ranks(2)
def test_gradients_assigned_while_accumulating() -> None:
    """A plain tensor in full shape that is assigned to `.grad` under `no_sync` replaces what this rank accumulated."""
    reference, model = reference_and_model(MLP)
    ones = [torch.ones(param.shape) for param in reference.parameters()]
    with model.no_sync():
        backward(model, MLP, mine(MLP, 1))
        for param, grad in zip(model.parameters(), ones, strict=True):
            param.grad = grad.clone()
    backward(model, MLP, mine(MLP, 2))
    for param, grad in zip(reference.parameters(), ones, strict=True):
        param.grad = grad
    backward(reference, MLP, whole(MLP, 2))
    assert_same_gradients(model, reference)


@all_strategies
@on_ranks(2)
def test_steps_without_reduce_are_refused(strategy: str) -> None:
    """An optimizer refuses to step with gradients that no reduce has seen; other models' do not mind (E-GRAD-9)."""
    reference, model = reference_and_model(MLP, strategy)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with model.no_sync():
        backward(model, MLP, mine(MLP, 1))
        with pytest.raises(RuntimeError, match=r"parameter stem.weight: its gradient was accumulated under no_sync"):
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"parameter stem.weight: its gradient was accumulated under no_sync"):
        optimizer.step()
    assert_same_parameters(model, reference)
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    OPTIMIZERS["momentum"](other.parameters()).step()
    optimizer.zero_grad()
    optimizer.step()
    with model.no_sync():
        backward(model, MLP, mine(MLP, 1))
    optimizer.step(lambda: backward(model, MLP, mine(MLP, 2)))  # reduces the sum of both
    for seed in (1, 2):
        backward(reference, MLP, whole(MLP, seed))
    OPTIMIZERS["momentum"](reference.parameters()).step()
    assert_same_parameters(model, reference)
    follow(model, reference, MLP)


@on_ranks(2)
def test_a_compiled_step_still_works() -> None:
    """The check before optimizer steps lets `torch.compile(optimizer.step)` through (E-GRAD-9)."""
    reference, model = reference_and_model(MLP)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    backward(model, MLP, mine(MLP, 1))
    torch.compile(optimizer.step, backend="eager")()
    other = OPTIMIZERS["momentum"](reference.parameters())
    backward(reference, MLP, whole(MLP, 1))
    other.step()
    assert_same_parameters(model, reference)


@on_ranks(2)
def test_local_gradients_add_up_in_the_reduce_dtype() -> None:
    """Under bfloat16 compute and a float32 reduce, nothing accumulates in bfloat16 (E-MP-20)."""
    model = shard(MLP, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    with model.no_sync():
        backward(model, MLP, mine(MLP, 1))
        assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.float32}


# --- several backwards, unused outputs, second order ------------------------------------------------------------------


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = MLP.build()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).tanh()
        return self.left(x), self.right(x)


@pytest.mark.parametrize("together", [True, False])
@all_strategies
@on_ranks(2)
def test_two_heads(rank: int, strategy: str, together: bool) -> None:
    """Two losses of one forward, with one backward or with one each: the trunk gets both gradients (E-FIN-7)."""
    torch.manual_seed(0)
    reference = _TwoHeads()
    torch.manual_seed(0)
    model = fully_shard(_TwoHeads(), sharding_strategy=ShardingStrategy[strategy])
    batch = vectors(1, 3 * dist.get_world_size())[0]
    for net, x in ((reference, batch), (model, batch.chunk(dist.get_world_size())[rank])):
        left, right = (out.square().mean() for out in net(x))
        if together:
            (left + right).backward()
        else:
            left.backward(retain_graph=True)
            right.backward()
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_second_order_is_refused() -> None:
    """A backward pass that is to be differentiated raises at once; the model stays usable.

    E-ERR-11, E-LIM-3, E-BWD-8.
    """
    reference, model = reference_and_model(MLP)
    loss = MLP.loss(model, mine(MLP, 1))
    with pytest.raises(RuntimeError, match=r"parameter \S+: derivatives of second order.*create_graph"):
        loss.backward(create_graph=True)
    del loss
    model.zero_grad()
    follow(model, reference, MLP)


def _penalized(model: nn.Module, inputs: Any) -> Tensor:
    """The loss, and the penalty on the gradient of another forward's outputs with respect to its inputs."""
    x = inputs[0].detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    return MLP.loss(model, inputs) + (gradient.square().flatten(1).sum(1) - 1).square().mean()


@on_ranks(2)
def test_gradient_penalty() -> None:
    """A gradient with respect to inputs can be differentiated again, under every strategy; not compiled (E-LIM-3)."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        reference, model = reference_and_model(MLP, strategy)
        both = [OPTIMIZERS["momentum"](each.parameters()) for each in (model, reference)]
        with _spied() as calls:
            for seed in range(2):
                _penalized(reference, whole(MLP, seed)).backward()
                _penalized(model, mine(MLP, seed)).backward()
                assert_same_gradients(model, reference)
                for optimizer in both:
                    optimizer.step()
                    optimizer.zero_grad()
            gc.collect()
            _assert_freed(calls, f"after the steps of {strategy}")
    if NIGHTLY:  # by day test_second_order_is_refused of test_compiled_accumulation.py
        penalty = _penalized(torch.compile(model, backend="aot_eager"), mine(MLP, 3))
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            penalty.backward()
