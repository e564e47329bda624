"""Memory of a step: what is resident, and how much more lives at each moment."""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

POINTS = 400  # of a curve, at most


def curve(run: Callable[[], Any], device: torch.device) -> list[tuple[float, int]]:
    """`(seconds, bytes)` after each allocation while `run` runs, beside what was there before."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    wanted = torch.device(device.type).type.upper()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name == wanted
    )
    totals = accumulate(nbytes for _, nbytes in changes)
    return [((at - changes[0][0]) / 1e9, total) for (at, _), total in zip(changes, totals, strict=True)]


def thinned(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most `POINTS` points: of each stretch the highest."""
    stride = -(-len(points) // POINTS) or 1
    return [max(points[at : at + stride], key=lambda point: point[1]) for at in range(0, len(points), stride)]


def resident(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages behind `tensors`, each once."""
    storages = {storage.data_ptr(): storage.nbytes() for tensor in tensors for storage in _storages(tensor)}
    return sum(storages.values())


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.untyped_storage()
        return
    for inner in (getattr(tensor, name) for name in flatten()[0]):
        if isinstance(inner, Tensor):  # torch 2.13 lists a DTensor's mesh as well
            yield from _storages(inner)


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]


def peak(accumulate: Callable[[], Any], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes that live at most: parameters, states of the optimizer, and what a forward and backward allocates."""
    states = states_of(optimizer) if optimizer is not None else []
    there = resident([*model.parameters(), *model.buffers(), *states])
    above = max((total for _, total in curve(accumulate, torch.device("cpu"))), default=0)
    model.zero_grad()
    return there + above
