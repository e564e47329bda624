"""The emulated link for CUDA tensors: a transfer occupies one side stream, and no SM but a single thread's.

    compute     | forward 0    | wait |  forward 1 ...           waits are events, as NCCL's are
    link stream    move, sleep ->|                               one stream for all groups: transfers are serial

The sleep is a kernel of one thread that counts clock ticks; ticks per second are measured once. It stands in the stream
for `latency + bytes / bandwidth`; what is moved before it takes a part of that time, as NCCL's own writes do.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.link import Call, Link, untraced


class Marks:
    """What a call leaves in streams; read after the device has been synchronised."""

    def __init__(self) -> None:
        self.begin, self.end = _event(), _event()
        self.waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@cache
def link_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that is the link."""
    return torch.cuda.Stream(device)


@cache
def ticks_per_second(device: torch.device) -> float:
    """How many ticks the sleeping kernel counts in a second, from two sleeps of different length."""
    seconds = {ticks: min(_time_sleep(ticks) for _ in range(3)) for ticks in (10_000_000, 50_000_000)}
    return 40_000_000 / (seconds[50_000_000] - seconds[10_000_000])


def _time_sleep(ticks: int) -> float:
    begin, end = _event(), _event()
    begin.record()
    torch.cuda._sleep(ticks)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class CudaWork(dist._Work):
    """A collective on CUDA tensors that was put into the link's stream; as NCCL's it owns them until its wait."""

    def __init__(self, marks: Marks, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.marks, self.tensors, self.device = marks, list(tensors), tensors[0].device

    @untraced
    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait; if it is the one that computes, events around that show for how long."""
        stream = torch.cuda.current_stream(self.device)
        before, after = _event(), _event()
        before.record(stream)
        stream.wait_event(self.marks.end)
        after.record(stream)
        if stream == torch.cuda.default_stream(self.device):
            self.marks.waits.append((before, after))
        self.tensors.clear()
        return True

    def is_completed(self) -> bool:
        return self.marks.end.query()

    def is_success(self) -> bool:
        return True

    @untraced
    def get_future(self) -> Any:
        """Complete at once: CUDA futures order streams, not the host."""
        future: Any = torch.futures.Future(devices=[self.device])
        with torch.cuda.stream(link_stream(self.device)):
            future.set_result(list(self.tensors))
        return future


def issue(link: Link, kind: str, group: str, nbytes: int, move: Callable[[], None], tensors: Sequence[Tensor]) -> Any:
    """Put a call on `tensors` behind what the current stream has queued and behind the calls before it."""
    device = tensors[0].device
    stream, marks = link_stream(device), Marks()
    ticks = ticks_per_second(device) * link.seconds(nbytes)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.no_grad():
        marks.begin.record()
        move()
        torch.cuda._sleep(int(ticks))
        marks.end.record()
    call = Call(kind, group, nbytes, link.clock(), 0.0, 0.0)
    link.calls.append(call)
    link.marks.append((call, marks))
    return CudaWork(marks, tensors)


def settle(link: Link, origin: torch.cuda.Event) -> None:
    """Fill in the times of all calls, in seconds after `origin`; the host waits for the device."""
    torch.cuda.synchronize()

    def seconds(event: torch.cuda.Event) -> float:
        return origin.elapsed_time(event) / 1e3

    for call, marks in link.marks:
        call.begin, call.end = seconds(marks.begin), seconds(marks.end)
        call.waits = [(seconds(before), seconds(after)) for before, after in marks.waits]
    link.marks.clear()
