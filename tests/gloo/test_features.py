"""What a training script may do with a sharded model: each thing alone, then clean steps with the right numbers."""

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from joint import JointPasses
from models import MODELS, MODULES, Case, mlp, squared_error, vectors
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from .ranks import Ranks, on_ranks
from .training import (
    OPTIMIZERS,
    assert_bitwise,
    assert_same_gradients,
    assert_same_parameters,
    backward,
    build,
    executor,
    follow,
    mine,
    reference_and_model,
    units,
    whole,
)

HOWS = ["eager", "aot_eager"]
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
both_ways = pytest.mark.parametrize("how", HOWS)
LATE = pytest.mark.nightly
# Rows of the feature table and other tests here show the same of compiled models every day.
compiled_late = pytest.mark.parametrize("how", ["eager", pytest.param("aot_eager", marks=LATE)])
all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)

MLP = MODELS["mlp"]
TWO = Case(lambda: mlp(2), vectors, squared_error)


# --- parameters -------------------------------------------------------------------------------------------------------


def _train(rank: int, case: Case, how: str, strategy: str = "FULL_SHARD") -> None:
    reference, model = reference_and_model(case, strategy)
    follow(executor(model, how), reference, case)


COMPILED = ("reads_child", "tied_blocks")  # every day


def _train_module(rank: int, name: str, how: str) -> None:
    _train(rank, MODULES[name], how)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "eager") for name in MODULES),
        *(pytest.param(name, "aot_eager", marks=() if name in COMPILED else LATE) for name in MODULES),
    ],
)
def test_modules(two: Ranks, name: str, how: str) -> None:
    """Parameters are found wherever module code looks for them; tied ones get the sum of their gradients."""
    two.run(_train_module, name, how)


@pytest.mark.parametrize("name", ["tied_blocks", "tied_ends"])
def test_tied_on_four(four: Ranks, name: str) -> None:
    """Tied parameters are one parameter whichever rank stores it (E-LIM-5)."""
    four.run(_train_module, name, "eager")


@all_strategies
@compiled_late
@on_ranks(2)
def test_tied_embedding_and_head(how: str, strategy: str) -> None:
    """One parameter under two names stays one, and its gradient is the unsharded one (E-VIEW-9, E-GRAD-3)."""
    reference, model = reference_and_model(MODELS["tied"], strategy)
    assert model.head._parameters["weight"] is model.tokens._parameters["weight"]
    follow(executor(model, how), reference, MODELS["tied"])


@compiled_late
@on_ranks(2)
def test_frozen(how: str) -> None:
    """Frozen parameters keep `grad` None and their value; the others train as unsharded.

    E-FRZ-1, E-GRAD-1.
    """
    case = MODELS["frozen"]
    reference, model = reference_and_model(case)
    before = {name: param.detach().clone() for name, param in model.named_parameters() if not param.requires_grad}
    follow(executor(model, how), reference, case)
    for name, param in model.named_parameters():
        if name in before:
            assert param.grad is None, f"{name} is frozen and has a gradient"
            assert torch.equal(param, before[name]), f"{name} is frozen and has changed"


@compiled_late
@on_ranks(2)
def test_freezing_between_steps(how: str) -> None:
    """A layer may be frozen and thawed in mid-training."""
    reference, model = reference_and_model(MLP)
    run = executor(model, how)
    for trained in (True, False, True):
        for each in (reference, model):
            each.blocks[1].up.requires_grad_(trained)
        follow(run, reference, MLP)


class _Unused(nn.Module):
    """Leaves one of three blocks out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP.build()

    def forward(self, x: Tensor) -> Tensor:
        stem, (first, _, last), head = self.net.stem, self.net.blocks, self.net.head
        return head(last(first(stem(x))))


@both_ways
@on_ranks(2)
def test_a_unit_that_is_not_used(rank: int, how: str) -> None:
    """The gradients of a unit that took no part in forward stay None (E-NONE-3)."""
    _train(rank, Case(_Unused, vectors, squared_error), how)


@compiled_late
@on_ranks(2)
def test_optimizer_made_before(how: str) -> None:
    """Every parameter object stays the same, so an optimizer made before `fully_shard` trains as one made after.

    E-VIEW-6, E-INIT-3.
    """
    models = [build(MLP), build(MLP)]
    params = [list(model.parameters()) for model in models]
    early = OPTIMIZERS["adamw"](models[0].parameters())
    for model in models:
        fully_shard(model)
    late = OPTIMIZERS["adamw"](models[1].parameters())
    runs = [executor(model, how) for model in models]
    for step in range(3):
        for run, optimizer in zip(runs, (early, late), strict=True):
            backward(run, MLP, mine(MLP, step))
            optimizer.step()
        assert_bitwise(*models, f"step {step}")
        for optimizer in (early, late):
            optimizer.zero_grad()
    for model, ours in zip(models, params, strict=True):
        assert all(a is b for a, b in zip(model.parameters(), ours, strict=True)), "a parameter was replaced"


# --- forwards and backwards -------------------------------------------------------------------------------------------


@all_strategies
@compiled_late
@on_ranks(2)
def test_accumulation(how: str, strategy: str) -> None:
    """Two backward passes leave the sum of their gradients (E-ACC-4, E-RED-4, 5)."""
    reference, model = reference_and_model(MLP, strategy)
    run = executor(model, how)
    for seed in (1, 2):
        backward(reference, MLP, whole(MLP, seed))
        backward(run, MLP, mine(MLP, seed))
    assert_same_gradients(model, reference)
    follow(run, reference, MLP)


@pytest.mark.parametrize("separate", [True, pytest.param(False, marks=LATE)])
@all_strategies
@compiled_late
@on_ranks(2)
def test_two_forwards_before_backward(how: str, strategy: str, separate: bool) -> None:
    """Two forwards may wait for backward at once, for one backward or for two in any order (E-BWD-7, E-RED-1)."""
    reference, model = reference_and_model(MLP, strategy)
    run = executor(model, how)
    for net, cut in ((reference, whole), (run, mine)):
        losses = [MLP.loss(net, cut(MLP, seed)) for seed in (1, 2)]
        for loss in losses[::-1] if separate else [losses[0] + losses[1]]:
            loss.backward()
    assert_same_gradients(model, reference)
    follow(run, reference, MLP)


@all_strategies
@compiled_late
@on_ranks(2)
def test_two_backwards_of_one_forward(how: str, strategy: str) -> None:
    """A graph that is retained may be run backward again (E-FIN-7)."""
    reference, model = reference_and_model(MLP, strategy)
    run = executor(model, how)
    for net, cut in ((reference, whole), (run, mine)):
        loss = MLP.loss(net, cut(MLP, 1))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, reference)
    follow(run, reference, MLP)


@all_strategies
@compiled_late
@on_ranks(2)
def test_evaluation_between_steps(how: str, strategy: str) -> None:
    """A forward without gradients sees the parameters of that moment and leaves the next training step alone.

    E-STRAT-10.
    """
    reference, model = reference_and_model(MLP, strategy)
    run = executor(model, how)
    for seed, mode in enumerate((torch.no_grad, torch.inference_mode, torch.no_grad)):
        with mode():
            expected, found = MLP.loss(reference, mine(MLP, 50 + seed)), MLP.loss(run, mine(MLP, 50 + seed))
        torch.testing.assert_close(found, expected)
        follow(run, reference, MLP, steps=1, first_seed=seed)


@pytest.mark.parametrize("held", [True, pytest.param(False, marks=LATE)])
@all_strategies
@compiled_late
@on_ranks(2)
def test_forward_without_backward(how: str, strategy: str, held: bool) -> None:
    """A forward whose backward does not come leaves nothing stale: the next one sees parameters changed in place.

    E-STRAT-10.
    """
    reference, model = reference_and_model(MLP, strategy)
    run = executor(model, how)
    pending = MLP.loss(run, mine(MLP, 7))
    if not held:
        del pending
    with torch.no_grad():
        for each in (model, reference):
            for param in each.parameters():
                param.mul_(0.5)
    follow(run, reference, MLP)


@torch.no_grad()
def _halve(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(0.5)


@torch.no_grad()
def _halve_one(model: nn.Module) -> None:
    model.blocks[0].up.bias.mul_(0.5)


@torch.no_grad()
def _halve_what_is_stored(model: nn.Module) -> None:
    for param in model.parameters():
        (param.to_local() if isinstance(param, ShardedTensor) else param).mul_(0.5)


CHANGED = (
    r"parameter .*was changed in place between forward and backward",
    "modified by an inplace operation",  # autograd's own, of what a graph has saved
)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_parameters_changed_between_forward_and_backward(strategy: str) -> None:
    """As in plain autograd, that is an error and not a wrong gradient; the model stays usable.

    The check is made in an autograd hook: what it says arrives (E-LIM-6, E-GEN-4).
    """
    for change in (_halve, _halve_one, _halve_what_is_stored):
        reference, model = reference_and_model(MLP, strategy)
        loss = MLP.loss(model, mine(MLP, 7))
        for each in (model, reference):
            change(each)
        with pytest.raises(RuntimeError, match="|".join(CHANGED)):
            loss.backward()
        model.zero_grad()
        follow(model, reference, MLP)


def _gradient_of_input(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x)[0]


READ_AGAIN = (
    ("FULL_SHARD", False, _halve, "inputs"),
    ("FULL_SHARD", False, _halve_one, "second"),
    ("FULL_SHARD", True, _halve_what_is_stored, "first"),
    ("SHARD_GRAD_OP", True, _halve, "first"),
    ("NO_SHARD", True, _halve_one, "only"),
    ("NO_SHARD", False, _halve_one, "eager between"),
)
READ_AGAIN_LATE = (
    ("FULL_SHARD", False, _halve, "first"),
    ("FULL_SHARD", True, _halve, "first"),
    ("FULL_SHARD", True, _halve_what_is_stored, "only"),
    ("NO_SHARD", True, _halve, "first"),
    ("NO_SHARD", False, _halve, "first"),
    ("NO_SHARD", False, _halve, "inputs"),
)


@pytest.mark.parametrize("cases", [READ_AGAIN, pytest.param(READ_AGAIN_LATE, marks=LATE)], ids=len)
@on_ranks(2)
def test_each_backward_compares_what_its_forward_has_read(cases: tuple) -> None:
    """Of compiled forwards between which parameters changed in place, frozen or not, each backward has the gradients of
    the values that its own forward had, or raises."""
    for strategy, frozen, change, order in cases:
        what = f"{strategy}, frozen {frozen}, {change.__name__}, {order}"
        model, before = build(TWO), build(TWO)
        model.requires_grad_(not frozen)
        for block in model.blocks:
            fully_shard(block, sharding_strategy=ShardingStrategy[strategy])
        fully_shard(model, sharding_strategy=ShardingStrategy[strategy])
        torch._dynamo.reset()
        run = torch.compile(model, backend=JointPasses())
        batches = [whole(MLP, seed)[0].requires_grad_() for seed in (7, 8)]
        first = run(batches[0]).sum()
        after = copy.deepcopy(before)
        if order == "eager between":
            model(batches[1])
        change(model)
        change(after)
        second = run(batches[1]).sum() if order in ("first", "second") else None
        try:
            if order == "inputs":
                batches[0].grad = torch.autograd.grad(first, batches[0])[0]
            else:
                (second if order == "second" and second is not None else first).backward()
        except RuntimeError as error:
            assert order != "second" and re.search("|".join(CHANGED), str(error)), f"{what}: {error}"
            assert frozen or re.search(r"parameters? (stem|blocks\.\d)\.\w+", str(error)), f"{what}: {error}"
            continue
        assert order == "second" or strategy == "SHARD_GRAD_OP", f"{what}: nothing was said"
        x, values = (batches[1], after) if order == "second" else (batches[0], before)
        torch.testing.assert_close(x.grad, _gradient_of_input(values, x), msg=what)


def _side_by_side(rank: int, how: str, strategies: tuple[str, str]) -> None:
    pairs = [reference_and_model(MLP, strategy) for strategy in strategies]
    runs = [executor(model, how) for _, model in pairs]
    for seed in range(3):
        for run, (reference, _) in zip(runs, pairs, strict=True):
            follow(run, reference, MLP, steps=1, first_seed=seed)


@compiled_late
@pytest.mark.parametrize("other", ["SHARD_GRAD_OP", pytest.param("NO_SHARD", marks=LATE)])
def test_two_models(two: Ranks, how: str, other: str) -> None:
    """Models of one class with different strategies train side by side."""
    two.run(_side_by_side, how, ("FULL_SHARD", other))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("name", ["mlp", pytest.param("tied", marks=LATE)])
@compiled_late
@on_ranks(2)
def test_deepcopy(how: str, name: str, strategy: str) -> None:
    """A copy of a sharded model is sharded, trains, and neither model moves the other."""
    case = MODELS[name]
    reference, model = reference_and_model(case, strategy)
    follow(executor(model, how), reference, case)
    before = [param.detach().clone() for param in model.parameters()]
    other, other_reference = copy.deepcopy(model), copy.deepcopy(reference)
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}, "a parameter is shared"
    assert all(param.grad is None for param in other.parameters()), "as of a plain model, whose copy has no gradients"
    follow(executor(other, how), other_reference, case, first_seed=200)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "the original has changed"
    follow(executor(model, how), reference, case, first_seed=300)
    assert_same_parameters(other, other_reference)


def _one_block(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    block = getattr(model, "_orig_mod", model)
    return block(inputs[0]).square().mean()


@all_strategies
@compiled_late
@on_ranks(2)
def test_block_alone(how: str, strategy: str) -> None:
    """A block may be run outside of its root, and the root afterwards."""
    reference, model = reference_and_model(MLP, strategy)
    alone = Case(MLP.build, partial(vectors, inputs=11), _one_block)
    backward(reference.blocks[1], alone, whole(alone, 3))
    backward(executor(model.blocks[1], how), alone, mine(alone, 3))
    for each in (reference, model):
        assert all(param.grad is None for param in each.blocks[0].parameters()), "another block has a gradient"
    assert_same_gradients(model.blocks[1], reference.blocks[1])
    follow(executor(model, how), reference, MLP)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("SHARD_GRAD_OP", marks=LATE)])
@pytest.mark.parametrize("where", ["units", "inside units"])
@on_ranks(2)
def test_compiled_regions(where: str, strategy: str) -> None:
    """Units, or modules inside units, may be compiled while the rest stays eager; steps then compile nothing again."""
    reference, model = reference_and_model(MODELS["gpt"], strategy)
    for block in model.blocks:
        region = block if where == "units" else block.up
        region.compile(backend="aot_eager", fullgraph=True)
    follow(model, reference, MODELS["gpt"])
    with torch._dynamo.config.patch(error_on_recompile=True):
        follow(model, reference, MODELS["gpt"])


# --- exceptions -------------------------------------------------------------------------------------------------------


class _Expected(Exception):
    """Raised by a hook below."""


def _raise(*_: Any) -> None:
    raise _Expected


def _fail_in_forward(model: nn.Module) -> Any:
    return model.blocks[1].down.register_forward_pre_hook(_raise)


def _fail_in_backward(model: nn.Module) -> Any:
    return model.blocks[1].down.register_forward_hook(lambda module, args, out: out.register_hook(_raise) and None)


def _fail_after_reduce(model: nn.Module) -> Any:
    return units(model.blocks[1])[0].flats[0].autograd_shard.register_hook(_raise)


def _fail_at_output(model: nn.Module) -> Any:
    return model.register_forward_hook(lambda module, args, out: out.register_hook(_raise) and None)


FAILURES = {f.__name__: f for f in (_fail_in_forward, _fail_in_backward, _fail_after_reduce, _fail_at_output)}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize(
    ("failure", "then"),
    [
        *((failure, "eager") for failure in FAILURES),
        *(pytest.param(failure, "aot_eager", marks=LATE) for failure in FAILURES),
    ],
)
@on_ranks(2)
def test_exceptions(failure: str, strategy: str, then: str) -> None:
    """After an exception in forward, in backward or between units, the next step computes the right numbers."""
    reference, model = reference_and_model(MLP, strategy)
    hook = FAILURES[failure](model)
    with pytest.raises(_Expected):
        backward(model, MLP, mine(MLP, 5))
    hook.remove()
    follow(executor(model, then), reference, MLP)


@pytest.mark.parametrize("failure", ["shape", "hook"])
@on_ranks(2)
def test_exceptions_compiled(failure: str) -> None:
    """A compiled model survives an exception while it is traced and one after its backward."""
    reference, model = reference_and_model(MLP)
    run = executor(model, "aot_eager")
    follow(run, reference, MLP)
    if failure == "shape":  # while tracing again
        with pytest.raises(Exception, match="size"):
            run(torch.randn(3, 8))
    else:  # after the compiled backward, in the join of a unit
        hook = units(model.blocks[1])[0].flats[0].autograd_shard.register_hook(_raise)
        with pytest.raises(_Expected):
            backward(run, MLP, mine(MLP, 5))
        hook.remove()
    follow(run, reference, MLP)
    follow(model, reference, MLP)


@on_ranks(2)
def test_operators_return_no_aliases(rank: int) -> None:
    """`aot_eager` runs where torch refuses operators whose results share memory: its default when `$CI` is set."""
    with torch._functorch.config.patch(error_on_custom_op_aliasing=True):
        _train(rank, MLP, "aot_eager")
