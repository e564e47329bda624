"""How a mean over ranks is made: by the collective itself, or from a sum that is divided before and after."""

from typing import NamedTuple

import torch


class Averaging(NamedTuple):
    """A mean over ranks: divide by `before`, reduce with `op`, divide by `after`."""

    op: str
    before: float
    after: float


def averaging(dtype: torch.dtype, ranks: int) -> Averaging:
    """How gradients of `dtype` are averaged over `ranks` ranks (E-PG-11, E-RED-3).

    float16 ends at 65504 and loses digits below 6e-5: a sum of scaled gradients overflows where their mean would not,
    and dividing by all ranks at first loses the small ones. A collective's own mean may do either, as its backend
    likes. So half of the division (in the exponent) comes before and half after: means up to 65504 / `after` are safe.
    bfloat16 and wider have the range of float32, where neither happens, and keep the collective's mean: one kernel
    less.
    """
    if dtype != torch.float16:
        return Averaging("avg", 1.0, 1.0)
    return Averaging("sum", *gradient_divide_factors(ranks))


def gradient_divide_factors(ranks: int) -> tuple[float, float]:
    """By what to divide before and after a sum over `ranks`; the product is `ranks` (E-PG-11).

    The first doubles from 1 until it reaches the square root of `ranks` or divides it no longer. Halving the division
    so keeps both the addends and the sum within the range of a narrow dtype.
    """
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return float(before), ranks / before
