"""What a training script may do with a sharded model: each thing alone, then clean steps with the right numbers."""

import copy
import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from models import MODELS, MODULES, Case, checkpointed, squared_error, vectors
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compile import collectives, fully_shard

from .ranks import Ranks
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
    shard,
    twins,
    units,
    whole,
)

HOWS = ["eager", "aot_eager"]
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
both_ways = pytest.mark.parametrize("how", HOWS)
all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)

MLP = MODELS["mlp"]


# --- parameters -------------------------------------------------------------------------------------------------------


def _train(rank: int, case: Case, how: str, strategy: str = "FULL_SHARD") -> None:
    reference, model = twins(case, strategy)
    follow(executor(model, how), reference, case)


def _train_module(rank: int, name: str, how: str) -> None:
    _train(rank, MODULES[name], how)


@both_ways
@pytest.mark.parametrize("name", MODULES)
def test_modules(two: Ranks, name: str, how: str) -> None:
    """Parameters are found wherever module code looks for them; tied ones get the sum of their gradients."""
    two.run(_train_module, name, how)


@pytest.mark.parametrize("name", ["tied_blocks", "tied_ends"])
def test_tied_on_four(four: Ranks, name: str) -> None:
    """Tied parameters are one parameter whichever rank stores it."""
    four.run(_train_module, name, "eager")


def _train_tied(rank: int, how: str, strategy: str) -> None:
    reference, model = twins(MODELS["tied"], strategy)
    assert model.head._parameters["weight"] is model.tokens._parameters["weight"]
    follow(executor(model, how), reference, MODELS["tied"])


@all_strategies
@both_ways
def test_tied_embedding_and_head(two: Ranks, how: str, strategy: str) -> None:
    """One parameter under two names stays one, and its gradient is the unsharded one."""
    two.run(_train_tied, how, strategy)


def _train_frozen(rank: int, how: str) -> None:
    case = MODELS["frozen"]
    reference, model = twins(case)
    before = {name: param.detach().clone() for name, param in model.named_parameters() if not param.requires_grad}
    follow(executor(model, how), reference, case)
    for name, param in model.named_parameters():
        if name in before:
            assert param.grad is None, f"{name} is frozen and has a gradient"
            assert torch.equal(param, before[name]), f"{name} is frozen and has changed"


@both_ways
def test_frozen(two: Ranks, how: str) -> None:
    """Frozen parameters keep `grad` None and their value; the others train as unsharded."""
    two.run(_train_frozen, how)


def _freeze_later(rank: int, how: str) -> None:
    reference, model = twins(MLP)
    run = executor(model, how)
    for trained in (True, False, True):
        for each in (reference, model):
            each.blocks[1].up.requires_grad_(trained)
        follow(run, reference, MLP)


@both_ways
def test_freezing_between_steps(two: Ranks, how: str) -> None:
    """A layer may be frozen and thawed in mid-training."""
    two.run(_freeze_later, how)


class _Unused(nn.Module):
    """Leaves one of three blocks out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP.build()

    def forward(self, x: Tensor) -> Tensor:
        stem, (first, _, last), head = self.net.stem, self.net.blocks, self.net.head
        return head(last(first(stem(x))))


def _leave_out(rank: int, how: str) -> None:
    _train(rank, Case(_Unused, vectors, squared_error), how)


@both_ways
def test_a_unit_that_is_not_used(two: Ranks, how: str) -> None:
    """The gradients of a unit that took no part in forward stay None (E-NONE-3)."""
    two.run(_leave_out, how)


def _optimizer_first(rank: int, how: str) -> None:
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


@both_ways
def test_optimizer_made_before(two: Ranks, how: str) -> None:
    """Every parameter object stays the same, so an optimizer made before `fully_shard` trains as one made after."""
    two.run(_optimizer_first, how)


# --- forwards and backwards -------------------------------------------------------------------------------------------


def _accumulate(rank: int, how: str, strategy: str) -> None:
    reference, model = twins(MLP, strategy)
    run = executor(model, how)
    for seed in (1, 2):
        backward(reference, MLP, whole(MLP, seed))
        backward(run, MLP, mine(MLP, seed))
    assert_same_gradients(model, reference)
    follow(run, reference, MLP)


@all_strategies
@both_ways
def test_accumulation(two: Ranks, how: str, strategy: str) -> None:
    """Two backward passes leave the sum of their gradients."""
    two.run(_accumulate, how, strategy)


def _forwards_first(rank: int, how: str, strategy: str, separate: bool) -> None:
    reference, model = twins(MLP, strategy)
    run = executor(model, how)
    for net, cut in ((reference, whole), (run, mine)):
        losses = [MLP.loss(net, cut(MLP, seed)) for seed in (1, 2)]
        for loss in losses[::-1] if separate else [losses[0] + losses[1]]:
            loss.backward()
    assert_same_gradients(model, reference)
    follow(run, reference, MLP)


@pytest.mark.parametrize("separate", [True, False])
@all_strategies
@both_ways
def test_two_forwards_before_backward(two: Ranks, how: str, strategy: str, separate: bool) -> None:
    """Two forwards may wait for backward at once, for one backward or for two in any order."""
    two.run(_forwards_first, how, strategy, separate)


def _backward_twice(rank: int, how: str, strategy: str) -> None:
    reference, model = twins(MLP, strategy)
    run = executor(model, how)
    for net, cut in ((reference, whole), (run, mine)):
        loss = MLP.loss(net, cut(MLP, 1))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, reference)
    follow(run, reference, MLP)


@all_strategies
@both_ways
def test_two_backwards_of_one_forward(two: Ranks, how: str, strategy: str) -> None:
    """A graph that is retained may be run backward again (E-FIN-7)."""
    two.run(_backward_twice, how, strategy)


def _evaluate_between(rank: int, how: str, strategy: str) -> None:
    reference, model = twins(MLP, strategy)
    run = executor(model, how)
    for seed, mode in enumerate((torch.no_grad, torch.inference_mode, torch.no_grad)):
        with mode():
            expected, found = MLP.loss(reference, mine(MLP, 50 + seed)), MLP.loss(run, mine(MLP, 50 + seed))
        torch.testing.assert_close(found, expected)
        follow(run, reference, MLP, steps=1, first_seed=seed)


@all_strategies
@both_ways
def test_evaluation_between_steps(two: Ranks, how: str, strategy: str) -> None:
    """A forward without gradients sees the parameters of that moment and leaves the next training step alone."""
    two.run(_evaluate_between, how, strategy)


def _forward_only(rank: int, how: str, strategy: str, held: bool) -> None:
    reference, model = twins(MLP, strategy)
    run = executor(model, how)
    pending = MLP.loss(run, mine(MLP, 7))
    if not held:
        del pending
    with torch.no_grad():
        for each in (model, reference):
            for param in each.parameters():
                param.mul_(0.5)
    follow(run, reference, MLP)


@pytest.mark.parametrize("held", [True, False])
@all_strategies
@both_ways
def test_forward_without_backward(two: Ranks, how: str, strategy: str, held: bool) -> None:
    """A forward whose backward does not come leaves nothing stale: the next one sees parameters changed in place."""
    two.run(_forward_only, how, strategy, held)


def _side_by_side(rank: int, how: str, strategies: tuple[str, str]) -> None:
    pairs = [twins(MLP, strategy) for strategy in strategies]
    runs = [executor(model, how) for _, model in pairs]
    for seed in range(3):
        for run, (reference, _) in zip(runs, pairs, strict=True):
            follow(run, reference, MLP, steps=1, first_seed=seed)


@both_ways
def test_two_models(two: Ranks, how: str) -> None:
    """Models of one class with different strategies train side by side."""
    two.run(_side_by_side, how, ("FULL_SHARD", "SHARD_GRAD_OP"))
    two.run(_side_by_side, how, ("FULL_SHARD", "NO_SHARD"))


def _train_copy(rank: int, how: str, name: str, strategy: str) -> None:
    case = MODELS[name]
    reference, model = twins(case, strategy)
    follow(executor(model, how), reference, case)
    before = [param.detach().clone() for param in model.parameters()]
    twin, twin_reference = copy.deepcopy(model), copy.deepcopy(reference)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}, "a parameter is shared"
    follow(executor(twin, how), twin_reference, case, first_seed=200)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "the original has changed"
    follow(executor(model, how), reference, case, first_seed=300)
    assert_same_parameters(twin, twin_reference)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("name", ["mlp", "tied"])
@both_ways
def test_deepcopy(two: Ranks, how: str, name: str, strategy: str) -> None:
    """A copy of a sharded model is sharded, trains, and neither model moves the other."""
    two.run(_train_copy, how, name, strategy)


def _one_block(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    block = getattr(model, "_orig_mod", model)
    return block(inputs[0]).square().mean()


def _block_alone(rank: int, how: str, strategy: str) -> None:
    reference, model = twins(MLP, strategy)
    alone = Case(MLP.build, partial(vectors, inputs=11), _one_block)
    backward(reference.blocks[1], alone, whole(alone, 3))
    backward(executor(model.blocks[1], how), alone, mine(alone, 3))
    for each in (reference, model):
        assert all(param.grad is None for param in each.blocks[0].parameters()), "another block has a gradient"
    assert_same_gradients(model.blocks[1], reference.blocks[1])
    follow(executor(model, how), reference, MLP)


@all_strategies
@both_ways
def test_block_alone(two: Ranks, how: str, strategy: str) -> None:
    """A block may be run outside of its root, and the root afterwards."""
    two.run(_block_alone, how, strategy)


def _compile_regions(rank: int, where: str, strategy: str) -> None:
    reference, model = twins(MODELS["gpt"], strategy)
    for block in model.blocks:
        region = block if where == "units" else block.up
        region.compile(backend="aot_eager", fullgraph=True)
    follow(model, reference, MODELS["gpt"])
    with torch._dynamo.config.patch(error_on_recompile=True):
        follow(model, reference, MODELS["gpt"])


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("where", ["units", "inside units"])
def test_compiled_regions(two: Ranks, where: str, strategy: str) -> None:
    """Units, or modules inside units, may be compiled while the rest stays eager; steps then compile nothing again."""
    two.run(_compile_regions, where, strategy)


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
    return units(model.blocks[1])[0].handle.register_hook(_raise)


def _fail_at_output(model: nn.Module) -> Any:
    return model.register_forward_hook(lambda module, args, out: out.register_hook(_raise) and None)


FAILURES = {f.__name__: f for f in (_fail_in_forward, _fail_in_backward, _fail_after_reduce, _fail_at_output)}


def _fail_eagerly(rank: int, failure: str, strategy: str, then: str) -> None:
    reference, model = twins(MLP, strategy)
    hook = FAILURES[failure](model)
    with pytest.raises(_Expected):
        backward(model, MLP, mine(MLP, 5))
    hook.remove()
    follow(executor(model, then), reference, MLP)


@pytest.mark.parametrize("then", HOWS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("failure", FAILURES)
def test_exceptions(two: Ranks, failure: str, strategy: str, then: str) -> None:
    """After an exception in forward, in backward or between units, the next step computes the right numbers."""
    two.run(_fail_eagerly, failure, strategy, then)


def _fail_compiled(rank: int, failure: str) -> None:
    reference, model = twins(MLP)
    run = executor(model, "aot_eager")
    follow(run, reference, MLP)
    if failure == "shape":  # while tracing again
        with pytest.raises(Exception, match="size"):
            run(torch.randn(3, 8))
    else:  # after the compiled backward, in the join of a unit
        hook = units(model.blocks[1])[0].handle.register_hook(_raise)
        with pytest.raises(_Expected):
            backward(run, MLP, mine(MLP, 5))
        hook.remove()
    follow(run, reference, MLP)
    follow(model, reference, MLP)


@pytest.mark.parametrize("failure", ["shape", "hook"])
def test_exceptions_compiled(two: Ranks, failure: str) -> None:
    """A compiled model survives an exception while it is traced and one after its backward."""
    two.run(_fail_compiled, failure)


def _train_strictly(rank: int) -> None:
    with torch._functorch.config.patch(error_on_custom_op_aliasing=True):
        _train(rank, MLP, "aot_eager")


def test_operators_return_no_aliases(two: Ranks) -> None:
    """`aot_eager` runs where torch refuses operators whose results share memory: its default when `$CI` is set."""
    two.run(_train_strictly)


# --- activation checkpointing -----------------------------------------------------------------------------------------


def _recompute(rank: int, where: str, how: str, strategy: str) -> tuple[list[int], list[int]]:
    plain, case = (Case(partial(checkpointed, kind), vectors, squared_error) for kind in ("none", where))
    expected, model = shard(plain, strategy), shard(case, strategy)
    run = executor(model, how)
    for seed in (1, 2):
        backward(expected, plain, mine(plain, seed))
        with _spied() as calls:
            backward(run, case, mine(case, seed))
        assert_bitwise(model, expected, f"pass {seed}")
    return _per_unit(model, calls, "gather"), _per_unit(model, calls, "reduce")


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize(
    ("where", "how"),
    [("inside", "eager"), ("inside", "aot_eager"), ("around", "eager"), ("pair", "eager"), ("reentrant", "eager")],
)
def test_checkpointing(two: Ranks, where: str, how: str, strategy: str) -> None:
    """Recomputing activations in or around units changes no bit, gathers once in forward and backward, reduces once."""
    for gathers, reduces in two.run(_recompute, where, how, strategy):
        assert all(count <= 2 for count in gathers), gathers
        assert all(count == 1 for count in reduces), reduces
        if strategy == "SHARD_GRAD_OP" and where != "reentrant":
            assert all(count == 1 for count in gathers), gathers


# --- communication and memory -----------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A collective that ran."""

    kind: str  # gather, reduce or all_reduce
    numel: int  # of the unit's full buffer; blocks share one size, the root has another
    result: int  # address of the result's storage
    gathered: StorageWeakRef | None  # the storage that an all-gather made


@contextmanager
def _spied() -> Iterator[list[_Call]]:
    """Record the collectives that run inside."""
    calls: list[_Call] = []

    def spy(name: str, kind: str, sizes: Callable[..., int]) -> Any:
        original = getattr(collectives, name)

        def spying(*args: Any) -> Any:
            out = original(*args)
            storage = out.untyped_storage() if out is not None else args[0].untyped_storage()
            made = StorageWeakRef(storage) if name == "all_gather" else None
            calls.append(_Call(kind, sizes(*args), storage.data_ptr(), made))
            return out

        return mock.patch.object(collectives, name, spying)

    with (
        spy("all_gather", "gather", lambda shard, size, group: shard.numel() * size),
        spy("all_gather_into", "gather", lambda full, *_: full.numel()),
        spy("reduce_scatter", "reduce", lambda full, *_: full.numel()),
        spy("all_reduce", "all_reduce", lambda full, *_: full.numel()),
    ):
        yield calls


def _per_unit(model: nn.Module, calls: list[_Call], kind: str) -> list[int]:
    """How often the root, and how often on average each block, was gathered or reduced."""
    counts = Counter(call.numel for call in calls if call.kind == kind)
    sizes = Counter(unit.layout.numel for unit in units(model))
    assert counts.keys() <= sizes.keys() and all(count % sizes[numel] == 0 for numel, count in counts.items()), counts
    return [counts[numel] // sizes[numel] for numel in sizes]


def _count(rank: int, how: str, strategy: str) -> dict[str, list[int]]:
    model = shard(MLP, strategy)
    run, optimizer = executor(model, how), OPTIMIZERS["momentum"](model.parameters())
    seen = []
    for seed in range(3):
        with _spied() as calls:
            backward(run, MLP, mine(MLP, seed))
            optimizer.step()
            optimizer.zero_grad()
        seen.append({kind: _per_unit(model, calls, kind) for kind in ("gather", "reduce", "all_reduce")})
    assert seen[0] == seen[1] == seen[2], seen
    return seen[0]


@pytest.mark.parametrize(
    ("strategy", "gathers", "reduces", "all_reduces"),  # of the root, of each block
    [
        ("FULL_SHARD", [1, 2], [1, 1], [0, 0]),
        ("SHARD_GRAD_OP", [1, 1], [1, 1], [0, 0]),
        ("NO_SHARD", [0, 0], [0, 0], [1, 1]),
    ],
)
def test_collectives_per_step(two: Ranks, strategy: str, gathers: list, reduces: list, all_reduces: list) -> None:
    """Eager steps run the collectives that the strategy promises and no more (E-TEST-4)."""
    expected = {"gather": gathers, "reduce": reduces, "all_reduce": all_reduces}
    assert two.run(_count, "eager", strategy) == [expected] * 2


def _kept(calls: list[_Call]) -> Counter[int]:
    """Bytes that are left of what all-gathers made, by the size of the unit's full buffer in elements."""
    kept: Counter[int] = Counter()
    for call in calls:
        if call.gathered is not None:
            alive = torch.UntypedStorage._new_with_weak_ptr(call.gathered.cdata)
            kept[call.numel] += alive.nbytes() if alive is not None else 0
    return kept


def _soon(holds: Callable[[], bool]) -> bool:
    """Whether `holds` within two seconds: gloo's threads drop tensors a moment after the collective has ended."""
    deadline = time.monotonic() + 2.0
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def _assert_freed(calls: list[_Call], when: str) -> None:
    """Nothing is left of what all-gathers made."""
    assert _soon(lambda: _kept(calls).total() == 0), f"kept {when}: {_kept(calls)} bytes"


def _watch_memory(rank: int, strategy: str, how: str) -> None:
    model = shard(MLP, strategy)
    run = executor(model, how)
    root, block = (module._fsdp_scope[0].layout.numel for module in (model, model.blocks[0]))
    for step in range(2):
        with _spied() as calls:
            loss = MLP.loss(run, mine(MLP, step))
        assert set(_kept(calls)) == {root, block}
        if how == "eager":
            blocks = 3 * 4 * block if strategy == "SHARD_GRAD_OP" else 0
            assert _kept(calls) == {root: 4 * root, block: blocks}, f"kept after forward: {_kept(calls)} bytes"
        loss.backward()
        assert all(unit.views is None for unit in units(model)), "views are left"
        if how == "eager":
            _assert_freed(calls, "after backward while the loss is alive")
        del loss
        _assert_freed(calls, "after backward")
    with _spied() as calls, torch.no_grad():
        run(mine(MLP, 9)[0])
    _assert_freed(calls, "after a forward without gradients")


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@both_ways
def test_gathered_memory(two: Ranks, how: str, strategy: str) -> None:
    """Full parameters live as long as the strategy says between forward and backward, and never longer than these."""
    two.run(_watch_memory, strategy, how)


def _watch_gradients(rank: int, how: str) -> None:
    for name in ("mlp", "frozen"):
        case = MODELS[name]
        model = shard(case)
        run = executor(model, how)
        with _spied() as calls:
            backward(run, case, mine(case, 1))
        reduced = {call.result for call in calls if call.kind == "reduce"}
        for unit in units(model):
            places = {p.grad.untyped_storage().data_ptr() for p in unit.params if p.grad is not None}
            trained_here = any(p.requires_grad and p.numel() for p in unit.params)
            assert len(places) == trained_here, f"{unit}: gradients in {len(places)} storages"
            assert places <= reduced, f"{unit}: gradients were copied after the reduce-scatter"


@both_ways
def test_gradients_are_not_copied(two: Ranks, how: str) -> None:
    """All gradients of a unit are views of what its reduce-scatter returned."""
    two.run(_watch_gradients, how)


def _drop(rank: int, how: str, strategy: str) -> None:
    model = shard(MLP, strategy)
    run, optimizer = executor(model, how), OPTIMIZERS["momentum"](model.parameters())
    for seed in range(2):
        backward(run, MLP, mine(MLP, seed))
        optimizer.step()
    backward(run, MLP, mine(MLP, 2))
    with torch.no_grad():
        run(mine(MLP, 3)[0])
    left = [weakref.ref(unit) for unit in units(model)]
    shards = [StorageWeakRef(unit.shard.untyped_storage()) for unit in units(model)]
    del model, run, optimizer
    torch._dynamo.reset()
    gc.collect()
    assert not any(unit() for unit in left), "units are left"
    assert _soon(lambda: all(shard.expired() for shard in shards)), "shards are left"


@all_strategies
@both_ways
def test_a_dropped_model_is_freed(two: Ranks, how: str, strategy: str) -> None:
    """When the last reference to a trained model goes, so do its units and shards."""
    two.run(_drop, how, strategy)
