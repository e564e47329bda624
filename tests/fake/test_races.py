"""No two operations of an eager step race, and no memory is used again too early: over features, settings and failures.

tests/watching.py plays a device with streams, tests/races.py looks at what it was given. Seeded faults show that they
find what is wrong.
"""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from features import HYBRID, ROWS, Row
from models import mlp
from races import Record
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from watching import WatchedDevice, watched

from fsdp_compile import fully_shard
from fsdp_compile.core.autograd import GradientReduction
from fsdp_compile.eager import reduce
from fsdp_compile.eager.streams import Streams, UnshardedBuffer

LOW = MixedPrecision(torch.bfloat16)
OFFLOAD = {"cpu_offload": CPUOffload(True), "mixed_precision": LOW}  # with casts: between CPU and CPU nothing is copied
COMPILES = {"eager and compiled steps alternate", "`block.compile()` in an eager model"}


def _loss(model: nn.Module, seed: int = 0) -> Tensor:
    return model(torch.randn(3, 7)).float().square().mean()


def _train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def _races_of_row(row: Row) -> Record:
    torch.manual_seed(0)
    model = row.shard(row.case.build(), **({"mixed_precision": row.precision} if row.precision else {}))
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.1)
    with watched(model) as record:
        for syncs in row.syncs:
            with nullcontext() if syncs else model.no_sync():
                row.case.loss(model, row.case.batch(1, row.sizes[0])).backward()
        if row.clip is not None:
            model.clip_grad_norm_(row.clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad() if row.evaluates else nullcontext():
            row.case.loss(model, row.case.batch(2, 4))
    return record


def test_features_do_not_race() -> None:
    """Each row of the feature table that runs eagerly; rows of whole parameters do not fit on the four ranks here."""
    rows = [row for row in ROWS if row.name not in {*COMPILES, '`shards="rows"`'}]
    records = {row.name: _races_of_row(row) for row in rows}
    assert {name: record.races for name, record in records.items() if record.races} == {}
    assert all(record.operations > 40 for record in records.values())


# --- settings and failures --------------------------------------------------------------------------------------------


def _evaluates(model: nn.Module) -> None:
    for _ in range(3):  # the first two forwards wait for the device, which hides races: edits/own_writes.py
        with torch.no_grad():
            _loss(model)
            for param in model.parameters():  # what the host, or compute, may do between forwards
                param.mul_(0.9)
        _train(model, 1)


def _twice_alive(model: nn.Module) -> None:
    for _ in range(2):
        first, second = _loss(model), _loss(model)
        second.backward()
        first.backward()
        third = _loss(model) + _loss(model)
        third.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()


def _accumulates(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        with model.no_sync():
            _loss(model).backward()
            _loss(model).backward()
        _loss(model).backward()
        _loss(model).backward()
        optimizer.step()


def _defers(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for all_reduces in (False, False, True, False, True):
        model.set_requires_all_reduce(all_reduces)
        _loss(model).backward()
        if all_reduces:
            optimizer.step()
            optimizer.zero_grad()


def _raising(*_: Any) -> None:
    raise ArithmeticError


def _fails_in_forward(model: nn.Module) -> None:
    for _ in range(2):
        hook = model.blocks[1].register_forward_pre_hook(_raising)
        with pytest.raises(ArithmeticError):
            _loss(model)
        hook.remove()
        _train(model, 1)


def _fails_in_backward(model: nn.Module) -> None:
    for _ in range(2):
        hook = model.blocks[1].register_forward_hook(lambda m, a, out: out.register_hook(_raising) and None)
        with pytest.raises(ArithmeticError):
            _loss(model).backward()
        hook.remove()
        _train(model, 1)
        model.reset_iter_state()


def _unshards(model: nn.Module) -> None:
    for _ in range(2):
        model.blocks[0].unshard(async_op=True)
        model.blocks[1].unshard(async_op=True).wait()
        model.blocks[2].unshard(async_op=True)
        model.blocks[2].reshard()
        _train(model, 1)


def _runs_a_part(model: nn.Module) -> None:
    _train(model, 1)
    for _ in range(2):
        model.blocks[1](torch.randn(3, 11)).square().mean().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()


def _replaces(model: nn.Module) -> None:
    _train(model, 1)
    for param in model.parameters():
        param.data = param.data.clone()
    _train(model, 1)


def _gives_event(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (streams,) = model._fsdp_runtime._streams.values()
    for _ in range(3):
        _loss(model).backward()
        optimizer.step()
        model.set_post_optim_event(streams.device.record("compute"))


def _hooks(model: nn.Module) -> None:
    model.register_comm_hook(None, lambda _, full, part: torch.distributed.reduce_scatter_tensor(part, full))
    _train(model)


Case = tuple[dict[str, Any], Callable[[nn.Module], None]]
HYBRID_SHARD = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, **HYBRID}
TWO_STAGES = {"reshard_after_forward": 2}
NO_LIMIT = {"limit_all_gathers": False}
COMBINED = (_train, _evaluates, _twice_alive, _accumulates, _fails_in_forward, _fails_in_backward, _unshards)
DAILY: list[Case] = [
    *(({"backward_prefetch": when, "forward_prefetch": forward, "limit_all_gathers": limit}, _train)
      for when in (None, *BackwardPrefetch) for forward, limit in ((True, when is None), (False, when is not None))),
    *product((TWO_STAGES | NO_LIMIT,), COMBINED[1::2]), *product((OFFLOAD | HYBRID_SHARD,), COMBINED[::2]),
    (OFFLOAD | TWO_STAGES, _train), (OFFLOAD, _evaluates), ({}, _replaces), ({}, _runs_a_part), (HYBRID_SHARD, _defers),
    (OFFLOAD | HYBRID_SHARD, _defers), ({}, _gives_event), ({}, _hooks),
    ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, _accumulates),
    ({"sharding_strategy": ShardingStrategy.NO_SHARD, "mixed_precision": LOW}, _accumulates),
]  # fmt: skip
LATE: list[Case] = [
    *product(({}, HYBRID_SHARD, OFFLOAD, TWO_STAGES | NO_LIMIT, OFFLOAD | HYBRID_SHARD), COMBINED),
]


def _watch(options: dict[str, Any], trains: Callable[[nn.Module], None]) -> Record:
    torch.manual_seed(0)
    model = fully_shard(mlp(), **options)
    with watched(model, limit_gathers=options.get("limit_all_gathers", True)) as record:
        trains(model)
    return record


@pytest.mark.parametrize("cases", [DAILY, pytest.param(LATE, marks=pytest.mark.nightly)], ids=["daily", "late"])
def test_settings_and_failures_do_not_race(cases: list[Case]) -> None:
    """Prefetch and limits, offload, hybrid, two stages; with accumulation, evaluation, failures, two forwards alive;
    of units by hand, and where no root's forward has ordered gathers behind the step.

    So the host waits for a gradient's copy before autograd hands it out (E-OFF-5, E-FIN-2), a gather sees what was
    written back (E-WB-9), shards are cast where they are gathered (E-FWD-6). E-STREAM-3, E-RED-7, E-PRE-7, E-ERR-8.
    """
    records = [(options, trains, _watch(options, trains)) for options, trains in cases]
    assert [(o, t.__name__, record.races[:3]) for o, t, record in records if record.races] == []


# --- seeded faults ----------------------------------------------------------------------------------------------------


def _nothing(*_: Any) -> None:
    pass


def _without(method: str) -> Callable[..., None]:
    """`Streams.<method>` with its orders left out."""
    original = getattr(Streams, method)

    def faulty(streams: Streams, *args: Any) -> Any:
        with mock.patch.object(WatchedDevice, "order", _nothing):
            return original(streams, *args)

    return faulty


def _await_unshard_without_keep(streams: Streams, *filled: Tensor) -> None:
    streams.device.order(streams.unshard, streams.device.current_stream())


def _finish_without_wait(buffer: UnshardedBuffer) -> None:
    buffer.filling = False
    buffer.allow_reads()  # else autograd refuses to read the buffer


def _start_without_hold(*args: Any, **kwargs: Any) -> Any:
    mean, finish = start_average(*args, **kwargs)
    finish.__defaults__ = (None,)  # type: ignore[attr-defined]  # of what it holds
    return mean, finish


start_average, on = reduce.start_average, mock.patch.object
Fault = tuple[str, dict[str, Any], Callable[[nn.Module], None], Callable[[], Any], tuple[str, str]]
GATHER, REDUCE = "all_gather_into_tensor_out", "reduce_scatter_tensor"
FAULTS: list[Fault] = [
    ("the event of the step is not waited for", {}, _gives_event,
     lambda: on(WatchedDevice, "await_event", _nothing), (GATHER, "add_")),
    ("compute does not wait for gathers", {}, _train,
     lambda: on(Streams, "await_unshard", _without("await_unshard")), ("mm (", GATHER)),
    ("no record_stream of unsharded parameters", {}, _train,
     lambda: on(Streams, "await_unshard", _await_unshard_without_keep), ("mm (", "given to memory for")),
    ("a gather is not waited for", {}, _train,
     lambda: on(UnshardedBuffer, "finish", _finish_without_wait), ("mm (", GATHER)),
    ("the host does not wait for offloaded gradients", OFFLOAD, _train,
     lambda: on(GradientReduction, "wait_on_host", GradientReduction.wait), ("in host", "copy_")),
    ("gradients are dropped when the second reduce starts", HYBRID_SHARD, _train,
     lambda: on(reduce, "start_average", _start_without_hold), (REDUCE, "given to")),
]  # fmt: skip


def test_seeded_faults_are_found() -> None:
    """One of each kind that a record can have is reported with both operations."""
    missed = {}
    for what, options, trains, fault, words in FAULTS:
        with fault():
            races = _watch(options, trains).races
        if not any(all(word in race for word in words) and race.count("(operation") == 2 for race in races):
            missed[what] = races[:3]
    assert missed == {}
