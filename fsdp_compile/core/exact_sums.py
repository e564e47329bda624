"""Sums of floating-point numbers that do not depend on the order, hence not on how ranks share the elements.

Additions of float64 are exact, in any order, while all addends are multiples of one number and the sum stays below 2^53
times it. So each addend is split into parts that are multiples of given powers of two; each part is summed by itself,
by any kernel, over any ranks. (J. Demmel and H. D. Nguyen, Parallel Reproducible Summation, IEEE Transactions on
Computers 64(7), 2015.) With m, the largest magnitude on all ranks, below 2^e:

    part 1   multiples of 2^(e-22), up to 2^e            2^31 of them add up to at most 2^53 multiples
    part 2   multiples of 2^(e-45), up to 2^(e-23)       of what part 1 leaves
    part 3   multiples of 2^(e-68), up to 2^(e-46)

What three parts leave is below 2^-69 m, so the sum of 2^31 elements is right to 2^-38 of m.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import torch
from torch import Tensor

_BITS = 22  # of a part, beside its sign
_PARTS = 3
_PIECE = 2**15  # elements that a CPU splits at once, in its cache
_PIECE_ON_DEVICE = 2**24


def exact_sums(
    values: Sequence[Sequence[Tensor]],
    addend: Callable[[Tensor], Tensor],
    device: torch.device,
    all_reduce: Callable[..., Tensor],
) -> Tensor:
    """The sums of several sets of numbers over all ranks, float64 `[len(values)]`, alike for any number of ranks.

    An infinity or NaN among the addends has the effect that it has in any sum. Takes two all-reduces.

    Args:
        values: of each set what this rank has of it: floating tensors of any shape, in all less than 2^31 elements.
        addend: given values in float64, 1-D, which it may overwrite, returns what to add up: by magnitude never less
            for a value of larger magnitude.
        device: of the tensors.
        all_reduce: given a plain tensor and "max" or "sum", reduces it over the ranks.
    """
    piece = _PIECE if device.type == "cpu" else _PIECE_ON_DEVICE
    none = torch.zeros((), dtype=torch.float64, device=device)
    norm = partial(torch.linalg.vector_norm, ord=inf, dtype=torch.float64)
    largest = [torch.stack([none, *(norm(each) for each in own if each.numel())]).amax() for own in values]
    most = all_reduce(addend(torch.stack(largest)).abs(), "max")
    is_finite = most.isfinite()
    _, exponent = torch.frexp(most.where(is_finite, none))
    # 1.5 times 2^52 times a power of two, for each part: a sum with it is rounded to multiples of that power.
    powers = [exponent.long().clamp(min=-800) - _BITS - (_BITS + 1) * part for part in range(_PARTS)]
    rounders = [((power + 52 + 1023) << 52).view(torch.float64) * 1.5 for power in powers]
    sums = torch.zeros(_PARTS, len(values), dtype=torch.float64, device=device)
    most_numel = max([0, *(each.numel() for own in values for each in own)])
    buffers = sums.new_empty(2, min(piece, most_numel))
    for index, own in enumerate(values):
        for stored in (part for each in own for part in each.reshape(-1).split(piece)):
            rest, rounded = addend(buffers[0, : stored.numel()].copy_(stored)), buffers[1, : stored.numel()]
            for total, rounder in zip(sums, rounders, strict=True):
                torch.add(rest, rounder[index], out=rounded).sub_(rounder[index])
                total[index] += rounded.sum()
                rest.sub_(rounded)
    first, second, third = all_reduce(sums, "sum")
    return torch.where(is_finite, third + second + first, first)
