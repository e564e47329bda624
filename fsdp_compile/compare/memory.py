"""Bytes that are alive in a step, on any device, and how long the host waits for collectives."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fsdp_compile.core.ops import inner_tensors


def curve(run: Callable[[], Any], device: torch.device) -> list[tuple[float, int]]:
    """`(seconds, bytes)` after each allocation while `run` runs, beside what was there before."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    wanted = device.type.upper()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name == wanted
    )
    totals = accumulate(nbytes for _, nbytes in changes)
    return [((at - changes[0][0]) / 1e9, total) for (at, _), total in zip(changes, totals, strict=True)]


def waited(run: Callable[[], Any]) -> float | None:
    """Seconds that the host waits for collectives while `run` runs, by this package's ranges; None: it has none."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    results: Any = profiler.profiler
    events = [each for each in results.kineto_results.events() if each.name().startswith("fsdp_compile.")]
    return sum(each.duration_ns() for each in events if ".wait_" in each.name()) / 1e9 if events else None


def resident(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages behind `tensors`, each once."""
    storages = (inner.untyped_storage() for tensor in tensors for inner in inner_tensors(tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]


_TRIES = 4


class Alive(NamedTuple):
    """Bytes alive at most in a step, and what it leaves behind; None: that cannot be counted."""

    peak: int
    left: int | None


def alive(step: Callable[[], object], device: torch.device, stays: int) -> Alive:
    """Count what `step` allocates: by the allocator, or on the CPU by the profiler.

    The profiler does not see what threads of gloo free, which now and then are the last to use a buffer. So with gloo
    the least of some steps counts, and what is left is not known.

    Args:
        step: leaves no gradient behind, and has run before.
        device: what it runs on.
        stays: bytes that are there all the time and count, such as parameters.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return Alive(stays + torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before)
    by_gloo = dist.get_world_size() > 1
    seen = [[0, *(total for _, total in curve(step, device))] for _ in range(_TRIES if by_gloo else 1)]
    return Alive(stays + min(map(max, seen)), None if by_gloo else seen[0][-1])
