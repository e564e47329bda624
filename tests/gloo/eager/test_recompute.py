"""Checkpoints within units, torch's wrapper around them, and parts of a forward without gradients."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from models import MODELS, MODULES, Case, Residual, squared_error, vectors
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_compile import fully_shard

from ..comm.test_communication import _assert_freed, _gathered_bytes, _spied
from ..ranks import on_ranks
from ..training import (
    assert_same_gradients,
    backward,
    build,
    executor,
    follow,
    mine,
    shard,
    units,
    whole,
)

MLP = MODELS["mlp"]
all_strategies = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])


# --- retained graphs ----------------------------------------------------------------------------------------------


class _Retained(nn.Module):
    """A unit that runs by itself, in checkpoints, and twice within one."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.twice = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
        self.once, self.head, self.reentrant = nn.Linear(7, 7), nn.Linear(7, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        run = partial(checkpoint, use_reentrant=self.reentrant)
        x = run(self.twice, x) + self.twice(x) + run(lambda x: self.twice(self.twice(self.once(x))), x)
        return self.head(run(self.twice, 2 * x) * run(self.twice, x))


@on_ranks(2)
def test_retained_graphs_with_checkpoints() -> None:
    """Several backward passes through one graph with checkpoints around a unit that runs several times."""
    for strategy, reentrant, frozen in product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (False, True), (0, 1)):
        torch.manual_seed(0)
        reference = _Retained(reentrant)
        reference.twice[0].weight.requires_grad_(not frozen)
        model = copy.deepcopy(reference)
        for unit in (model.twice, model.once, model):
            fully_shard(unit, sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=None)
        found: list[Tensor] = []
        for each in (reference, model):
            x = torch.linspace(-1, 1, 14).view(2, 7).requires_grad_()
            output = each(x)
            loss, other = output.square().sum(), output.sin().sum()
            for of in (loss, other, loss + other):
                of.backward(retain_graph=of is not loss + other)
                assert x.grad is not None
                found.append(x.grad.clone())
        half = len(found) // 2
        at = f"{strategy}, {reentrant}, {frozen}"
        torch.testing.assert_close(found[:half], found[half:], msg=lambda text, at=at: f"{at}: {text}")
        assert_same_gradients(model, reference)


class _Deep(nn.Module):
    """A unit that runs `times` times within checkpoints, each within the next."""

    def __init__(self, reentrant: tuple[bool, ...], times: int) -> None:
        super().__init__()
        self.unit, self.head = nn.Sequential(nn.Linear(7, 7), nn.Tanh()), nn.Linear(7, 7)
        self.reentrant, self.times = reentrant, times

    def _run(self, depth: int, x: Tensor) -> Tensor:
        if depth < len(self.reentrant):
            return self.head(checkpoint(self._run, depth + 1, x, use_reentrant=self.reentrant[depth]))
        for _ in range(self.times):
            x = self.unit(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self._run(0, x)


_BACKWARDS = {"in order": (0, 1), "reversed": (1, 0), "retained": (1, 0, 1), "three": (0, 2, 1)}


@on_ranks(2)
def test_nested_checkpoints_and_several_forwards() -> None:
    """Forwards of a unit that runs in checkpoints within checkpoints have their backwards in any order."""
    nests = ((False, False), (False, False, False), (False, True), (True, False))
    for reentrant, strategy in product(nests, ("FULL_SHARD", "SHARD_GRAD_OP")):
        if strategy == "SHARD_GRAD_OP" and reentrant != (False, False):
            continue
        torch.manual_seed(0)
        reference = _Deep(reentrant, 3)
        model = copy.deepcopy(reference)
        for unit in (model.unit, model):
            fully_shard(unit, sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=None)
        for name, order in _BACKWARDS.items():
            for each in (reference, model):
                each.zero_grad()
                losses = [
                    each(torch.full((2, 7), 1.0 + i, requires_grad=True)).square().sum() for i in range(max(order) + 1)
                ]
                for at, i in enumerate(order):
                    losses[i].backward(retain_graph=i in order[at + 1 :])
            try:
                assert_same_gradients(model, reference)
            except AssertionError as error:
                raise AssertionError(f"{reentrant}, {strategy}, {name}") from error


# --- checkpoints within a unit ----------------------------------------------------------------------------------------


class _Layers(nn.Module):
    """One unit of four layers, of which `inside` are recomputed, reentrant or not, together or each for itself."""

    def __init__(self, inside: tuple[int, ...], reentrant: bool, nested: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(11, 11) for _ in range(4))
        self.inside, self.reentrant, self.nested = inside, reentrant, nested

    def _layer(self, index: int, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[index](x)) + x

    def _pair(self, x: Tensor) -> Tensor:
        x = self._layer(1, x)
        return checkpoint(self._layer, 2, x, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        if self.nested:
            x = checkpoint(self._pair, self._layer(0, x), use_reentrant=self.reentrant)
            return self._layer(3, x)
        for index in range(4):
            if index in self.inside:
                x = checkpoint(self._layer, index, x, use_reentrant=self.reentrant)
            else:
                x = self._layer(index, x)
        return x


class _Around(nn.Module):
    """Two units of layers, each in a reentrant checkpoint of its own if `around`."""

    def __init__(self, around: bool, *how: Any) -> None:
        super().__init__()
        self.around, self.stem, self.head = around, nn.Linear(7, 11), nn.Linear(11, 5)
        self.blocks = nn.ModuleList([_Layers(*how), _Layers(*how)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.around else block(x)
        return self.head(x)


@pytest.mark.parametrize("around", [False, True])
@all_strategies
@pytest.mark.parametrize(
    "how",  # which layers, reentrant, nested
    [((3,), True, False), ((1, 2), True, False), ((0, 1, 2, 3), True, False), ((), True, True),
     ((1, 2), False, False), ((), False, True)],
)  # fmt: skip
@on_ranks(2)
def test_checkpoints_within_a_unit(strategy: str, around: bool, how: tuple) -> None:
    """A checkpoint of some layers of a unit, before or after its other layers, nested, and in one around the unit.

    A reentrant one runs a backward pass of its own: it frees nothing that the outer one still reads, and what it
    reduces is added (E-AC-2, 3, E-BWD-5).
    """
    reference = build(Case(lambda: _Around(False, (), False, False), vectors, squared_error))
    case = Case(lambda: _Around(around, *how), vectors, squared_error)
    model = shard(case, strategy)
    follow(model, reference, case)
    for each in (reference, model):
        each.zero_grad()
    with _spied() as calls:
        loss = case.loss(model, mine(case, 7))
        loss.backward()
    backward(reference, case, whole(case, 7))
    assert_same_gradients(model, reference)
    _assert_freed(calls, "after backward")


# --- checkpoints of units within checkpoints of units -----------------------------------------------------------------


class _Outer(nn.Module):
    """A unit that holds one in a checkpoint, and in two others a layer that is parametrized while it runs."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.inner, self.last = reentrant, Residual(9, 5), nn.Linear(9, 9)

    def _parametrized(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.last, "weight", nn.Tanh())
        try:
            return self.last(x)
        finally:
            parametrize.remove_parametrizations(self.last, "weight", leave_parametrized=False)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        again = partial(checkpoint, self._parametrized, use_reentrant=self.reentrant)
        return checkpoint(again, x, use_reentrant=self.reentrant)


class _Nested(nn.Module):
    """Two of these, each in a checkpoint."""

    def __init__(self, outer_reentrant: bool, inner_reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.stem, self.head = outer_reentrant, nn.Linear(7, 9), nn.Linear(9, 5)
        self.outer = nn.ModuleList(_Outer(inner_reentrant) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for outer in self.outer:
            x = checkpoint(outer, x, use_reentrant=self.reentrant)
        return self.head(x)


@on_ranks(2)
def test_nested_checkpoints_of_units() -> None:
    """A unit in a checkpoint within a checkpoint of the unit around it trains, whichever of the two is reentrant.

    The outer recomputation runs the inner unit's forward without gradients; its own recomputation is another one. The
    outer unit's parameters stay readable, and replaceable, within the backward pass that runs in its own.
    """
    for outer_reentrant, inner_reentrant in product((True, False), repeat=2):
        case = Case(lambda how=(outer_reentrant, inner_reentrant): _Nested(*how), vectors, squared_error)
        reference, model = build(case), build(case)
        for outer in model.outer:
            fully_shard(outer.inner)
            fully_shard(outer)
        fully_shard(model)
        follow(model, reference, case)


class _Recomputed(nn.Module):
    """Three units, each in a checkpoint; `reached` is called when backward has passed all but the first."""

    def __init__(self, reached: Callable[[], None]) -> None:
        super().__init__()
        self.stem, self.reached = nn.Linear(7, 9), reached
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x.register_hook(lambda _: self.reached())
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().sum()


@on_ranks(2)
def test_units_are_freed_one_by_one_while_other_forwards_wait() -> None:
    """Backward frees each unit that was recomputed once, though other forwards of it still await their backward."""
    found: list[int] = []
    with _spied() as calls:
        model = _Recomputed(lambda: found.append(_gathered_bytes(calls)[numel]))
        for block in model.blocks:
            fully_shard(block)
        numel = fully_shard(model).blocks[0]._fsdp.units[0].flats[0].layout.numel
        losses = [model(torch.ones(2, 7)) for _ in range(3)]
        for loss in reversed(losses):
            loss.backward()
    assert len(found) == 3 and max(found) <= 4 * numel, found


# --- parts under no_grad ----------------------------------------------------------------------------------------------


class _Features(nn.Module):
    """The first block only makes features: it runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Residual(7, 9) for _ in range(3)), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
        return self.head(self.blocks[2](self.blocks[1](x)))


@pytest.mark.parametrize("prefetch", [False, True])
@on_ranks(2)
def test_a_unit_gathered_under_no_grad(prefetch: bool) -> None:
    """A unit that was gathered ahead by a forward without gradients is differentiable all the same (E-VIEW-3)."""
    case = Case(_Features, vectors, squared_error)
    reference, model = build(case), shard(case, forward_prefetch=prefetch)
    follow(model, reference, case, steps=3)
    assert all(param.grad is None for param in model.blocks[0].parameters())


# --- torch's checkpoint wrapper ---------------------------------------------------------------------------------------


def _wrap(model: nn.Module, reentrant: bool, **options: Any) -> None:
    implementation = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=implementation, **options)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Residual)
    )


@pytest.mark.parametrize(
    ("first", "reentrant", "how"),
    [
        (False, False, "eager"),
        (True, True, "eager"),
        (True, False, "aot_eager"),
        *(pytest.param(first, False, "inductor", marks=pytest.mark.nightly) for first in (False, True)),
    ],
)
@on_ranks(2)
def test_checkpoint_wrapper(first: bool, reentrant: bool, how: str) -> None:
    """torch's wrapper lies around units, put there before or after sharding; training is unchanged.

    E-AC-4.
    """
    reference, model = build(MLP), build(MLP)
    _wrap(reference, reentrant=False)
    if first:
        _wrap(model, reentrant)
    fully_shard(model, auto_wrap_policy={Residual})
    if not first:
        _wrap(model, reentrant)
    assert [len(units(block)) for block in model.blocks] == [1, 1, 1] and len(units(model)) == 4
    follow(executor(model, how), reference, MLP)


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("name", "budget", "how"),
    [("tied_blocks", 1.0, "aot_eager"), pytest.param("mlp", 0.3, "backend", marks=pytest.mark.nightly)],
)
@on_ranks(2)
def test_a_choice_of_what_is_recomputed(name: str, budget: float, how: str) -> None:
    """Selective policies around units, alone and under a memory budget, do not change numbers in compiled models."""
    case = {**MODELS, **MODULES}[name]
    reference, model = build(case), build(case)
    for each in (reference, model):
        _wrap(each, reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _save_products))
    fully_shard(model, auto_wrap_policy={Residual})
    with torch._functorch.config.patch(activation_memory_budget=budget):
        follow(executor(model, how), reference, case)
