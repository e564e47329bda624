"""Bytes that are alive in a step, on any device."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
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


def resident(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages behind `tensors`, each once."""
    storages = (inner.untyped_storage() for tensor in tensors for inner in inner_tensors(tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state."""
    return [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
