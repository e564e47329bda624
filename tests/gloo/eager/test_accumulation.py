"""Gradients over several backward passes: `no_sync`, clearing in between, and what must not be stepped with."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import MLP, Case, mlp, squared_error, vectors
from tiers import all_strategies, both_ways
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

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
from ..wire import assert_freed, wire

SMALL = Case(lambda: mlp(1), vectors, squared_error)


@pytest.mark.parametrize(
    ("pattern", "how"),
    [*((pattern, "eager") for pattern in ("ns", "nnns", "sns", "snnsns", "ss")), ("snns", "aot_eager")],
)
@all_strategies
@on_ranks(2)
def test_patterns(pattern: str, how: str, strategy: str) -> None:
    """Backward passes with (s) and without (n) reduce, in any order, add up to the unsharded gradient.

    Nothing is sent without, and once for each unit with; nothing is compiled again. E-ACC-1..4, E-COMP-8, E-RED-4.
    """
    reference, model = reference_and_model(MLP, strategy)
    run = executor(model, how)
    optimizers = [OPTIMIZERS["momentum"](each.parameters()) for each in (reference, model)]
    for first in (0, 10):  # two rounds: nothing of the first is left in the second
        for seed, letter in enumerate(pattern, first):
            backward(reference, MLP, whole(MLP, seed))
            again = torch._dynamo.config.patch(error_on_recompile=first > 0)
            with model.no_sync() if letter == "n" else nullcontext(), wire() as calls, again:
                backward(run, MLP, mine(MLP, seed))
            # one number: ranks agree on whether what an earlier backward kept is current; bytes: on what they use
            numbers = [call for call in calls if call.kind != "gather" and call.numel > 1 and call.dtype != torch.uint8]
            assert len(numbers) == (len(units(model)) if letter == "s" else 0), (pattern, seed, calls)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=first > 0)
        assert_same_parameters(model, reference)


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


@both_ways
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


EDITS: dict[str, tuple[Callable[[Any], Any], bool]] = {  # and whether the reduced gradients stay that local ones hide
    "scaled": (lambda param: param.grad.mul_(0.5), True),
    "assigned": (lambda param: setattr(param, "grad", torch.ones(param.shape)), False),
    "None": (lambda param: setattr(param, "grad", None), False),
    "zero": (lambda param: torch.optim.SGD([param]).zero_grad(set_to_none=False), False),
}


@both_ways
@pytest.mark.parametrize("edit", EDITS)
@on_ranks(2)
def test_edits_of_local_gradients_count(edit: str, how: str) -> None:
    """What users do to gradients under no_sync counts up to the reduce, between forward and backward too (E-GRAD-6)."""
    change, keeps = EDITS[edit]
    reference, model = reference_and_model(SMALL)
    run = executor(model, how)
    for seed in (0, 10):  # the second time there are reduced gradients, which local ones hide
        hidden = [param.grad for param in reference.parameters()]
        with model.no_sync():
            backward(run, SMALL, mine(SMALL, seed))
        loss = SMALL.loss(run, mine(SMALL, seed + 1))
        reference.zero_grad()
        backward(reference, SMALL, whole(SMALL, seed))
        for each in (model, reference):
            for param in list(each.parameters())[::2]:
                change(param)
        for index, (param, before) in enumerate(zip(reference.parameters(), hidden, strict=True)):
            if before is not None and (index % 2 or keeps):
                param.grad = before + param.grad
        loss.backward()
        backward(reference, SMALL, whole(SMALL, seed + 1))
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
def test_local_gradients_add_up_in_the_reduce_dtype() -> None:
    """Under bfloat16 compute and a float32 reduce, nothing accumulates in bfloat16 (E-MP-20)."""
    model = shard(MLP, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    with model.no_sync():
        backward(model, MLP, mine(MLP, 1))
        assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.float32}


# --- derivatives of second order ------------------------------------------------------------------------------------


@both_ways
@on_ranks(2)
def test_second_order_is_refused(how: str) -> None:
    """A backward pass that is to be differentiated raises at once; the model stays usable.

    E-ERR-11, E-LIM-3, E-BWD-8.
    """
    reference, model = reference_and_model(SMALL)
    run = executor(model, how)
    for syncs in (True, False):
        with nullcontext() if syncs else model.no_sync():
            loss = SMALL.loss(run, mine(SMALL, 1))
            with pytest.raises(RuntimeError, match=r"parameter \S+: derivatives of second order.*create_graph"):
                loss.backward(create_graph=True)
        del loss
        model.zero_grad()
    torch._dynamo.reset()  # what was compiled for create_graph stays so
    follow(run, reference, SMALL)


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
        with wire() as calls:
            for seed in range(2):
                _penalized(reference, whole(MLP, seed)).backward()
                _penalized(model, mine(MLP, seed)).backward()
                assert_same_gradients(model, reference)
                for optimizer in both:
                    optimizer.step()
                    optimizer.zero_grad()
            gc.collect()
            assert_freed(calls, f"after the steps of {strategy}")
    if NIGHTLY:  # by day test_second_order_is_refused
        penalty = _penalized(torch.compile(model, backend="aot_eager"), mine(MLP, 3))
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            penalty.backward()
