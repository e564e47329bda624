"""Constants of hardware that agree with reported runs: regularized least squares on the logarithms of speeds.

Each constant is a factor on what a hardware file has, of one device or of several alike. A factor that few rows
determine stays near 1: each has a prior, a standard deviation of its logarithm (ridge regression). Rows have no
constants of their own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_compile.explain.runs.tables import Case
from fsdp_compile.passes.cost.hardware import Hardware, Source, with_figures

ROW_DEVIATION = 0.06  # of the logarithm of a speed that is predicted by the right constants
_DIFFERENCE = 0.02  # of a logarithm, for derivatives
_MOST = 0.7  # by which a logarithm moves in one iteration


@dataclass(frozen=True)
class Free:
    """A constant that is fitted.

    Attributes:
        field: its name in `Hardware`.
        devices: names of the hardware whose value it multiplies; empty: all.
        deviation: prior standard deviation of the logarithm of the factor.
    """

    field: str
    devices: tuple[str, ...] = ()
    deviation: float = 0.3


# Of one device: how much of the data sheet products, attention and eager kernels reach, and what comes on top.
USUAL = (
    Free("product_efficiency", deviation=0.2),
    Free("attention_efficiency", deviation=0.4),
    Free("eager_efficiency", deviation=0.3),
    Free("product_ramp", deviation=0.6),
    Free("layer_seconds", deviation=0.7),
)


def fit(cases: Sequence[Case], speeds: Sequence[float], free: Sequence[Free], rounds: int = 6) -> list[float]:
    """Logarithms of the factors of `free` at which predicted and reported tokens per second agree best.

    Args:
        cases: what ran, on hardware before it is fitted.
        speeds: reported tokens per second and GPU, of each.
        free: what is fitted.
        rounds: iterations of Gauss and Newton.
    """
    point = [0.0] * len(free)
    for _ in range(rounds):
        errors, slopes = _linear(cases, speeds, free, point)
        point = _next(free, point, errors, slopes)
    return point


def _linear(
    cases: Sequence[Case], speeds: Sequence[float], free: Sequence[Free], point: Sequence[float]
) -> tuple[list[float], list[list[float]]]:
    """Errors at `point`, and for each constant how they change with it."""
    errors = _errors(cases, speeds, free, point)
    slopes = []
    for at in range(len(free)):
        moved = [value + _DIFFERENCE * (at == other) for other, value in enumerate(point)]
        others = _errors(cases, speeds, free, moved)
        slopes.append([(b - a) / _DIFFERENCE for a, b in zip(errors, others, strict=True)])
    return errors, slopes


def _next(
    free: Sequence[Free], point: Sequence[float], errors: Sequence[float], slopes: Sequence[Sequence[float]]
) -> list[float]:
    """The point at which the linear model has the least squares, priors included."""
    import torch  # predictions of runs, which share this folder, do without

    weight = 1 / ROW_DEVIATION**2
    matrix = [[weight * _dot(one, other) for other in slopes] for one in slopes]
    right = [-weight * _dot(one, errors) for one in slopes]
    for at, each in enumerate(free):
        matrix[at][at] += 1 / each.deviation**2
        right[at] -= point[at] / each.deviation**2
    change = torch.linalg.solve(*(torch.tensor(each, dtype=torch.float64) for each in (matrix, right))).tolist()
    return [value + max(-_MOST, min(_MOST, step)) for value, step in zip(point, change, strict=True)]


def apply(hardware: Hardware, free: Sequence[Free], point: Sequence[float], source: Source | None = None) -> Hardware:
    """`hardware` with the factors that concern it."""
    figures: dict[str, float] = {}
    for each, value in zip(free, point, strict=True):
        if not each.devices or hardware.name in each.devices:
            figures[each.field] = figures.get(each.field, getattr(hardware, each.field)) * math.exp(value)
    return with_figures(hardware, source, **figures) if source else replace(hardware, **figures)  # type: ignore[arg-type]  # all are floats


def predicted(case: Case, free: Sequence[Free], point: Sequence[float]) -> float:
    """Tokens per second and GPU with these factors."""
    return case.priced(apply(case.hardware, free, point)).tokens_per_second


def leave_one_out(cases: Sequence[Case], speeds: Sequence[float], free: Sequence[Free]) -> list[float]:
    """For each case, predicted over reported speed less 1, by constants that are fitted to all others.

    These are one step of Gauss and Newton away from the constants that are fitted to all.
    """
    point = fit(cases, speeds, free)
    errors, slopes = _linear(cases, speeds, free, point)
    answers = []
    for left, case in enumerate(cases):
        others = [at for at in range(len(cases)) if at != left]
        without = _next(free, point, [errors[at] for at in others], [[each[at] for at in others] for each in slopes])
        answers.append(predicted(case, free, without) / speeds[left] - 1)
    return answers


def summary(errors: Sequence[float]) -> Mapping[str, float]:
    """Mean absolute error, its 90th percentile, and the mean error."""
    sizes = sorted(map(abs, errors))
    at = 0.9 * (len(sizes) - 1)
    low, high = sizes[math.floor(at)], sizes[math.ceil(at)]
    return {
        "mape": sum(sizes) / len(sizes),
        "p90": low + (high - low) * (at - math.floor(at)),
        "bias": sum(errors) / len(errors),
    }


def _errors(
    cases: Sequence[Case], speeds: Sequence[float], free: Sequence[Free], point: Sequence[float]
) -> list[float]:
    return [math.log(predicted(case, free, point) / speed) for case, speed in zip(cases, speeds, strict=True)]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
