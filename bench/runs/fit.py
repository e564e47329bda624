"""Constants of hardware that agree with reported runs: regularized least squares on the logarithms of speeds.

    python -m bench fit                                   figures: all, by device, H100s by constants of A100s
    python -m bench fit --write                           the fitted constants into the package's hardware files
    python -m bench fit --runs CSV --hardware NAME OUT    a hardware file with constants fitted to one's own runs

Each constant is a factor on what a hardware file has, of one device or of several alike, with a prior (ridge
regression), so that a factor that few rows determine stays near 1. `FREE` are those of the reported runs.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from bench.runs.tables import REPORTED, Case, case_of, read_rows
from fsdp_compile.passes.cost.hardware import DATA, Hardware, Source, device, devices, to_json, with_figures

ROW_DEVIATION = 0.06  # of the logarithm of a speed that is predicted by the right constants
_DIFFERENCE = 0.02  # of a logarithm, for derivatives
_MOST = 0.7  # by which a logarithm moves in one iteration


@dataclass(frozen=True)
class Free:
    """A constant that is fitted."""

    field: str  # of `Hardware`
    devices: tuple[str, ...] = ()  # whose value it multiplies; empty: all
    deviation: float = 0.3  # prior standard deviation of the logarithm of the factor


Cases, Floats, Frees = Sequence[Case], Sequence[float], Sequence[Free]

# Of one device: how much of the data sheet products, attention and eager kernels reach, and what comes on top.
USUAL = (
    Free("product_efficiency", deviation=0.2),
    Free("attention_efficiency", deviation=0.4),
    Free("eager_efficiency", deviation=0.3),
    Free("product_ramp", deviation=0.6),
    Free("layer_seconds", deviation=0.7),
)


def fit(cases: Cases, speeds: Floats, free: Frees, rounds: int = 6) -> list[float]:
    """Logarithms of the factors of `free` at which predicted and reported `speeds` agree best: Gauss-Newton."""
    point = [0.0] * len(free)
    for _ in range(rounds):
        point = _next(free, point, *_linear(cases, speeds, free, point))
    return point


def _linear(cases: Cases, speeds: Floats, free: Frees, point: Floats) -> tuple[list[float], list[list[float]]]:
    """Errors at `point`, and for each constant how they change with it."""
    errors = _errors(cases, speeds, free, point)
    slopes = []
    for at in range(len(free)):
        moved = [value + _DIFFERENCE * (at == other) for other, value in enumerate(point)]
        others = _errors(cases, speeds, free, moved)
        slopes.append([(b - a) / _DIFFERENCE for a, b in zip(errors, others, strict=True)])
    return errors, slopes


def _next(free: Frees, point: Floats, errors: Floats, slopes: Sequence[Floats]) -> list[float]:
    """The point at which the linear model has the least squares, priors included."""
    slope = torch.tensor(slopes, dtype=torch.float64) / ROW_DEVIATION
    error, at = (torch.tensor(each, dtype=torch.float64) for each in (errors, point))
    prior = torch.tensor([1 / each.deviation**2 for each in free], dtype=torch.float64)
    matrix, right = slope @ slope.T + torch.diag(prior), -slope @ error / ROW_DEVIATION - prior * at
    return (at + torch.linalg.solve(matrix, right).clamp(-_MOST, _MOST)).tolist()


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


def leave_one_out(cases: Cases, speeds: Floats, free: Frees) -> list[float]:
    """For each case, predicted over reported speed less 1, by constants that are fitted to all others.

    These are one Gauss-Newton step away from the constants that are fitted to all.
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
    sizes = torch.tensor(errors, dtype=torch.float64).abs()
    p90 = torch.quantile(sizes, 0.9).item()
    return {"mape": sizes.mean().item(), "p90": p90, "bias": sum(errors) / len(errors)}


def _errors(cases: Cases, speeds: Floats, free: Frees, point: Floats) -> list[float]:
    return [math.log(predicted(case, free, point) / speed) for case, speed in zip(cases, speeds, strict=True)]


# --- the reported runs ------------------------------------------------------------------------------------------------

A100 = ("a100-40", "a100-80")
SLOWER = ("h100-96-500w",)
H100 = ("h100-80", *SLOWER, "h200")
FREE = (
    Free("product_efficiency", A100, 0.2),
    Free("product_efficiency", H100, 0.2),
    Free("product_efficiency", SLOWER, 0.1),
    Free("attention_efficiency", A100, 0.4),
    Free("attention_efficiency", H100, 0.4),
    Free("eager_efficiency", deviation=0.3),
    Free("product_ramp", deviation=0.6),
    Free("layer_seconds", deviation=0.7),
)
FITTED = Source("fitted", "least squares over bench/runs/data/reported_runs.csv: python -m bench fit")
AS_FITTED = Source("assumed", "as for A100 and H100, which were fitted: python -m bench fit")

# What the fit begins with, from elsewhere: FlashAttention-2 (Dao 2023) on both GPUs, the largest measured products
# (stas00/ml-engineering, compute/accelerator) less what a training step loses, 500 W over 700 W to the power of 0.4.
START = {
    **{name: {"product_efficiency": 0.80, "attention_efficiency": 0.55} for name in A100},
    **{name: {"product_efficiency": 0.60, "attention_efficiency": 0.35} for name in H100},
    **{name: {"product_efficiency": 0.60 * 0.87, "attention_efficiency": 0.35} for name in SLOWER},
}
SHARED = {"eager_efficiency": 0.7, "layer_seconds": 1e-4}


def start_of(hardware: Hardware) -> Hardware:
    """`hardware` before it is fitted: ramps are in proportion to operations that the data sheet has for each byte."""
    balance = hardware.peak.get("bfloat16", 0.0) / hardware.bandwidth
    usual = 312e12 / 2.039e12
    return replace(hardware, **SHARED, **START.get(hardware.name, {}), product_ramp=100.0 * balance / usual)


def fit_to_table(path: str | pathlib.Path, base: Hardware) -> Hardware:
    """`base` with the constants that agree best with the rows that ran on it. ValueError if there are none."""
    made = []
    for row in read_rows(path):
        try:
            made.append((case_of(row), float(row["tok_s_gpu"])))
        except (ValueError, KeyError):
            continue
    usable = [(replace(case, hardware=base), speed) for case, speed in made if case.hardware.name == base.name]
    if not usable:
        raise ValueError(f"{path}: no row ran on {base.name} and has a speed in the column tok_s_gpu")
    chosen, speeds = zip(*usable, strict=True)
    source = Source("fitted", f"least squares over {len(usable)} runs")
    return apply(base, USUAL, fit(chosen, speeds, USUAL), source)


def cases() -> tuple[list[Case], list[float]]:
    """The reported runs, on hardware before it is fitted, and their speeds."""
    rows = read_rows(REPORTED)
    made = [case_of(row) for row in rows]
    made = [replace(each, hardware=start_of(each.hardware)) for each in made]
    return made, [float(row["tok_s_gpu"]) for row in rows]


def write(point: list[float]) -> None:
    """Write the hardware files anew, with the constants at `point`."""
    for name, each in devices().items():
        if name == "cpu":
            continue
        fitted = apply(start_of(each), FREE, point, FITTED if name in (*A100, *H100[:2]) else AS_FITTED)
        table = json.loads(to_json(fitted))
        given = json.loads((DATA / f"{name}.json").read_text())
        table |= {level: given[level] for level in ("node", "network")}  # they are names of links there
        for free in FREE:
            table[free.field]["value"] = float(f"{table[free.field]['value']:.4g}")
        (DATA / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n")


def line(name: str, errors: list[float]) -> str:
    figures = summary(errors)
    return f"{name:34} {len(errors):3} runs  " + "  ".join(f"{key} {value:+.2%}" for key, value in figures.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--runs", type=pathlib.Path, metavar="CSV", help="fit to this table instead")
    parser.add_argument("--hardware", metavar="NAME", help="the hardware of these runs")
    parser.add_argument("out", nargs="?", type=pathlib.Path, metavar="OUT", help="the hardware file to write")
    args = parser.parse_args(arguments)
    if args.runs or args.out or args.hardware:
        if not (args.runs and args.out and args.hardware):
            parser.error("--runs, --hardware and OUT are needed together")
        args.out.write_text(to_json(fit_to_table(args.runs, device(args.hardware))), encoding="utf-8")
        return
    made, speeds = cases()
    point = fit(made, speeds, FREE)
    for each, value in zip(FREE, point, strict=True):
        names = each.devices or ("all",)
        begin = getattr(start_of(device(each.devices[0])), each.field) if each.devices else None
        print(f"{each.field:22} {', '.join(names):32} factor {math.exp(value):.3f} on {begin}")
    print(line("fitted to all", [predicted(c, FREE, point) / s - 1 for c, s in zip(made, speeds, strict=True)]))
    errors = leave_one_out(made, speeds, FREE)
    print(line("leave one out", errors))
    for name in dict.fromkeys(case.hardware.name for case in made):
        print(line(f"  {name}", [e for e, c in zip(errors, made, strict=True) if c.hardware.name == name]))
    old = [at for at, case in enumerate(made) if case.hardware.name in A100]
    nested = fit([made[at] for at in old], [speeds[at] for at in old], FREE)
    new = [at for at in range(len(made)) if at not in old]
    print(line("H100s, fitted to A100s alone", [predicted(made[at], FREE, nested) / speeds[at] - 1 for at in new]))
    if args.write:
        write(point)
