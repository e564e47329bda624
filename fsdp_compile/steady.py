"""What profilers and allocators say about a steady step: its collectives, waits of the host, bytes of libraries."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp_compile.comm.waits import names_of
from fsdp_compile.compare.memory import alive

Collective = tuple[str, str]  # what it does, and the unit


# --- order ------------------------------------------------------------------------------------------------------------

_AT_ONCE = "several units at once"
# Collectives that generated code leaves to torch's operators, as it does reduce-scatters on NCCL.
_OPERATOR = r"_c10d_functional::(all_gather_into_tensor|reduce_scatter_tensor)(?:_out)?(_coalesced)?"


def planned(sequence: str) -> Iterator[Collective]:
    """What a graph's text for comparisons lists, in the words of profiles."""
    for line in sequence.splitlines():
        kind, sizes, dtype = re.match(r"(\w+) .*?, ([\d +]+) bytes of (\w+)", line).groups()  # type: ignore[union-attr]
        numel = sum(map(int, sizes.split("+"))) // getattr(torch, dtype).itemsize
        if kind in ("gather", "reduce"):
            name = "all_gather" if kind == "gather" else "reduce"
            full = numel * dist.get_world_size() if kind == "gather" else numel
            yield name, _AT_ONCE if "+" in sizes else names_of(full)


def ran(events: Iterable[Any]) -> Iterator[Collective]:
    """The collectives of a profile that has shapes of inputs, in the order in which the host issued them."""
    for event in sorted(events, key=lambda event: event.time_range.start):
        if match := re.fullmatch(r"fsdp_compile\.\w+\.(all_gather|reduce) (.*)", event.name):
            yield match[1], match[2]
        elif match := re.fullmatch(_OPERATOR, event.name):
            kind, numel = "all_gather" if "gather" in match[1] else "reduce", 0
            if not match[2]:
                [numel] = event.input_shapes[0]
            ranks = dist.get_world_size() if kind == "all_gather" else 1
            yield kind, _AT_ONCE if match[2] else names_of(numel * ranks)


def compare_order(expected: Iterable[Collective], found: Iterable[Collective]) -> None:
    """Raise AssertionError with the first collective that was not the planned one."""
    for number, (plan, run) in enumerate(zip_longest(expected, found)):
        if plan != run:
            raise AssertionError(f"collective {number}: expected {plan}, found {run}")


# --- waits of the host ------------------------------------------------------------------------------------------------

_STEP = "fsdp_compile.steady.step"
_WAITS = re.compile("(cuda|hip)(Device|Stream)Synchronize")  # the limit on all-gathers waits for events, on purpose


def host_waits(step: Callable[[], object]) -> list[str] | None:
    """The calls by which the host waits for the device while `step` runs, with what they are part of.

    None: the profiler shows no calls of the device's runtime here.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(_STEP):
            step()
        torch.cuda.synchronize()
    events = profiler.events()
    seen = any(re.match("(cuda|cu|hip)(Module)?Launch", event.name) for event in events)
    return [*waits_within(events)] if seen else None


def waits_within(events: Iterable[Any]) -> Iterator[str]:
    """Of the events on the host, those waits that begin within the range of a step."""
    host = [event for event in events if str(event.device_type).endswith("CPU")]
    [step] = [event.time_range for event in host if event.name == _STEP]
    for wait in host:
        if _WAITS.fullmatch(wait.name) and step.start <= wait.time_range.start < step.end:
            around = [event for event in host
                      if event.time_range.start <= wait.time_range.start < event.time_range.end
                      and event.name not in (_STEP, wait.name)]  # fmt: skip
            inner = max(around, key=lambda event: event.time_range.start, default=None)
            yield wait.name + (f" in {inner.name}" if inner is not None else "")


# --- bytes ------------------------------------------------------------------------------------------------------------


def workspace(device: torch.device) -> int:
    """Bytes that a library allocates beside the result of a small product with a bias: no graph knows of them."""
    if device.type != "cuda":
        return 0
    x, weight, bias = (torch.ones(*shape, device=device) for shape in ((64, 64), (64, 64), (64,)))
    out = F.linear(x, weight, bias)
    return alive(lambda: F.linear(x, weight, bias), device, -out.nbytes).peak
