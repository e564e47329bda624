"""Collectives of a flat parameter: through one group or two, and divided so that the mean is safe in every dtype.

    all_gather_flat    shard [n]            ->  full [n * ranks]     through `groups` in order
    start_average      packed [n * ranks]   ->  mean [n]             through `groups` in reverse, then the replicas

The eager runtime calls both, and the bodies of `fsdp_flat::unshard` and `reduce_grads` (agree/rank_order.py).
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_compile.comm import hops
from fsdp_compile.comm.groups import NamedGroup


def all_gather_flat(shard: Tensor, groups: Sequence[NamedGroup], dtype: torch.dtype | None = None) -> Tensor:
    """All ranks' `shard`, 1-D `[n]`, in the order of the flat buffer: 1-D `[n * ranks]`, in `dtype` or its own."""
    for group in groups:
        shard = hops.gather(shard.to(dtype or shard.dtype), group)
    return shard


def start_average(
    packed: Tensor,
    groups: Sequence[NamedGroup],
    is_sharded: bool,
    replicas: NamedGroup | None = None,
    divisor: float | None = None,
    before_replicas: Callable[[Tensor], bool] | None = None,
    *,
    at_once: bool,
    same_bits: bool,
) -> tuple[Tensor, Callable[[], None]]:
    """Begin to average `packed`, 1-D, over all ranks; return where the mean will be, and what completes it.

    Args:
        packed: may be overwritten, and is the mean itself if not `is_sharded`.
        groups: those of a gather, in that order; empty to average over `replicas` alone.
        is_sharded: whether the mean is this rank's slice, 1-D `[n / ranks]`, or all of it.
        replicas: the group whose ranks hold the same slice, or None.
        divisor: what to divide the sum by; None: what gives the mean.
        before_replicas: is called with this rank's slice, reduced over `groups`, which it may change in place; if it
            returns False, the reduce over `replicas` and the division are left out.
        at_once: whether each reduce starts as soon as the one before it is enqueued, and not when the mean is
            completed. For streams: a wait holds back the current one, where it would hold back a CPU.
        same_bits: whether the sum is a tree over the ranks.
    """
    ranks = prod(group.size for group in (*groups, *([replicas] if replicas else [])))
    how = averaging(packed.dtype, ranks, same_bits, divisor)
    if how.before != 1:
        packed.div_(how.before)
    if is_sharded:
        mean, wait = _start_reduce_scatter(packed, groups, how.op, at_once)
    else:
        mean, wait = packed, lambda: None
        for group in groups:
            if group.size > 1:
                wait = hops.start_all_reduce(packed, group, how.op)
    waits: list[Callable[[], None]] = []

    def start_over_replicas() -> bool:
        """The mean over groups is there. Whether it is completed: the shard alone crosses the slow links."""
        wait()
        goes_on = before_replicas is None or before_replicas(mean)
        if goes_on and replicas is not None:
            waits.append(hops.start_all_reduce(mean, replicas, how.op))
        return goes_on

    started = start_over_replicas() if at_once and replicas is not None else None
    held = packed if at_once else None  # the stream of its memory has not waited for the reduce

    def finish(_held: Tensor | None = held) -> None:
        goes_on = start_over_replicas() if started is None else started
        for wait_for_replicas in waits:
            wait_for_replicas()
        if goes_on and how.after != 1:
            mean.div_(how.after)

    return mean, finish


def _start_reduce_scatter(
    packed: Tensor, groups: Sequence[NamedGroup], op: str, at_once: bool
) -> tuple[Tensor, Callable[[], None]]:
    """The second of two stages follows when the first is waited for: `at_once`, or when the mean is completed."""
    *peers, last = groups
    part, wait = hops.start_reduce_scatter(packed, last, op)
    if not peers:
        return part, wait
    if at_once:
        wait()
        return hops.start_reduce_scatter(part, peers[0], op)
    reduced = part.new_empty(part.numel() // peers[0].size)

    def finish() -> None:
        wait()
        reduced.copy_(hops.reduce_scatter(part, peers[0], op))

    return reduced, finish


class Averaging(NamedTuple):
    """A mean over ranks: divide by `before`, reduce with `op` ("tree": a sum in pairs), divide by `after`."""

    op: str
    before: float
    after: float


def averaging(dtype: torch.dtype, ranks: int, same_bits: bool = False, divisor: float | None = None) -> Averaging:
    """Average gradients of `dtype` over `ranks` ranks, or divide their sum by `divisor` (E-PG-11, E-RED-3).

    float16 ends at 65504 and loses digits below 6e-5: a sum of scaled gradients overflows where their mean would not,
    and dividing by all ranks first loses the small ones. So half of the division (in the exponent) comes before and
    half after: means up to 65504 / `after` are safe. bfloat16 and wider have the range of float32 and use the
    collective's mean, which saves a kernel. With `same_bits` the sum is a tree over the ranks, a power of two by which
    all are divided exactly.
    """
    by = float(ranks if divisor is None else divisor)
    if same_bits:
        if dtype == torch.float16:
            raise ValueError("reduction_order='tree' cannot add up float16; reduce in bfloat16 or float32")
        return Averaging("tree", 1.0, by)
    if dtype == torch.float16:
        return Averaging("sum", *gradient_divide_factors(by))
    return Averaging("avg", 1.0, 1.0) if divisor is None else Averaging("sum", 1.0, by)


def gradient_divide_factors(ranks: float) -> tuple[float, float]:
    """By what to divide before and after a sum over `ranks`; the product is `ranks` (E-PG-11).

    The first doubles from 1 until it reaches the square root of `ranks` or divides it no longer: both the addends and
    the sum stay within the range of a narrow dtype.
    """
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return float(before), ranks / before
