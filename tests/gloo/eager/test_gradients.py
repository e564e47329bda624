"""What stands in `.grad` when: for used, unused and frozen parameters, and what cannot be added to."""

import copy
import itertools
from contextlib import ExitStack
from functools import partial
from time import sleep
from typing import Any
from unittest import mock

import pytest
import torch
from models import MLP, MODELS, Case, Residual, seeded, squared_error, vectors
from tiers import all_strategies
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy

from fsdp_compile import FSDPModule, fully_shard, summon_full_params
from fsdp_compile.tensors import sharded_tensor
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.unsharded_tensor import UnreducedGradient

from ..ranks import NIGHTLY, on_ranks
from ..training import (
    OPTIMIZERS,
    assert_same_gradients,
    assert_same_parameters,
    backward,
    build,
    follow,
    local,
    mine,
    reference_and_model,
    shard,
    stored_here,
    whole,
)

# --- in flight --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@all_strategies
@on_ranks(2)
def test_one_backward_of_compiled_and_eager_forwards(rank: int, strategy: str, how: str) -> None:
    """A unit that runs compiled and eagerly, and whose gradients come in one backward, has the sum of both.

    The eager one's may still be reduced when autograd has the compiled one's.
    """

    def sharded(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            if not isinstance(block, FSDPModule):
                fully_shard(block, sharding_strategy=ShardingStrategy[strategy])
        return fully_shard(model, sharding_strategy=ShardingStrategy[strategy])

    def models() -> list[nn.Module]:
        one, other = build(MLP), build(MLP, 1)
        other.blocks[0] = one.blocks[0]  # a unit of two models
        return [one, other]

    expected, found = models(), list(map(sharded, models()))
    compiled = [torch.compile(model, backend=how) for model in found]
    pairs = {
        "one model, compiled first": [(0, compiled[0]), (0, found[0])],
        "one model, eager first": [(0, found[0]), (0, compiled[0])],
        "two models, compiled first": [(0, compiled[0]), (1, found[1])],
        "two models, eager first": [(0, found[0]), (1, compiled[1])],
        "thrice": [(0, compiled[0]), (0, found[0]), (1, compiled[1])],
    }
    # A graph from before the first no_sync does not ask for what was accumulated.
    for (what, runs), passes in itertools.product(list(pairs.items())[:: 1 if NIGHTLY else 3], ([True], [False, True])):
        for syncs in passes:
            losses = [MLP.loss(expected[which], whole(MLP, 10 + at)) for at, (which, _) in enumerate(runs)]
            torch.stack(losses).sum().backward()
            with ExitStack() as stack:
                for model in found if not syncs else ():
                    stack.enter_context(model.no_sync())
                losses = [MLP.loss(run, mine(MLP, 10 + at)) for at, (_, run) in enumerate(runs)]
                for loss in losses:  # the reduces of rank 0 are in flight for a while
                    loss.register_hook(lambda grad: sleep(0.05 * rank))
                torch.stack(losses).sum().backward()
        for model, reference in zip(found, expected, strict=True):
            try:
                assert_same_gradients(model, reference)
            except AssertionError as error:
                raise AssertionError(what) from error
            for each in (model, reference):
                each.zero_grad()


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize(
    ("strategy", "blocks"),
    [("FULL_SHARD", False), ("NO_SHARD", False), pytest.param("FULL_SHARD", True, marks=pytest.mark.nightly)],
)
@on_ranks(2)
def test_detect_anomaly_waits_for_what_it_reads(rank: int, strategy: str, blocks: bool) -> None:
    """It looks for NaN in gradients that are being reduced, which have no values yet."""
    model = shard(MODELS["gpt"], strategy)
    if blocks:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    for block in model.blocks:  # the reduces of rank 0 are in flight for a while
        block.register_forward_hook(lambda *args: args[-1].register_hook(lambda grad: sleep(0.03 * rank)) and None)
    torch.use_deterministic_algorithms(True)  # memory that nothing was written to is NaN
    try:
        for _ in range(2):
            with torch.autograd.detect_anomaly():
                backward(model, MODELS["gpt"], mine(MODELS["gpt"], 1))
    finally:
        torch.use_deterministic_algorithms(False)


# --- which parameters have one ----------------------------------------------------------------------------------------


class _Partly(Residual):
    """A block with a frozen layer, and a parameter that nothing reads."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.up.requires_grad_(False)
        self.spare = nn.Parameter(torch.ones(130))  # part of it on each of two ranks


class _LeavesOut(nn.Module):
    """Two such blocks, of which the second is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Partly(7, 9) for _ in range(2))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x))


@on_ranks(2)
def test_gradients_of_unused_frozen_and_cleared_parameters() -> None:
    """None for all of a unit that was not used, for frozen parameters, and for one unused in a unit that was.

    One that the user sets to None is None until the next backward, which starts it anew; no other changes by that.
    E-NONE-1, E-NONE-2, E-NONE-4.
    """
    case = Case(_LeavesOut, vectors, squared_error)
    reference, model = reference_and_model(case)
    used, unused = model.blocks
    backward(model, case, mine(case, 1))
    assert all(param.grad is None for param in (used.spare, *used.up.parameters(), *unused.parameters()))
    for each in (reference, model):
        each.zero_grad()
        if each is reference:
            backward(each, case, whole(case, 1))
        else:
            backward(each, case, mine(case, 1))
        each.blocks[0].down.bias.grad = None
    before = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model(mine(case, 2)[0])
    now = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert now.keys() == before.keys() and all(torch.equal(now[name], grad) for name, grad in before.items())
    backward(model, case, mine(case, 2))
    backward(reference, case, whole(case, 2))
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        here = stored_here(ours, theirs.grad) if theirs.grad is not None else None
        if here is not None:
            torch.testing.assert_close(local(ours.grad), here, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2)
def test_gradients_of_an_example(rank: int) -> None:
    """Parameters of 3, 25 and 5 elements at 0, 16 and 48 of 64: the second's 16 first elements are the first rank's.

    Of what a rank has nothing of, its gradient has no elements there (E-GRAD-1, E-GRAD-10, on our grid of 16 elements).
    """

    class Abc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5, 5))
            self.c = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return (self.a * x[:3]).sum() + (self.b * x[:25].view(5, 5)).sum() + (self.c * x[:5]).sum()

    model = fully_shard(Abc())
    x = torch.arange(25.0)
    model(x + 2.0 * rank).backward()  # the mean over both ranks is that of x + 1
    mean = x + 1.0
    nothing = mean[:0]
    expected = [(mean[:3], mean[:16], nothing), (nothing, mean[16:], mean[:5])][rank]
    for param, part in zip((model.a, model.b, model.c), expected, strict=True):
        assert param.grad.shape == param.shape and torch.equal(param.grad.to_local(), part)
        assert torch.equal(param.grad.full_tensor(), mean[: param.numel()].view(param.shape))


# --- sums -------------------------------------------------------------------------------------------------------------


def _unreduced(grad: Tensor) -> Tensor:
    """All elements of a gradient that this rank has accumulated."""
    if isinstance(grad, UnreducedGradient):
        return grad.full_tensor()
    assert not isinstance(grad, ShardedTensor), "expected an accumulated gradient, found a reduced one"
    return grad


def _pairs(model: nn.Module, reference: nn.Module) -> Any:
    return zip(model.parameters(), reference.parameters(), strict=True)


@pytest.mark.parametrize("offload", [False, True])
@all_strategies
@on_ranks(2)
def test_gradients_add_up(strategy: str, offload: bool) -> None:
    """Backward adds to what the user has put into `.grad`, to reduced and to local gradients; nothing is lost.

    `.grad` is the reduced gradient after a backward that reduces, and the local one in full shape after one that does
    not, also once another forward has run. E-BWD-6, E-WB-10, E-GRAD-4, E-GRAD-7, E-OFF-6, E-OFF-7,
    E-LIM-1, E-LIM-24, E-RED-5.
    """
    reference, model = build(MLP), shard(MLP, strategy, cpu_offload=CPUOffload(offload))
    for ours, theirs in _pairs(model, reference):
        theirs.grad = torch.randn(theirs.shape, generator=seeded(theirs.numel()))
        ours.grad = torch.empty_like(ours).copy_(theirs.grad)
    for seed in (1, 2):
        backward(reference, MLP, whole(MLP, seed))
        backward(model, MLP, mine(MLP, seed))
        assert_same_gradients(model, reference)
    with model.no_sync():
        backward(model, MLP, mine(MLP, 3))
        accumulated = [_unreduced(param.grad).clone() for param in model.parameters()]
    model(mine(MLP, 4)[0])
    for before, (ours, theirs) in zip(accumulated, _pairs(model, reference), strict=True):
        assert before.shape == theirs.shape
        assert torch.equal(_unreduced(ours.grad), before), "a forward changes none"
    backward(model, MLP, mine(MLP, 4))
    for seed in (3, 4):
        backward(reference, MLP, whole(MLP, seed))
    assert_same_gradients(model, reference)
    kinds = {(type(param.grad), param.grad.shape == param.shape) for param in model.parameters()}
    assert kinds == {(ShardedTensor, True)}


@all_strategies
@on_ranks(2)
def test_gradients_are_seen_when_they_are_reduced(strategy: str) -> None:
    """Hooks on parameters find this rank's part of the mean, and before it nothing is to be seen (E-GRAD-5)."""
    reference, model = reference_and_model(MLP, strategy)
    backward(reference, MLP, whole(MLP, 1))
    seen: dict[str, Tensor] = {}
    early: list[bool] = []

    def arrives(param: nn.Parameter, name: str) -> None:
        seen[name] = local(param.grad).clone()

    def first_block_computes(grad: Tensor) -> None:
        early.append(any(param.grad is not None for param in model.head.parameters()))

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(partial(arrives, name=name))
    model.blocks[0].up.register_forward_hook(lambda module, args, out: out.register_hook(first_block_computes) and None)
    backward(model, MLP, mine(MLP, 1))
    assert early == [False], "the head's are reduced while the first block computes, and not to be seen yet"
    for (name, param), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        here = stored_here(param, theirs.grad)
        torch.testing.assert_close(seen[name], theirs.grad.flatten()[:0] if here is None else here)


# --- how they are asked for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_ways_to_gradients(strategy: str) -> None:
    """backward, autograd.grad, backward(inputs=...) and hooks of three kinds find the same gradients.

    They are the part of the mean over all ranks that this one stores (E-GEN-2).

    A backward that nobody watches runs no operator on sharded tensors.
    """
    reference, model = reference_and_model(MLP, strategy)
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    backward(reference, MLP, whole(MLP, 1))
    expected = [stored_here(ours, theirs.grad) for ours, theirs in pairs]

    def check(found: Any, times: float = 1.0) -> None:
        for grad, here in zip(found, expected, strict=True):
            if here is not None:
                torch.testing.assert_close(local(grad), here * times)

    operators: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        real, recording = sharded_tensor.RULES, mock.MagicMock()
        recording.__getitem__.side_effect = lambda func: (operators.append(func.name()), real[func])[1]
        patch.setattr(sharded_tensor, "RULES", recording)
        backward(model, MLP, mine(MLP, 1))
    assert operators == [], operators  # a gradient is one sharded tensor, not two
    check(ours.grad for ours, _ in pairs)
    earlier = [ours.grad for ours, _ in pairs]
    backward(model, MLP, mine(MLP, 1))
    assert all(ours.grad is before for (ours, _), before in zip(pairs, earlier, strict=True))
    check(earlier, 2.0)
    model.zero_grad()
    check(torch.autograd.grad(MLP.loss(model, mine(MLP, 1)), [ours for ours, _ in pairs]))
    assert all(ours.grad is None for ours, _ in pairs)
    last = pairs[-1][0]
    MLP.loss(model, mine(MLP, 1)).backward(inputs=[last])
    assert [ours.grad is not None for ours, _ in pairs] == [ours is last for ours, _ in pairs]
    model.zero_grad()
    seen: list[str] = []
    handles = [last.register_hook(lambda grad: grad * 2)]
    handles += [last.register_post_accumulate_grad_hook(lambda param: seen.append(f"of it {param.grad is not None}"))]
    node = torch.autograd.graph.get_gradient_edge(last).node
    handles += [node.register_hook(lambda *_: seen.append(f"of its node {last.grad is not None}"))]
    for times in (2.0, 1.0):
        backward(model, MLP, mine(MLP, 1))
        check([*(ours.grad for ours, _ in pairs[:-1]), last.grad / times])
        model.zero_grad()
        for handle in handles[:2]:  # the last one stays: it must be called although nothing is left to accumulate
            handle.remove()
    assert seen == ["of it True", "of its node True", "of its node True"], seen


# --- what cannot be added to ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_plain_gradients() -> None:
    """Plain gradients of the full shape that the user assigns are stepped with and added to (E-WB-6, E-BWD-6)."""
    reference, model = reference_and_model(MLP)
    optimizers = [OPTIMIZERS["adamw"](each.parameters()) for each in (reference, model)]
    backward(reference, MLP, whole(MLP, 1))
    for ours, theirs in _pairs(model, reference):
        ours.grad = theirs.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(model, reference)
    with summon_full_params(model):
        for param in model.parameters():
            param.grad = param.grad * 2.0  # in full shape, and not shown by with_grads: it stays
    for param in reference.parameters():
        param.grad *= 2.0
    backward(reference, MLP, whole(MLP, 2))
    backward(model, MLP, mine(MLP, 2))
    for ours, theirs in _pairs(model, reference):
        torch.testing.assert_close(
            ours.grad.full_tensor() if isinstance(ours.grad, ShardedTensor) else ours.grad, theirs.grad
        )
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(model, reference)


@on_ranks(2)
def test_gradients_that_do_not_fit() -> None:
    """A `.grad` that cannot be added to is refused on each rank: one of another shape when it is assigned (E-ERR-12),
    a sharded one inside no_sync by the next backward, with the parameter's name (E-ERR-26).
    """
    reference, model = reference_and_model(MLP)
    backward(model, MLP, mine(MLP, 1))
    for param in model.parameters():
        with pytest.raises(RuntimeError, match="assign a gradient of size"):
            param.grad = param.grad.to_local().new_zeros(3, 3, 3)
    model.zero_grad()
    with model.no_sync():
        backward(model, MLP, mine(MLP, 1))
        for param in model.parameters():
            param.grad = torch.zeros_like(param)  # sharded, where gradients of each rank add up
        with pytest.raises(
            RuntimeError, match=r"parameter \S+: inside no_sync its gradient is that of this rank, but a sharded"
        ):
            backward(model, MLP, mine(MLP, 2))
    model.zero_grad()
    follow(model, reference, MLP)


class _Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(7, 3, sparse=True), nn.EmbeddingBag(5, 3, sparse=True, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x).sum(1) * self.bags(x)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_sparse_gradients_are_dense(rank: int, strategy: str) -> None:
    """`nn.Embedding(sparse=True)` trains, accumulated or not; its gradients are dense, as all that is reduced."""
    torch.manual_seed(0)
    plain = _Looks()
    model: Any = fully_shard(copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy])
    rows = torch.tensor([[0, 1], [4, 4], [2, 0], [1, 3]])
    plain(rows).square().mean().backward()
    for syncs in (False, True):
        model.set_requires_gradient_sync(syncs)
        (model(rows.chunk(2)[rank]).square().mean() / 2).backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad.to_dense())
