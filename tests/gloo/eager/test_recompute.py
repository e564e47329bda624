"""Checkpoints within units, torch's wrapper around them, and parts of a forward without gradients."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from models import MLP, MODELS, MODULES, Residual
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_compile import fully_shard

from ..ranks import on_ranks
from ..training import assert_same_gradients, build, executor, follow, units
from ..wire import gathered_bytes, wire

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
    """Several backward passes through one graph with checkpoints around a unit that runs several times (E-FIN-7)."""
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
    with wire() as calls:
        model = _Recomputed(lambda: found.append(gathered_bytes(calls)[numel]))
        for block in model.blocks:
            fully_shard(block)
        numel = fully_shard(model).blocks[0]._fsdp.units[0].flats[0].layout.numel
        losses = [model(torch.ones(2, 7)) for _ in range(3)]
        for loss in reversed(losses):
            loss.backward()
    assert len(found) == 3 and max(found) <= 4 * numel, found


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
