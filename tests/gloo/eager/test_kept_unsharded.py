"""Units that are not freed after forward keep their buffers through backward passes that synchronise nothing."""

import warnings
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from models import Case, checkpointed, frozen, squared_error, tied_blocks, vectors
from recording import recorded, unlike_blocks
from torch import Tensor, nn

from fsdp_compile.fsdp_module import FSDPModule

from ..ranks import on_ranks
from ..training import (
    assert_same_gradients,
    assert_same_parameters,
    backward,
    build,
    follow,
    mine,
    reference_and_model,
    shard,
    units,
    whole,
)

CASE = Case(unlike_blocks, vectors, squared_error)
both = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])


def _gathers(model: nn.Module, seed: int, sync: bool) -> list[str]:
    """The units that one forward and backward gathers, in order."""
    with recorded(model) as log, nullcontext() if sync else model.no_sync():
        backward(model, CASE, mine(CASE, seed))
    return [line.split()[1] for line in log.about("gather")]


def _bytes(model: nn.Module) -> int:
    """What is left of full parameters."""
    return sum(buffer.storage.nbytes() for unit in units(model) if unit.kept for buffer in unit.kept.buffers)


@both
@on_ranks(2)
def test_kept_through_no_sync(strategy: str) -> None:
    """SHARD_GRAD_OP gathers once for a window of accumulation, FULL_SHARD always; the syncing backward frees.

    E-ACC-5, E-STRAT-1, E-STRAT-3, E-STRAT-5.
    """
    reference, model = reference_and_model(CASE, strategy)
    gathered = []
    for seed, sync in enumerate((False, False, True)):
        backward(reference, CASE, whole(CASE, seed))
        gathered.append(_gathers(model, seed, sync))
        full = sum(4 * flat.layout.numel for unit in units(model) for flat in unit.flats)
        assert _bytes(model) == (full if strategy == "SHARD_GRAD_OP" and not sync else 0)
    assert_same_gradients(model, reference)
    follow(model, reference, CASE)
    names = ["root", "blocks.0", "blocks.1", "blocks.2"]
    if strategy == "SHARD_GRAD_OP":
        assert gathered == [names, [], []]
    else:
        assert [sorted(set(step)) for step in gathered] == [sorted(names)] * 3


@on_ranks(4)
def test_hybrid_keeps_too() -> None:
    """_HYBRID_SHARD_ZERO2 keeps its buffers as SHARD_GRAD_OP does (E-STRAT-1)."""
    reference = build(CASE)
    model = shard(CASE, "_HYBRID_SHARD_ZERO2", devices_per_node=2)
    for seed, sync in enumerate((False, True)):
        backward(reference, CASE, whole(CASE, seed))
        assert len(_gathers(model, seed, sync)) == (0 if sync else 4)
        assert bool(_bytes(model)) == (not sync)
    assert_same_gradients(model, reference)


def _scale(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def _replace(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 0.5


def _load_shards(model: nn.Module) -> None:
    with torch.no_grad():
        for unit in units(model):
            for flat in unit.flats:
                flat.shard.mul_(0.5)


CHANGES = {f.__name__: f for f in (_scale, _replace, _load_shards)}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_kept_values_are_never_older_than_the_shard(change: str) -> None:
    """After a change of the parameters the next forward gathers again (E-STRAT-10)."""
    reference, model = reference_and_model(CASE, "SHARD_GRAD_OP")
    _gathers(model, 1, sync=False)
    model.zero_grad()
    CHANGES[change](model)
    _scale(reference)
    assert len(_gathers(model, 1, sync=False)) == 4
    model.zero_grad()
    follow(model, reference, CASE)
    assert_same_parameters(model, reference)


@on_ranks(2)
def test_evaluation_reads_what_is_kept() -> None:
    """A forward without gradients within a window of accumulation neither gathers nor drops what is kept."""
    reference, model = reference_and_model(CASE, "SHARD_GRAD_OP")
    _gathers(model, 1, sync=False)
    with recorded(model) as log, torch.no_grad():
        model(mine(CASE, 2)[0])
    assert not log.about("gather", "free")
    assert not _gathers(model, 3, sync=True)
    assert _bytes(model) == 0
    for seed in (1, 3):
        backward(reference, CASE, whole(CASE, seed))
    assert_same_gradients(model, reference)


@on_ranks(2)
def test_two_forwards_and_no_sync() -> None:
    """Kept buffers are no trap for other forwards that wait for backward, nor for a graph that runs again."""
    reference, model = reference_and_model(CASE, "SHARD_GRAD_OP")
    first, second = (CASE.loss(model, mine(CASE, seed)) for seed in (1, 2))
    with model.no_sync():
        first.backward(retain_graph=True)
    second.backward()
    assert _bytes(model) == 0, "the syncing backward frees what others kept"
    first.backward()
    for seed in (1, 2, 1):
        backward(reference, CASE, whole(CASE, seed))
    assert_same_gradients(model, reference)
    follow(model, reference, CASE)


@on_ranks(2)
def test_reshard_frees_what_is_kept() -> None:
    """reshard() gives back all memory of an idle unit: also what a backward under no_sync left."""
    reference, model = reference_and_model(CASE, "SHARD_GRAD_OP")
    _gathers(model, 1, sync=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert _bytes(model) == 0
    assert len(_gathers(model, 2, sync=True)) == 4
    for seed in (1, 2):
        backward(reference, CASE, whole(CASE, seed))
    assert_same_gradients(model, reference)


class _Chosen(nn.Module):
    """Runs the `chosen` of its blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.chosen = unlike_blocks(), [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        x = self.model.stem(x)
        for number in self.chosen:
            x = self.model.blocks[number](x)
        return self.model.head(x)


@on_ranks(2)
def test_auto_keeps_the_unit_with_which_backward_begins() -> None:
    """With "auto" an eager forward leaves the unit that ends it, if it did so before and runs once; values are those of
    an unsharded model, also where the order changes, and with checkpoints, frozen and shared parameters."""
    case = Case(_Chosen, vectors, squared_error)
    reference, model = build(case), shard(case, reshard_after_forward="auto")
    gathered = []
    for chosen in ([0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 0], [1, 0], [0, 1, 1], [0, 1, 1], [0, 1, 2], [0, 1, 2]):
        reference.chosen = model.chosen = chosen
        with recorded(model) as log, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            follow(model, reference, case, steps=1)
        gathered.append([line.split()[1].removeprefix("model.") for line in log.about("gather")])
        with torch.no_grad():
            model(mine(case, 5)[0])
        assert not any(buffer for unit in units(model) for buffer in unit.awaiting_backward)
    again = [
        Counter(names)[f"blocks.{number}"] for names, number in zip(gathered, [2, 2, 2, 0, 0, 1, 1, 2, 2], strict=True)
    ]
    assert again == [2, 1, 1, 2, 1, 4, 4, 2, 1], gathered

    for make in (
        *[partial(checkpointed, how) for how in ("inside", "around", "pair", "reentrant")],
        frozen,
        tied_blocks,
    ):
        other = Case(make, vectors, squared_error)
        reference, model = build(other), shard(other, reshard_after_forward="auto")
        follow(model, reference, other, steps=3)
        for seed in range(2):
            with model.no_sync():
                backward(model, other, mine(other, seed))
            backward(reference, other, whole(other, seed))
        follow(model, reference, other, steps=2)
