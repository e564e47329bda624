"""What goes over the wire, how long full parameters live, and what activation checkpointing changes: nothing."""

import gc
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import MLP, MODELS, Case, checkpointed, squared_error, vectors
from tiers import all_strategies, both_ways, compiled_late
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_compile import checkpoint, export

from ..ranks import on_ranks
from ..training import OPTIMIZERS, assert_bitwise, backward, executor, local, mine, shard, units
from ..wire import per_unit, soon, wire

sharded = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])


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
        with wire() as calls:
            backward(model, MLP, mine(MLP, seed))
            optimizer.step()
            optimizer.zero_grad()
        if seed > 1:  # before, ranks also ask whether one leaves something out (test_unused.py)
            found = [per_unit(model, calls, kind) for kind in ("gather", "reduce", "all_reduce")]
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


@compiled_late
@on_ranks(2)
def test_gradients_are_not_copied(how: str) -> None:
    """All gradients of a unit are views of what its reduce-scatter returned (E-GRAD-1)."""
    for name in ("mlp", "frozen"):
        case = MODELS[name]
        model = shard(case)
        run = executor(model, how)
        with wire() as calls:
            backward(run, case, mine(case, 1))
        reduced = {call.address for call in calls if call.kind == "reduce"}
        for unit in units(model):
            storages = {local(p.grad).untyped_storage().data_ptr() for p in unit.params if p.grad is not None}
            trained = any(p.requires_grad for p in unit.params)
            assert len(storages) == trained, f"{unit}: gradients in {len(storages)} storages"
            assert storages <= reduced, f"{unit}: gradients were copied after the reduce-scatter"


@all_strategies
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
    assert soon(lambda: all(shard.expired() for shard in shards)), "shards are left"


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
        with wire() as calls:
            backward(run, case, mine(case, seed))
        assert_bitwise(model, expected, f"pass {seed}")
    gathers, reduces = per_unit(model, calls, "gather"), per_unit(model, calls, "reduce")
    assert all(count <= 2 for count in gathers), gathers
    assert all(count == 1 for count in reduces), reduces
    # Without our passes a traced region gathers again; tests/fake/test_checkpoints.py has them.
    if strategy == "SHARD_GRAD_OP" and where != "reentrant" and (how == "eager" or where == "inside"):
        assert all(count == 1 for count in gathers), gathers
