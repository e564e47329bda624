"""What an accelerator would be told: stream waits, memory hand-overs, events. Nothing here needs one."""

from typing import Any
from unittest import mock

import torch
from compiling import step
from recording import Log, recorded, unlike_blocks
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.eager.streams import Accelerator, Device, Streams, device_of

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


def test_memory_is_registered_before_it_is_freed() -> None:
    """Full parameters, made in one stream and read in another, are handed over before they are freed.

    E-STREAM-3, E-RED-7.
    """
    log = _step(fully_shard(unlike_blocks()))
    for name in NAMES:
        freed = [place for place, line in enumerate(log.lines) if line == f"free {name}"]
        kept = [place for place, line in enumerate(log.lines) if line == f"keep {name} for compute"]
        assert len(freed) == len(kept) == (1 if name == "root" else 2)
        assert all(keep < free for keep, free in zip(kept, freed, strict=True))


def test_reduces_run_beside_compute() -> None:
    """A reduce starts in the post-backward stream after compute's gradients; compute waits at the end (E-STREAM-3)."""
    log = _step(fully_shard(unlike_blocks()))
    last = max(log.place(f"reduce {name} in post-backward") for name in NAMES)
    for name in NAMES:
        reduce = log.place(f"reduce {name} in post-backward")
        assert log.lines[reduce - 1] == "post-backward waits for compute"
        waited = log.place(f"wait for reduced {name} in post-backward")
        assert log.lines[waited + 1] == "compute waits for post-backward"
    assert log.place("compute waits for post-backward", last) > last


def test_rate_limit() -> None:
    """Each free leaves an event; before a gather the host waits for the oldest of two (E-RATE-1, E-RATE-2)."""
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


def test_no_rate_limit() -> None:
    """Without the limit the host never waits."""
    log = _step(fully_shard(unlike_blocks(6), limit_all_gathers=False), limit_gathers=False)
    assert not log.about("event", "host waits")


def test_rate_limit_is_named_in_profiles() -> None:
    """The host's wait has a name of its own (E-RATE-3)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _step(fully_shard(unlike_blocks(6)))
    assert "fsdp_compile.limit_all_gathers" in {event.name for event in profile.events()}


def test_cpu_has_nothing_to_order() -> None:
    """On a CPU the same calls do nothing: no stream, no event, no wait (E-STREAM-5)."""
    device = device_of(torch.device("cpu"))
    assert type(device) is Device
    streams = Streams(device, limit_gathers=True)
    with streams.unsharding(), streams.reducing(), streams.finishing():
        streams.note_free()
        streams.limit()
        streams.await_reduce(torch.ones(2))
        assert streams.reduce_event() is None
    assert not streams._freed


def test_host_waits_for_offloaded_gradients() -> None:
    """Offloaded, the host waits for a gradient's copy before autograd hands it out on the CPU (E-OFF-5, E-FIN-2)."""
    model = fully_shard(unlike_blocks(), cpu_offload=CPUOffload(offload_params=True))
    log = _step(model, limit_gathers=False)
    copied = log.about("event")
    assert len(copied) == len(log.about("host waits")) == len(NAMES)
    assert all(line.endswith("in post-backward") for line in copied)


def test_evaluation_ends_with_the_copies_of_shards() -> None:
    """A forward without gradients returns when the device has read the shards: the host may change them then."""
    model = fully_shard(unlike_blocks(), cpu_offload=CPUOffload(offload_params=True))
    with recorded(model, limit_gathers=False) as log, torch.no_grad():
        model(torch.randn(3, 7))
    assert log.lines[-1].startswith("host waits for event")


def test_a_unit_outside_of_its_root_sees_the_step() -> None:
    """Where no root's forward has ordered gathers after the optimizer's step, the unit itself does."""
    model = fully_shard(unlike_blocks())
    with recorded(model) as log:
        model.blocks[1](torch.randn(3, 11))
    assert log.place("unshard waits for compute") < log.place("gather blocks.1 in unshard")


def test_replicas_gather_nothing() -> None:
    """NO_SHARD in the parameters' dtype: no gather, nothing to free, reduces beside compute (E-STRAT-3)."""
    log = _step(fully_shard(unlike_blocks(), sharding_strategy=ShardingStrategy.NO_SHARD))
    assert not log.about("gather", "free", "host waits")


def test_accelerator_speaks_to_its_torch_module() -> None:
    """The accelerator's form calls the device's streams and events, and the allocator (E-STREAM-5)."""
    module = mock.MagicMock()
    with mock.patch.object(torch, "get_device_module", return_value=module) as found:
        device = device_of(torch.device("cuda", 1))
    assert isinstance(device, Accelerator)
    found.assert_called_once_with(torch.device("cuda", 1))
    streams = Streams(device, limit_gathers=True)
    assert module.Stream.call_count == 2
    tensor = mock.MagicMock()
    streams.await_unshard(tensor)
    compute = module.current_stream.return_value
    compute.wait_stream.assert_called_once_with(streams.unshard)
    tensor.record_stream.assert_called_once_with(compute)
    for _ in range(2):
        streams.note_free()
    streams.limit()
    compute.record_event.return_value.synchronize.assert_called_once_with()
