"""What ranks measure where a search of a plan asks for it: the link of each group, and how fast they compute.

    measured_link     seconds of a launch and bytes per second, between the ranks of a group
    measured_speed    how fast a device is, beside one that there is a hardware file for

Note [How a link is measured]
The ranks of a group meet in its store, and raise where one does not come. Then they time all-gathers and
reduce-scatters of a few sizes, up to that of the largest unit, for about a second: in bursts with pauses between them,
as a machine that does other work is slow or fast for a moment. Of a burst the least counts, of bursts the median. The
figures that a rank writes first count for all ranks: with the same figures, they make the same plan. Groups along one
dimension of a mesh have one name and share their figures.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

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
_ALL = "all have come"


class NoLink(Exception):
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
        NoLink: there are no other ranks.
        RuntimeError: a rank has not come in time, or a collective has failed.
    """
    if not exists(group):
        raise NoLink("there are no other ranks")
    state = state_of(group)
    if state.link is None:
        figures = fit_link(link_times(group, device, largest, limit, clock))
        state.link = _agreed(f"link/{shared_name(group)}", *figures)
    latency, bandwidth = state.link
    return latency, bandwidth


def link_times(
    group: dist.ProcessGroup, device: torch.device, largest: int, limit: float, clock: Clock = time.perf_counter
) -> list[tuple[float, float]]:
    """Bytes that a rank sends and seconds, of all-gathers and reduce-scatters; all ranks of `group` together.

    Arguments and errors are those of `measured_link`.
    """
    ranks, board = group.size(), MessageBoard.of_group(group, "fsdp_flat/link")
    largest = int(board.decide("largest", str(largest)))  # ranks may have begun with other graphs
    sizes = [size for at, size in enumerate(SIZES) if at < 2 or SIZES[at - 1] < largest]
    parts = {size: torch.zeros(-(-size // 4 // ranks) * ranks, device=device) for size in sizes}
    limit = limit_in(group, limit)
    late = f"link: expected all ranks to come and measure it, found one missing for {limit:g} s; name the link instead"
    outcome = board.meet("meeting", ranks, last=lambda: _ALL, late=lambda: late, seconds=limit)
    if outcome != _ALL:
        raise RuntimeError(outcome)
    bursts = dict[int, list[list[float]]]()  # by size, seconds of both
    for size, part in parts.items():
        bursts[size] = [_seconds_of_both(part, group, clock)]
        is_slow = board.decide(f"after {size}", "next" if max(bursts[size][0]) < _SOON else "end") == "end"
        if is_slow and size > SIZES[0]:  # one size does not tell latency from bandwidth
            break
    for _ in range(1, BURSTS):
        time.sleep(_PAUSE)
        for size, seconds in bursts.items():
            seconds.append(_seconds_of_both(parts[size], group, clock))
    return [
        (parts[size].nbytes * (1 - 1 / ranks), statistics.median(of_one))
        for size, seconds in bursts.items()
        for of_one in zip(*seconds, strict=True)
    ]


def _seconds_of_both(full: Tensor, group: dist.ProcessGroup, clock: Clock) -> list[float]:
    """Seconds of an all-gather that fills `full`, and of a reduce-scatter of it."""
    ranks, name = group.size(), group.group_name
    shard = full[: full.numel() // ranks].clone()
    return [
        _least_seconds(call, full.device, 3, clock)
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
    """How fast `device` is beside `base`, by a product in `dtype` and a copy; equal on all ranks."""
    key, shared = f"speed/{device.type}/{dtype}", agreement.board()
    known = shared is not None and shared.has(key)
    return _agreed(key, 1.0 if known else _speed(base, dtype, device))[0]


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


def _agreed(key: str, *figures: float) -> tuple[float, ...]:
    """`figures`, to two digits, or those that another rank has written under `key` before."""
    return tuple(json.loads(agreement.agree(key, json.dumps([float(f"{each:.2g}") for each in figures]))))
