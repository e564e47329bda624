"""What ranks measure where a search of a plan asks for it: the link of each group, and how fast they compute.

    measured_link     seconds of a launch and bytes per second, between the ranks of a group
    measured_speed    how fast a device is, beside one that there is a hardware file for

Note [How a link is measured]
The ranks of a group meet in its store. Then they time all-gathers and reduce-scatters of a few sizes, up to that of the
largest unit, for about a second: in bursts with pauses between them, as a machine that does other work is slow or fast
for a moment. Of a burst the least counts, of bursts the median. The figures that a rank writes first count for all
ranks: with the same figures, they make the same plan. Groups along one dimension of a mesh have one name and share
their figures.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fsdp_compile.comm import collectives
from fsdp_compile.comm.comparison import exists, limit_in
from fsdp_compile.comm.groups import shared_name
from fsdp_compile.comm.waits import MessageBoard, state_of
from fsdp_compile.passes import agreement
from fsdp_compile.passes.cost.hardware import Hardware
from fsdp_compile.passes.cost.roofline import chain_seconds, product_seconds

Clock = Callable[[], float]

SIZES = (1 << 14, 1 << 18, 1 << 21, 1 << 24, 1 << 27)  # bytes of what is gathered or reduced; the first two always
_SOON = 0.005  # seconds of a call: if one took longer, the sizes behind the second are left out
BURSTS = 4  # in which everything is timed
_PAUSE = 0.03  # seconds between bursts
_TOGETHER = 5.0  # seconds within which what fails on all ranks has failed on all
_ALL = "all have come"
_ANSWER = 60.0  # seconds that ranks wait for figures once they have met


class NotMeasured(Exception):
    """Why there are no figures; the same on all ranks of the group."""


class NoLink(NotMeasured):
    """There is nothing to measure."""


def measured_link(
    group: dist.ProcessGroup, device: torch.device, largest: int, limit: float, clock: Clock = time.perf_counter
) -> tuple[float, float]:
    """Seconds of a launch, and bytes per second that a rank sends; all ranks of `group` measure once, together.

    Args:
        group: the ranks.
        device: where the tensors are.
        largest: bytes of the largest tensor that is to be gathered.
        limit: seconds to wait for the others to come, or the group's timeout if that is shorter.
        clock: returns seconds.

    Raises:
        NotMeasured: there is no link to measure (NoLink), a rank has not come in time or has no memory for it, or
            measuring has failed on all ranks.
        RuntimeError: a rank has come, and then stopped for longer than `limit`, or it alone has failed.
    """
    if not exists(group):
        raise NoLink("there are no other ranks")
    state, key = state_of(group), f"link/{shared_name(group)}"
    if state.link is None:
        try:
            points = link_times(group, device, largest, limit_in(group, limit), clock)
            if group.rank() == 0:
                latency, bandwidth = fit_link(points)
                _offer(key, {"latency": latency, "bandwidth": bandwidth})
        except NotMeasured as reason:
            _offer_reason(key, str(reason))
        except Exception as error:
            _offer_reason(key, _failed_alike(group, error))
        state.link = _read(key)
    figures = _counting(state.link)
    return figures["latency"], figures["bandwidth"]


def link_times(
    group: dist.ProcessGroup, device: torch.device, largest: int, limit: float, clock: Clock = time.perf_counter
) -> list[tuple[float, float]]:
    """Bytes that a rank sends and seconds, of all-gathers and reduce-scatters; all ranks of `group` together.

    Arguments and errors are those of `measured_link`.
    """
    ranks, board = group.size(), MessageBoard.of_group(group, "fsdp_flat/link")
    largest = int(board.decide("largest", str(largest)))  # ranks may have begun with other graphs
    sizes = [size for at, size in enumerate(SIZES) if at < 2 or SIZES[at - 1] < largest]
    numel = -(-sizes[-1] // 4 // ranks) * ranks
    try:  # as much as will be allocated: later, others wait for this rank
        full = torch.zeros(3 * numel, device=device)[:numel].clone()
    except Exception as error:
        board.decide("meeting/answer", f"rank {dist.get_rank()} has no memory for {12 * numel} bytes: {_named(error)}")
    _meet(board, ranks, limit)
    bursts, state = dict[int, list[list[float]]](), state_of(group)  # by size, seconds of both
    parts = {size: full[: -(-size // 4 // ranks) * ranks] for size in sizes}
    state.until, calls = time.monotonic() + limit, 8
    try:
        for size, part in parts.items():
            bursts[size] = [_seconds_of_both(part, group, clock, calls)]
            is_slow = board.decide(f"after {size}", "next" if max(bursts[size][0]) < _SOON else "end") == "end"
            if is_slow and size > SIZES[0]:  # one size does not tell latency from bandwidth
                break
            calls = 3 if is_slow or size >= SIZES[1] else calls
        for _ in range(1, BURSTS):
            time.sleep(_PAUSE)
            for size, seconds in bursts.items():
                seconds.append(_seconds_of_both(parts[size], group, clock, 1 if is_slow else 3))
    except RuntimeError as error:  # ranks that gave up may not go on: others would communicate something else
        if time.monotonic() <= state.until:
            raise
        raise RuntimeError(f"rank {dist.get_rank()}: expected all ranks to measure their link, but one came and then "
                           f"stopped; find out why it hangs ({error})") from error  # fmt: skip
    finally:
        state.until = math.inf
    return [
        (parts[size].nbytes * (1 - 1 / ranks), statistics.median(of_one))
        for size, seconds in bursts.items()
        for of_one in zip(*seconds, strict=True)
    ]


def _failed_alike(group: dist.ProcessGroup, error: Exception) -> str:
    """Why measuring has failed, once it has on all ranks, at the same place: a backend that lacks a collective.

    RuntimeError if others go on, for this one cannot: they wait for it in a collective.
    """
    rank, reason = dist.get_rank(), _named(error)
    board = MessageBoard.of_group(group, f"fsdp_flat/link/failed/{state_of(group).begun}")
    try:
        _meet(board, group.size(), _TOGETHER)
    except NotMeasured:
        text = f"rank {rank} failed while ranks measured their link, and the others did not: {reason}"
        state_of(group).tell(text)
        raise RuntimeError(text) from error
    return board.decide("reason", f"rank {rank}: {reason}")


def _named(error: Exception) -> str:
    """The class of an error and its first line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _meet(board: MessageBoard, ranks: int, limit: float) -> None:
    """Return when all ranks have come. NotMeasured, on all of them, if one comes too late or cannot measure."""
    late = f"a rank has not compiled a sharded model within {limit:g} s"
    outcome = board.meet("meeting", ranks, last=lambda: _ALL, late=lambda: late, seconds=limit)
    if outcome != _ALL:
        raise NotMeasured(outcome)


def _seconds_of_both(full: Tensor, group: dist.ProcessGroup, clock: Clock, calls: int) -> list[float]:
    """Seconds of an all-gather that fills `full`, and of a reduce-scatter of it."""
    ranks, name = group.size(), group.group_name
    shard = full[: full.numel() // ranks].clone()
    return [
        _least_seconds(call, full.device, calls, clock)
        for call in (
            lambda: collectives.start_all_gather(full, shard, name).wait(),
            lambda: collectives.start_reduce_scatter(full, ranks, name)[1](),
        )
    ]


def _least_seconds(call: Callable[[], object], device: torch.device, calls: int, clock: Clock) -> float:
    """Of a call, as other programs delay some; the first one prepares others and does not count."""
    return min([seconds_of(call, device, clock) for _ in range(1 + calls)][1:])


def seconds_of(call: Callable[[], object], device: torch.device, clock: Clock, repeats: int = 1) -> float:
    """Of a call, of so many one after another, until the device has computed all that it was given."""
    finish = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    finish()
    begin = clock()
    for _ in range(repeats):
        call()
    finish()
    return (clock() - begin) / repeats


def fit_link(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and bandwidth that agree best with pairs of bytes sent and seconds.

    Least squares of predicted over measured seconds, so that small messages count as well.
    """
    rows = torch.tensor([[1 / seconds, sent / seconds] for sent, seconds in points], dtype=torch.float64)
    latency, slope = torch.linalg.lstsq(rows, torch.ones_like(rows[:, :1])).solution.flatten().tolist()
    return max(latency, 0.0), 1 / max(slope, 1e-15)


def measured_speed(base: Hardware, dtype: torch.dtype, device: torch.device) -> float:
    """How fast `device` is beside `base`, by a product in `dtype` and a copy; equal on all ranks.

    Raises:
        NotMeasured: the rank that came first could not.
    """
    key, shared = f"speed/{device.type}/{dtype}", agreement.board()
    if shared is None or not shared.has(key):
        try:
            _offer(key, {"speed": _speed(base, dtype, device)})
        except Exception as error:
            _offer_reason(key, f"rank {dist.get_rank() if dist.is_initialized() else 0}: {_named(error)}")
    return float(_counting(_read(key))["speed"])


def _speed(base: Hardware, dtype: torch.dtype, device: torch.device) -> float:
    """Of a step whose products take three quarters of its time on `base`, and the rest of which moves bytes."""
    width, moved = (512, 1 << 24) if device.type == "cpu" else (4096, 1 << 26)
    a, b = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    x = torch.ones(moved, device=device)
    name, bursts = str(dtype).removeprefix("torch."), list[float]()
    product_there, chain_there = (
        product_seconds(2.0 * width**3, 0.0, width, name, base),
        chain_seconds(2.0 * x.nbytes, True, base),
    )
    for _ in range(BURSTS):
        product = _least_seconds(lambda: F.linear(a, b), device, 4, time.perf_counter)
        chain = _least_seconds(x.neg_, device, 3, time.perf_counter)
        bursts.append(1 / (0.75 * product / product_there + 0.25 * chain / chain_there))
        time.sleep(_PAUSE)
    return statistics.median(bursts)


def _offer(key: str, figures: dict[str, float]) -> None:
    """Let these count under `key`, unless others count already."""
    agreement.agree(key, json.dumps({name: float(f"{each:.2g}") for name, each in figures.items()}))


def _offer_reason(key: str, reason: str) -> None:
    """Let this be why there are no figures under `key`, unless figures of others count already."""
    agreement.agree(key, json.dumps({"reason": reason}))


def _counting(read: dict[str, Any]) -> dict[str, Any]:
    """What was read, if it is figures. NotMeasured if it is the reason why there are none."""
    if "reason" in read:
        raise NotMeasured(read["reason"])
    return read


def _read(key: str) -> dict[str, Any]:
    """What counts under `key`: figures, or the reason why there are none."""
    shared = agreement.board()
    message = None if shared is None else shared.read(key, _ANSWER)
    reason = f"no rank has said within {_ANSWER:g} s what it measured"
    read: dict[str, Any] = json.loads(message or agreement.agree(key, json.dumps({"reason": reason})))
    return read
