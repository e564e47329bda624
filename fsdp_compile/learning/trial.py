"""Which of two plans is faster, found by letting them take turns.

Note [What a trial compares]
Two plans compute the same in another order. What differs for certain is how long steps wait, and that hardly varies
from step to step; what they compute takes some percent more or less each time, whatever the plan. So both are timed
apart. Of the difference in computing only so much counts as is beyond what chance explains. If the verdict would be
another one with all of it, or if chance explains what waits differ by, the plans take turns for longer; in the end a
plan that may have come out ahead by chance is taken back.

The alternative, medians of whole steps, could not tell 2 % of a step in 20 steps: plans that exposed 20 ms instead of
28 seemed to take half a percent longer.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import torch

from fsdp_compile.learning.recorder import StepClock

PAYS = -0.005  # of the step: how much shorter a new plan has to be
ALIKE = 0.005  # of the step: how much longer a new plan may be that saves memory
_LIKELY = 2.0  # standard errors that chance explains
_OF_MEDIAN = 1.4826 * 1.2533  # from the median deviation of normal values to the standard error of their median


class Timed(NamedTuple):
    """A step, in seconds: what it took, and what its collectives were waited for."""

    step: float
    waits: float


class Comparison(NamedTuple):
    """A new plan beside the old one, in fractions of the old plan's step; negative where the new one is shorter.

    Attributes:
        waits: what steps wait longer.
        computing: what they take longer beside that.
        waits_noise: by how much chance may have changed `waits`.
        computing_noise: by how much it may have changed `computing`.
    """

    waits: float
    computing: float
    waits_noise: float
    computing_noise: float

    def __str__(self) -> str:
        return (f"{self.difference:+.1%} (waits {self.waits:+.1%} ± {self.waits_noise:.1%}, "
                f"computing {self.computing:+.1%} ± {self.computing_noise:.1%})")  # fmt: skip

    @property
    def difference(self) -> float:
        """What counts: `waits`, and of `computing` what is beyond chance."""
        beyond = max(0.0, abs(self.computing) - self.computing_noise)
        return self.waits + (beyond if self.computing > 0 else -beyond)

    def pays(self, saves: bool) -> bool:
        """Whether the new plan is to be kept, which saves memory or does not."""
        limit = ALIKE if saves else PAYS
        return self.difference <= limit and self.difference + self.waits_noise <= max(0.0, limit)

    def is_sure(self, saves: bool) -> bool:
        """Whether more steps could hardly change what `pays` says."""
        limit = ALIKE if saves else PAYS
        if not self.difference <= limit:
            return not self.waits + self.computing <= limit
        return self.pays(saves) and self.waits + self.computing <= limit


def compared(new: Sequence[Timed], old: Sequence[Timed]) -> Comparison | None:
    """The steps of one plan beside those of another one; None if there is none of either."""
    if not new or not old:
        return None
    step = statistics.median(each.step for each in old)
    waits = [[each.waits for each in steps] for steps in (new, old)]
    computing = [[each.step - each.waits for each in steps] for steps in (new, old)]
    differences = (statistics.median(ours) - statistics.median(theirs) for ours, theirs in (waits, computing))
    noises = (_LIKELY * sqrt(sum(_error_of_median(each) ** 2 for each in both)) for both in (waits, computing))
    return Comparison(*(each / step for each in (*differences, *noises))) if step > 0 else None


def _error_of_median(values: Sequence[float]) -> float:
    """The standard error of their median, which outliers hardly change."""
    middle = statistics.median(values)
    return _OF_MEDIAN * statistics.median(abs(each - middle) for each in values) / sqrt(len(values))


def of_ranks(comparisons: Sequence[Comparison]) -> Comparison:
    """What all ranks share: the median of each figure."""
    return Comparison(*map(statistics.median, zip(*comparisons, strict=True)))


class Trial:
    """A new plan and the old one take turns.

    Args:
        begin: the call from which on they do.
        new: the new plan.
        old: the old one.
        block: calls of one plan in a row; the first of them does not count.
    """

    def __init__(self, begin: int, new: str, old: str, block: int) -> None:
        self.begin, self.new, self.old, self.block = begin, new, old, block
        self._steps: dict[str, list[Timed]] = {new: [], old: []}
        self._clocks: deque[tuple[str, StepClock]] = deque()  # of steps that a GPU may not have ended

    def begin_call(self, call: int, device: torch.device) -> tuple[str, StepClock | None]:
        """The plan that a call follows, and what times it, if anything does."""
        if call < self.begin:
            return self.old, None
        block, place = divmod(call - self.begin, self.block)
        plan = self.old if block % 2 else self.new
        if place == 0 and self.block > 1:
            return plan, None
        if len(self._clocks) > self.block:
            self._read_oldest()
        self._clocks.append((plan, StepClock(device)))
        return self._clocks[-1]

    def _read_oldest(self) -> None:
        """Read a clock, which has an event for each product and collective of its step."""
        plan, clock = self._clocks.popleft()
        timed = clock.seconds()
        if timed is not None:
            self._steps[plan].append(Timed(*timed))

    def compared(self) -> Comparison | None:
        """The plans beside each other; None if one was not timed."""
        while self._clocks:
            self._read_oldest()
        return compared(self._steps[self.new], self._steps[self.old])
