"""Memory of a step: what is resident, and how much more lives at each moment."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_compile.compare.memory import curve, resident, states_of

POINTS = 400  # of a curve, at most


def thinned(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most `POINTS` points: of each stretch the highest."""
    stride = -(-len(points) // POINTS) or 1
    return [max(points[at : at + stride], key=lambda point: point[1]) for at in range(0, len(points), stride)]


def peak(accumulate: Callable[[], Any], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes that live at most: parameters, states of the optimizer, and what a forward and backward allocates."""
    states = states_of(optimizer) if optimizer is not None else []
    there = resident([*model.parameters(), *model.buffers(), *states])
    above = max((total for _, total in curve(accumulate, torch.device("cpu"))), default=0)
    model.zero_grad()
    return there + above
