"""What an accelerator would be told: stream waits, memory hand-overs, events. Nothing here needs one."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from compiling import step
from models import Residual, Stack
from recording import Log, recorded, unlike_blocks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile import fully_shard, load, offload, summon_full_params
from fsdp_compile.core.sharding import sharding_of
from fsdp_compile.eager.streams import Device, Streams

NAMES = ["root", "blocks.0", "blocks.1", "blocks.2"]


def _step(model: nn.Module, **options: Any) -> Log:
    with recorded(model, **options) as log:
        step(model, torch.randn(3, 7))
    return log


def test_gathers_run_beside_compute() -> None:
    """Gathers see the optimizer's step, run in the unshard stream, and are waited for before compute.

    E-STREAM-3, E-FWD-4, E-FWD-5.
    """
    log = _step(fully_shard(unlike_blocks()))
    assert log.lines[0] == "unshard waits for compute"
    assert all(line.endswith("in unshard") for line in log.about("gather"))
    for name in NAMES[1:]:
        gather = log.place(f"gather {name} in unshard")
        waited = log.place(f"wait for {name} in unshard", gather)
        assert log.lines[waited + 1] == "compute waits for unshard"
        assert waited < log.place(f"compute {name}")


def test_reduces_run_beside_compute() -> None:
    """A reduce starts in the post-backward stream after compute's gradients; compute waits at the end (E-STREAM-3)."""
    log = _step(fully_shard(unlike_blocks()))
    for name in NAMES:
        reduce = log.place(f"reduce {name} in post-backward")
        assert log.lines[reduce - 1] == "post-backward waits for compute"
        waited = log.place(f"wait for reduced {name} in post-backward")
        assert log.lines[waited + 1] == "compute waits for post-backward"


def test_rate_limit() -> None:
    """Each free leaves an event; before a gather the host waits for the oldest of two (E-RATE-1, E-RATE-2). Without
    the limit the host never waits."""
    unlimited = fully_shard(unlike_blocks(6), limit_all_gathers=False)
    assert not _step(unlimited, limit_gathers=False).about("event", "host waits")
    log = _step(fully_shard(unlike_blocks(6)))
    outstanding: list[str] = []
    for line in log.lines:
        if line.startswith("event"):
            outstanding.append(line.removesuffix(" in compute"))
        elif line.startswith("host waits for "):
            assert outstanding.pop(0) == line.removeprefix("host waits for ")
        elif line.startswith("gather"):
            assert len(outstanding) < 2, f"{line} with {outstanding}:\n" + "\n".join(log.lines)
    assert log.about("host waits")
    assert len(log.about("event ")) == len(log.about("free "))


def test_rate_limit_is_named_in_profiles() -> None:
    """The host's wait has a name of its own (E-RATE-3)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _step(fully_shard(unlike_blocks(6)))
    assert "fsdp_compile.limit_all_gathers" in {event.name for event in profile.events()}


def test_replicas_are_averaged_behind_the_reduce() -> None:
    """Hybrid: the all-reduce of the reduced shard starts as soon as its reduce-scatter is enqueued, in that stream.

    With that, two side streams are all there are. E-RED-6, E-STREAM-1: torch has one more for the all-reduce.
    """
    model = fully_shard(
        unlike_blocks(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, devices_per_node=2,
        cpu_offload=CPUOffload(offload_params=True),
    )  # fmt: skip
    log = _step(model, limit_gathers=False)
    for name in NAMES:
        reduced = log.place(f"reduce {name} in post-backward")
        started = [f"wait for reduced {name} in post-backward", f"all-reduce {name} in post-backward"]
        assert log.lines[reduced + 1 : reduced + 3] == started
        copied = log.place("keep a shard for compute", reduced)
        assert log.lines[copied - 1] == "compute waits for post-backward"
        assert log.lines[copied + 1].startswith("event") and log.lines[copied + 1].endswith("in post-backward")
    assert {line.split(" in ")[1] for line in log.lines if " in " in line} == {"unshard", "post-backward"}


def test_a_hook_in_a_stream_of_its_own() -> None:
    """It begins after the reduce, and what follows in the stream of reduces waits for it."""
    model = fully_shard(unlike_blocks())
    with recorded(model) as log:
        model.blocks[1].set_all_reduce_hook(lambda reduced: log.add(f"hook in {log.stream}"), stream="hooks")
        step(model, torch.randn(3, 7))
    at = log.place("hook in hooks")
    assert log.lines[at - 2 : at] == ["wait for reduced blocks.1 in post-backward", "hooks waits for post-backward"]
    assert log.lines[at + 1 : at + 3] == ["post-backward waits for hooks", "compute waits for post-backward"]
    assert log.lines.count("hook in hooks") == 1


def test_full_parameters_are_gathered_by_compute() -> None:
    """Manual unsharding uses no side stream: compute has waited for all of them before (E-STREAM-4)."""
    model = fully_shard(unlike_blocks())
    with recorded(model) as log:
        step(model, torch.randn(3, 7))
        done = len(log.lines)
        with summon_full_params(model):
            pass
    last = max(place for place, line in enumerate(log.lines) if line.endswith("in post-backward"))
    assert "compute waits for post-backward" in log.lines[last:done]
    assert sorted(log.lines[done:]) == sorted(f"gather {name} in compute" for name in NAMES)


class _Mixed(Residual):
    """A block with parameters of two dtypes: two flat parameters in one unit."""

    def __init__(self, index: int) -> None:
        super().__init__(11, 23 + 32 * index)
        self.low = nn.Parameter(torch.ones(3000 + 200 * index, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.low.float().mean()


def test_all_flat_parameters_of_a_unit_are_prefetched() -> None:
    """A unit of several flat parameters is gathered ahead, whole, while the next one's backward computes (E-LIM-21)."""
    log = _step(fully_shard(Stack([_Mixed(index) for index in range(3)])))
    for name, ahead in (("blocks.2", "blocks.1"), ("blocks.1", "blocks.0")):
        computed = log.place(f"backward {name}")
        gathers = [place for place, line in enumerate(log.lines) if line == f"gather {ahead} in unshard"]
        assert len(gathers) == 4 and gathers[3] < computed, "twice two"


def test_reduces_of_one_unit_are_told_apart() -> None:
    """Where a unit has several flat parameters, ranks compare in which order they are reduced: each has a name."""
    model = fully_shard(Stack([_Mixed(0), _Mixed(1)]))
    with mock.patch.object(model._fsdp_runtime.reduces_in_flight.order, "next_in_backward") as noted:
        step(model, torch.randn(3, 7))
    reduced = [call.args[2] for call in noted.mock_calls if call.args[0] == "reduce"]
    assert reduced == ["blocks.1.up.weight", "blocks.1.low", "blocks.0.up.weight", "blocks.0.low", ""]


def test_replicas_gather_nothing() -> None:
    """NO_SHARD in the parameters' dtype: no gather, nothing to await or to free, and no copies of means (E-STRAT-3)."""
    with _Copies() as copies:
        log = _step(fully_shard(unlike_blocks(), sharding_strategy=ShardingStrategy.NO_SHARD))
    assert not log.about("gather", "wait for b", "wait for root", "compute waits for unshard", "free", "host waits")
    assert "copy to host" not in copies.lines


def test_accelerator_speaks_to_its_torch_module() -> None:
    """The accelerator's form calls the device's streams and events, and the allocator (E-STREAM-5).

    Both side streams have the default priority: the replicas' all-reduce is in one of them, so there is no third that
    gathers and reduces would have to go before (E-STREAM-2).
    """
    module = mock.MagicMock()
    with mock.patch.object(torch, "get_device_module", return_value=module) as found:
        device = Device(torch.device("cuda", 1))
    found.assert_called_once_with(torch.device("cuda", 1))
    streams = Streams(device, limit_gathers=True)
    assert module.Stream.mock_calls == [mock.call(device=torch.device("cuda", 1))] * 2, "of default priority"
    tensor = mock.MagicMock()
    streams.await_unshard(tensor)
    compute = module.current_stream.return_value
    compute.wait_stream.assert_called_once_with(streams.unshard)
    tensor.record_stream.assert_called_once_with(compute)
    for _ in range(2):
        streams.note_free()
    streams.limit()
    compute.record_event.return_value.synchronize.assert_called_once_with()
    streams.unshard.wait_stream.assert_not_called()
    streams.begin_iteration("event")
    streams.unshard.wait_event.assert_called_once_with("event")
    streams.begin_iteration()
    streams.unshard.wait_stream.assert_called_once_with(compute)


class _Copies(TorchDispatchMode):
    """Writes down what moves between an accelerator, which is played by host memory, and pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = dict(kwargs or {})
        if asked.pop("pin_memory", False):
            self.lines.append("pin")
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            is_async = asked.get("non_blocking", args[-1] is True)
            where = asked.pop("device", "host")
            self.lines.append(f"copy to {where}{'' if is_async else ', waiting'}")
        return func(*args, **asked)


def test_sleep_and_wake() -> None:
    """Each memory is copied once, without waiting, into pinned memory, and the host waits once, before values can be
    read there; on the way back nothing waits, as the next forward's gathers come after it in the same stream.
    """
    model = fully_shard(unlike_blocks())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, torch.randn(3, 7))
    optimizer.step()
    sharding, copies = sharding_of(model), _Copies()
    waits = SimpleNamespace(synchronize=lambda device: copies.lines.append(f"host waits for {device}"))
    named = mock.patch.object(sharding, "device", torch.device("meta"))  # whose name torch takes without a driver
    with named, mock.patch.object(torch, "get_device_module", lambda device: waits), copies:
        offload(model, optimizer)
        asleep, copies.lines = copies.lines, []
        load(model, optimizer)
    tensors = 4 * len(NAMES)  # shard, gradient and two moments of each unit
    assert asleep == [*["pin", "copy to host"] * tensors, "host waits for meta"]
    assert copies.lines == ["copy to meta"] * tensors
    assert _step(model).lines[0] == "unshard waits for compute"
