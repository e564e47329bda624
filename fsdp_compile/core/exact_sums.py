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

import torch
from torch import Tensor

_BITS = 22  # of a part, beside its sign
_PARTS = 3


def exact_sums(addends: Sequence[Sequence[Tensor]], device: torch.device, all_reduce: Callable[..., Tensor]) -> Tensor:
    """The sums of several sets of numbers over all ranks, float64 `[len(addends)]`, alike for any number of ranks.

    An infinity or NaN among the addends has the effect that it has in any sum. Takes two all-reduces.

    Args:
        addends: of each set what this rank has of it: tensors of any shape in float64, in all less than 2^31 elements.
        device: of the tensors.
        all_reduce: given a plain tensor and "max" or "sum", reduces it over the ranks.
    """
    none = torch.zeros((), dtype=torch.float64, device=device)
    largest = [torch.stack([none, *(each.abs().amax() for each in own if each.numel())]).amax() for own in addends]
    most = all_reduce(torch.stack(largest), "max")
    is_finite = most.isfinite()
    _, exponent = torch.frexp(most.where(is_finite, none))
    rest, sums = addends, []
    for part in range(_PARTS):
        # 1.5 times 2^52 times the power of two: a sum with it is rounded to multiples of that power.
        power = exponent.long().clamp(min=-800) - _BITS - (_BITS + 1) * part
        rounders = ((power + 52 + 1023) << 52).view(torch.float64) * 1.5
        rounded = [[(each + by).sub_(by) for each in own] for own, by in zip(rest, rounders, strict=True)]
        sums.append(torch.stack([torch.stack([none, *(each.sum() for each in own)]).sum() for own in rounded]))
        rest = [[a - b for a, b in zip(*both, strict=True)] for both in zip(rest, rounded, strict=True)]
    first, second, third = all_reduce(torch.stack(sums), "sum")
    return torch.where(is_finite, third + second + first, first)
