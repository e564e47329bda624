"""How many bytes of parameters exist at each moment of a step, to the byte."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from models import Case, squared_error, vectors
from recording import unlike_blocks
from tiers import all_strategies
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compile.comm import collectives
from fsdp_compile.eager.streams import UnshardedBuffer

from ..ranks import on_ranks
from ..training import OPTIMIZERS, backward, local, mine, shard, units

CASE = Case(unlike_blocks, vectors, squared_error)


class Bytes(NamedTuple):
    """Bytes alive."""

    full: int  # of full parameters
    cast: int  # of shards in another dtype than they are stored in


class Watch:
    """The storages of full parameters and of cast shards, and how many bytes of them were alive when."""

    def __init__(self, most_cast: int) -> None:
        self.most_cast = most_cast
        self.full: dict[int, StorageWeakRef] = {}
        self.cast: dict[int, StorageWeakRef] = {}
        self.seen: dict[str, list[Bytes]] = {}

    def now(self) -> Bytes:
        return Bytes(_alive(self.full), _alive(self.cast))

    def settled(self, most: Bytes) -> Bytes:
        """As `now`, a moment later if it is more: gloo's threads drop tensors shortly after a collective has ended."""
        deadline = time.monotonic() + 1.0
        while (self.now().full > most.full or self.now().cast > most.cast) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.now()

    def note(self, moment: str) -> None:
        self.seen.setdefault(moment, []).append(self.settled(Bytes(2**62, self.most_cast)))


def _alive(storages: dict[int, StorageWeakRef]) -> int:
    found = (torch.UntypedStorage._new_with_weak_ptr(weak.cdata) for weak in storages.values())
    return sum(storage.nbytes() for storage in found if storage is not None)


@contextmanager
def _watched(model: nn.Module) -> Iterator[Watch]:
    """Bytes of parameters during what runs inside: when a gather starts and when a block computes."""
    watch = Watch(most_cast=_largest_shard(model))
    init, start, gather = UnshardedBuffer.__init__, UnshardedBuffer.start, collectives.start_all_gather

    def noting_init(buffer: UnshardedBuffer, *args: Any) -> None:
        init(buffer, *args)
        if not buffer.is_shard:
            weak = StorageWeakRef(buffer.storage)
            watch.full[weak.cdata] = weak

    def noting_gather(full: torch.Tensor, low: torch.Tensor, *args: Any) -> Any:
        filling = gather(full, low, *args)
        if low.dtype != torch.float32:
            weak = StorageWeakRef(low.untyped_storage())
            watch.cast[weak.cdata] = weak
        return filling

    def noting_start(buffer: UnshardedBuffer) -> None:
        start(buffer)
        watch.note("start")

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(UnshardedBuffer, "__init__", noting_init))
        stack.enter_context(mock.patch.object(UnshardedBuffer, "start", noting_start))
        stack.enter_context(mock.patch.object(collectives, "start_all_gather", noting_gather))
        for name, block in model.blocks.named_children():
            hook = block.up.register_forward_pre_hook(lambda *_, name=name: watch.note(f"forward {name}"))
            stack.callback(hook.remove)

            def output(*args: Any, name: str = name) -> None:
                args[-1].register_hook(lambda grad: watch.note(f"backward {name}"))

            stack.callback(block.down.register_forward_hook(output).remove)
        yield watch


def _sizes(model: Any, itemsize: int = 4) -> tuple[int, list[int]]:
    """Bytes of the root's and of each block's full parameters."""
    numels = [m._fsdp.units[0].flats[0].layout.numel for m in (model, *model.blocks)]
    return numels[0] * itemsize, [numel * itemsize for numel in numels[1:]]


def _largest_shard(model: nn.Module) -> int:
    """Bytes of the largest unit's shard in 16 bit."""
    return max(flat.shard.numel() * 2 for unit in units(model) for flat in unit.flats)


def _step(model: nn.Module, seed: int = 1) -> Watch:
    with _watched(model) as watch:
        loss = CASE.loss(model, mine(CASE, seed))
        watch.note("between")
        loss.backward()
    return watch


# --- FULL_SHARD -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize("mode", ["BACKWARD_PRE", "BACKWARD_POST", None])
@on_ranks(2)
def test_full_shard(mode: str | None, forward_prefetch: bool) -> None:
    """Beside the root, one unit while nothing is gathered ahead, two while something is; nothing after backward.

    E-STRAT-1, E-STRAT-4, E-PRE-3, E-TEST-5.
    """
    prefetch = BackwardPrefetch[mode] if mode else None
    model = shard(CASE, backward_prefetch=prefetch, forward_prefetch=forward_prefetch)
    root, blocks = _sizes(model)
    for step in range(3):
        watch = _step(model, step)
        ahead = forward_prefetch and step > 0
        for index, size in enumerate(blocks):
            following = blocks[index + 1] if ahead and index + 1 < len(blocks) else 0
            assert watch.seen[f"forward {index}"] == [Bytes(root + size + following, 0)]
            following = blocks[index - 1] if prefetch is BackwardPrefetch.BACKWARD_PRE and index > 0 else 0
            assert watch.seen[f"backward {index}"] == [Bytes(root + size + following, 0)]
        assert watch.seen["between"] == [Bytes(root, 0)]
        pairs = [first + second for first, second in pairwise(blocks)]
        two = prefetch is BackwardPrefetch.BACKWARD_PRE or ahead
        assert max(watch.seen["start"]) == Bytes(root + (max(pairs) if two else max(blocks)), 0)
        assert watch.settled(Bytes(0, 0)) == Bytes(0, 0), "after backward"


# --- others -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_shard_grad_op() -> None:
    """Everything is kept from forward to backward, and freed unit by unit there (E-STRAT-1)."""
    model = shard(CASE, "SHARD_GRAD_OP")
    root, blocks = _sizes(model)
    watch = _step(model)
    for index in range(len(blocks)):
        assert watch.seen[f"forward {index}"] == [Bytes(root + sum(blocks[: index + 1]), 0)]
        assert watch.seen[f"backward {index}"] == [Bytes(root + sum(blocks[: index + 1]), 0)]
    assert watch.seen["between"] == [Bytes(root + sum(blocks), 0)]
    assert watch.settled(Bytes(0, 0)) == Bytes(0, 0)


@on_ranks(2)
def test_no_shard() -> None:
    """Replicated parameters are read where they are: not one more byte (E-STRAT-1)."""
    watch = _step(shard(CASE, "NO_SHARD"))
    assert all(sizes == Bytes(0, 0) for moments in watch.seen.values() for sizes in moments)


@on_ranks(2)
def test_mixed_precision() -> None:
    """Full parameters exist in low precision alone, and one low-precision shard at a time (E-MP-3)."""
    model = shard(CASE, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    root, blocks = _sizes(model, itemsize=2)
    watch = _step(model)
    for index, size in enumerate(blocks):
        full = watch.seen[f"forward {index}"][0].full
        assert full == root + size
        full = watch.seen[f"backward {index}"][0].full
        assert full == root + size + (blocks[index - 1] if index else 0)
    cast = [sizes.cast for moments in watch.seen.values() for sizes in moments]
    assert max(cast) <= _largest_shard(model), cast
    assert watch.settled(Bytes(0, 0)) == Bytes(0, 0)


# --- growth -----------------------------------------------------------------------------------------------------------


def _all_bytes() -> int:
    """Bytes of all tensors that Python knows, each storage once."""
    gc.collect()
    tensors = [local(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def _least(measure: Callable[[], int], enough: int) -> int:
    """The least that is measured within two seconds, or the first that is `enough`: gloo's threads let go late."""
    deadline = time.monotonic() + 2.0
    least = measure()
    while least > enough and time.monotonic() < deadline:
        time.sleep(0.01)
        least = min(least, measure())
    return least


@all_strategies
@on_ranks(2)
def test_no_growth(strategy: str) -> None:
    """After 50 steps there are no more bytes of tensors than after a few (E-TEST-5)."""
    model = shard(CASE, strategy, forward_prefetch=True)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    early = []
    for step in range(50):
        optimizer.zero_grad()
        backward(model, CASE, mine(CASE, step))
        optimizer.step()
        if 3 <= step < 8:
            early.append(_all_bytes())  # the process may still be letting go of what earlier tests left
    late = _least(_all_bytes, min(early))
    assert late <= min(early), f"{early} bytes early, {late} after 50 steps"
