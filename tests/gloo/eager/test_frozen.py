"""Frozen parameters beside trained ones (LoRA), and units of frozen parameters alone."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from models import MLP, Case, CheckpointedStack, Residual, Stack, squared_error, vectors
from tiers import all_strategies
from torch import Tensor, nn

from fsdp_compile import fully_shard

from ..ranks import on_ranks
from ..training import backward, follow, mine, reference_and_model, units
from ..wire import assert_freed, gathered_bytes, soon, wire

BF16, FP32 = torch.bfloat16, torch.float32


# --- LoRA -------------------------------------------------------------------------------------------------------------


class _Adapted(nn.Module):
    """A frozen matrix and a trained product of two small ones, added to the input."""

    def __init__(self, width: int, base: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=base).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.up(self.down(x)))


def _chain(blocks: list[nn.Module], how: str) -> Stack:
    return Stack(blocks) if how == "none" else CheckpointedStack(blocks, 1, how == "reentrant")


def _lora(base: torch.dtype, how: str) -> Stack:
    return _chain([_Adapted(11, base) for _ in range(3)], how)


@pytest.mark.parametrize("checkpoints", ["none", "around", "reentrant"])
@all_strategies
@pytest.mark.parametrize("base", [BF16, FP32])
@on_ranks(2)
def test_lora(base: torch.dtype, strategy: str, checkpoints: str) -> None:
    """Adapters on a frozen base train as unsharded; forward gathers all once, backward reduces adapters alone.

    E-FRZ-1, E-LIM-4, E-ERR-21.
    """
    case = Case(partial(_lora, base, checkpoints), vectors, squared_error)
    reference, model = reference_and_model(case, strategy)
    follow(model, reference, case)
    model.zero_grad()
    with wire() as sent:
        case.loss(model, mine(case, 1))
    flats = [flat for unit in units(model) for flat in unit.flats]
    gathered = sorted((flat.layout.numel, flat.shard.dtype) for flat in flats if strategy != "NO_SHARD")
    assert sorted((each.numel, each.dtype) for each in sent) == gathered, "forward gathers each flat parameter once"
    with wire() as sent:
        backward(model, case, mine(case, 1))
    reduced = sum(each.nbytes for each in sent if each.kind != "gather")
    trained = sum(flat.layout.numel * 4 for flat in flats if flat.trains)
    assert reduced == trained and len(flats) == 3 * 2 + 1, (reduced, trained)


# --- memory of frozen units -------------------------------------------------------------------------------------------


KINDS = {
    "frozen": lambda: Residual(11, 23).requires_grad_(False),
    "lora": lambda: _Adapted(11, FP32),
    "trained": lambda: Residual(11, 23),
}


@pytest.mark.parametrize("how", ["none", "around", "reentrant"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_units_are_freed_in_backward(rank: int, kind: str, how: str) -> None:
    """A unit is freed once its backward has run, not at the end: frozen or not, and in checkpoints of both kinds.

    E-FRZ-2, E-AC-2.
    """
    model = fully_shard(_chain([KINDS[kind]() for _ in range(6)], how))
    sizes = {flat.layout.numel for unit in units(model.blocks[0]) for flat in unit.flats}
    held: list[int] = []

    def count(grad: Tensor) -> None:  # runs when a block's backward has ended, before its input is handed on
        held.append(sum(gathered_bytes(calls)[numel] for numel in sizes) // sum(4 * numel for numel in sizes))

    def watch(module: nn.Module, args: tuple) -> None:
        if args[0].requires_grad:
            args[0].register_hook(count)

    for block in model.blocks:
        block.register_forward_pre_hook(watch)
    with wire() as calls:
        backward(model, MLP, mine(MLP, rank))
    assert len(held) >= 6 and max(held) <= 3, f"blocks gathered at once in backward: {held}"
    assert_freed(calls, "after backward")


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_frozen_units_without_backward(rank: int, strategy: str) -> None:
    """Frozen units whose inputs need no gradient are gathered for forward, freed and never reduced (E-FRZ-3)."""
    model = nn.Sequential(*(Residual(11, 23) for _ in range(3)), nn.Linear(11, 5))
    model[:3].requires_grad_(False)
    strategies = torch.distributed.fsdp.ShardingStrategy
    fully_shard(model, sharding_strategy=strategies[strategy], find_unused_parameters=False)
    frozen = units(model[0])[0].flats[0].layout.numel
    x, y = vectors(rank, 4, inputs=11)
    with wire() as calls:
        loss = squared_error(model, (x, y))
    assert soon(lambda: gathered_bytes(calls)[frozen] == 0), "a frozen unit whose backward will not run was kept"
    with wire() as sent:
        loss.backward()
    assert [each.kind for each in sent] == ["reduce"], "only the head trains"
    assert_freed(calls, "after backward")
    assert all(param.grad is None for param in model[:3].parameters())


@on_ranks(2)
def test_a_trained_input_collects_no_hooks() -> None:
    """A leaf that is fed to a frozen model in every step (prompt tuning) is left without hooks (E-FRZ-2, E-FIN-5)."""
    model = fully_shard(nn.Sequential(*(Residual(7, 9).requires_grad_(False) for _ in range(2))))
    prompt = torch.zeros(7, requires_grad=True)
    for _step in range(3):
        model(prompt).sum().backward()
        assert not prompt._backward_hooks, "hooks collect on a persistent input"
    assert prompt.grad is not None and prompt.grad.abs().sum() > 0


@on_ranks(2)
def test_gradients_of_inputs_alone() -> None:
    """`torch.autograd.grad` of a leaf that is fed to frozen parameters, as for adversarial examples."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Residual(7, 9).requires_grad_(False) for _ in range(2)))
    model: Any = fully_shard(copy.deepcopy(plain), auto_wrap_policy={Residual})
    x, shift = torch.linspace(-1, 1, 7).requires_grad_(), torch.ones(7, requires_grad=True)
    for freezes in ("all", "a part"):
        for each in (plain, model):
            each[1].up.weight.requires_grad_(freezes == "a part")
        for inputs in ([x], [shift], [x, shift]):
            found, wanted = (torch.autograd.grad(each(x * shift).sin().sum(), inputs) for each in (model, plain))
            torch.testing.assert_close(found, wanted)
            (found,), (wanted,) = (torch.autograd.grad(each(x).sin().sum(), [x]) for each in (model, plain))
            torch.testing.assert_close(found, wanted)
        assert not any(unit.is_unsharded for unit in units(model))
