"""What goes over the wire, how long full parameters live, and what activation checkpointing changes: nothing."""

import copy
import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import MODELS, Case, checkpointed, squared_error, vectors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compile import checkpoint, export
from fsdp_compile.comm import collectives

from ..ranks import on_ranks
from ..training import (
    OPTIMIZERS,
    assert_bitwise,
    backward,
    executor,
    follow,
    local,
    mine,
    reference_and_model,
    shard,
    units,
)

MLP = MODELS["mlp"]
both_ways = pytest.mark.parametrize("how", ["eager", "aot_eager"])
compiled_late = pytest.mark.parametrize("how", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
sharded = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])


# --- seeing collectives -----------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """A collective that ran."""

    kind: str  # gather, reduce or all_reduce
    numel: int  # of the unit's full buffer; blocks share one size, the root has another
    result: int  # address of the result's storage
    gathered: StorageWeakRef | None  # the storage that an all-gather filled


@contextmanager
def _spied() -> Iterator[list[_Call]]:
    """Record the collectives that run inside."""
    calls: list[_Call] = []

    def spy(name: str, kind: str, sizes: Callable[..., int]) -> Any:
        original = getattr(collectives, name)

        def spying(*args: Any) -> Any:
            out = original(*args)
            written = out[0] if isinstance(out, tuple) else out if out is not None else args[0]
            storage = written.untyped_storage()
            made = StorageWeakRef(storage) if name == "start_all_gather" else None
            calls.append(_Call(kind, sizes(*args), storage.data_ptr(), made))
            return out

        return mock.patch.object(collectives, name, spying)

    with (
        spy("start_all_gather", "gather", lambda full, *_: full.numel()),
        spy("start_reduce_scatter", "reduce", lambda full, *_: full.numel()),
        spy("start_all_reduce", "all_reduce", lambda full, *_: full.numel()),
    ):
        yield calls


def _per_unit(model: nn.Module, calls: list[_Call], kind: str) -> list[int]:
    """How often the root, and how often on average each block, was gathered or reduced."""
    counts = Counter(call.numel for call in calls if call.kind == kind)
    sizes = Counter(unit.flats[0].layout.numel for unit in units(model))
    assert counts.keys() <= sizes.keys() and all(count % sizes[numel] == 0 for numel, count in counts.items()), counts
    return [counts[numel] // sizes[numel] for numel in sizes]


# --- collectives and memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "gathers", "reduces", "all_reduces"),  # of the root, of each block
    [
        ("FULL_SHARD", [1, 2], [1, 1], [0, 0]),
        ("SHARD_GRAD_OP", [1, 1], [1, 1], [0, 0]),
        ("NO_SHARD", [0, 0], [0, 0], [1, 1]),
    ],
)
@on_ranks(2)
def test_collectives_per_step(strategy: str, gathers: list, reduces: list, all_reduces: list) -> None:
    """Eager steps run the collectives that the strategy promises and no more (E-TEST-4, E-STRAT-3)."""
    model = shard(MLP, strategy)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for seed in range(4):
        with _spied() as calls:
            backward(model, MLP, mine(MLP, seed))
            optimizer.step()
            optimizer.zero_grad()
        if seed > 1:  # before, ranks also ask whether one leaves something out (test_unused.py)
            found = [_per_unit(model, calls, kind) for kind in ("gather", "reduce", "all_reduce")]
            assert found == [gathers, reduces, all_reduces]


@pytest.mark.parametrize("how", ["eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@on_ranks(2)
def test_nothing_that_gloo_copies(how: str) -> None:
    """Gathers are broadcasts of slices and reduces exchanges, eagerly and in generated code: gloo copies the others."""
    run = executor(shard(MLP), how)
    for seed in (2, 3):  # here ranks also ask whether one leaves something out, which gloo copies
        backward(run, MLP, mine(MLP, seed))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        backward(run, MLP, mine(MLP, 1))
    kinds = {event.name for event in profiler.events() if event.name.startswith("gloo:")}
    assert kinds == {"gloo:broadcast", "gloo:all_to_all"}


def _gathered_bytes(calls: list[_Call]) -> Counter[int]:
    """Bytes that are left of what all-gathers made, by the size of the unit's full buffer in elements."""
    nbytes: Counter[int] = Counter()
    seen = set()
    for call in calls:
        if call.gathered is not None and call.gathered.cdata not in seen:
            seen.add(call.gathered.cdata)
            alive = torch.UntypedStorage._new_with_weak_ptr(call.gathered.cdata)
            nbytes[call.numel] += alive.nbytes() if alive is not None else 0
    return nbytes


def _soon(holds: Callable[[], bool]) -> bool:
    """Whether `holds` within two seconds: gloo's threads drop tensors a moment after the collective has ended."""
    deadline = time.monotonic() + 2.0
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def _assert_freed(calls: list[_Call], when: str) -> None:
    """Nothing is left of what all-gathers made."""
    assert _soon(lambda: _gathered_bytes(calls).total() == 0), f"kept {when}: {_gathered_bytes(calls)} bytes"


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(7, 5, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x[:, None])[0][:, 0]


@sharded
@on_ranks(2)
def test_recurrent_modules_keep_nothing(strategy: str) -> None:
    """The list of weights that an LSTM has of its own keeps no full parameter; it trains as unsharded."""
    case = Case(_Recurrent, vectors, squared_error)
    reference, model = reference_and_model(case, strategy)
    for _ in range(2):
        with _spied() as calls, torch.no_grad():
            model(mine(case, 1)[0])
        _assert_freed(calls, "after a forward without gradients")
        follow(model, reference, case)
    follow(copy.deepcopy(model), copy.deepcopy(reference), case)


@compiled_late
@on_ranks(2)
def test_gradients_are_not_copied(how: str) -> None:
    """All gradients of a unit are views of what its reduce-scatter returned (E-GRAD-1)."""
    for name in ("mlp", "frozen"):
        case = MODELS[name]
        model = shard(case)
        run = executor(model, how)
        with _spied() as calls:
            backward(run, case, mine(case, 1))
        reduced = {call.result for call in calls if call.kind == "reduce"}
        for unit in units(model):
            storages = {local(p.grad).untyped_storage().data_ptr() for p in unit.params if p.grad is not None}
            trained = any(p.requires_grad for p in unit.params)
            assert len(storages) == trained, f"{unit}: gradients in {len(storages)} storages"
            assert storages <= reduced, f"{unit}: gradients were copied after the reduce-scatter"


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@both_ways
@on_ranks(2)
def test_what_a_model_leaves(how: str, strategy: str, tmp_path: Path) -> None:
    """A process group goes when it is destroyed, whatever a living model has done and has given: threads that Python's
    end meets at work abort it. When the last reference to the model goes, so do its units and shards.
    """
    group = dist.new_group()
    given = {"mesh": DeviceMesh.from_group(group, "cpu")} if strategy == "SHARD_GRAD_OP" else {"process_group": group}
    model = shard(MLP, strategy, **given)
    run, optimizer = executor(model, how), OPTIMIZERS["momentum"](model.parameters())
    for seed in range(2):
        backward(run, MLP, mine(MLP, seed))
        optimizer.step()
    backward(run, MLP, mine(MLP, 2))
    with torch.no_grad():
        run(mine(MLP, 3)[0])
    kept = [
        model.state_dict(),
        optimizer.state_dict(),
        *export(model),
        [each.device_mesh for each in units(model)[0].params],
    ]
    checkpoint.save({"model": model, "optimizer": optimizer}, tmp_path, step=1)
    threads, ended = _threads_of_gloo(), weakref.ref(group)
    dist.destroy_process_group(group)
    del group, given
    gc.collect()
    assert ended() is None and _threads_of_gloo() < threads, "a living model holds the group"
    left = [weakref.ref(unit) for unit in units(model)]
    shards = [StorageWeakRef(flat.shard.untyped_storage()) for unit in units(model) for flat in unit.flats]
    del model, run, optimizer, kept
    torch._dynamo.reset()
    gc.collect()
    assert not any(unit() for unit in left), "units are left"
    assert _soon(lambda: all(shard.expired() for shard in shards)), "shards are left"


def _threads_of_gloo() -> int:
    return [each.read_text() for each in Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop\n")


# --- activation checkpointing -----------------------------------------------------------------------------------------


@sharded
@pytest.mark.parametrize(
    ("where", "how"),
    [
        *[(where, "eager") for where in ("inside", "around", "pair", "reentrant")],
        *[pytest.param(where, "aot_eager", marks=pytest.mark.nightly) for where in ("inside", "around", "pair")],
    ],
)
@on_ranks(2)
def test_checkpointing(where: str, how: str, strategy: str) -> None:
    """Recomputing activations in or around units changes no bit, gathers once in forward and backward, reduces once.

    E-AC-1.
    """
    plain, case = (Case(partial(checkpointed, kind), vectors, squared_error) for kind in ("none", where))
    expected, model = shard(plain, strategy), shard(case, strategy)
    run = executor(model, how)
    for seed in (1, 2):
        backward(expected, plain, mine(plain, seed))
        with _spied() as calls:
            backward(run, case, mine(case, seed))
        assert_bitwise(model, expected, f"pass {seed}")
    gathers, reduces = _per_unit(model, calls, "gather"), _per_unit(model, calls, "reduce")
    assert all(count <= 2 for count in gathers), gathers
    assert all(count == 1 for count in reduces), reduces
    # Without our passes a traced region gathers again; tests/fake/test_checkpoints.py has them.
    if strategy == "SHARD_GRAD_OP" and where != "reentrant" and (how == "eager" or where == "inside"):
        assert all(count == 1 for count in gathers), gathers
