"""Predictions beside reported runs: constants are fitted, and each run is predicted by constants fitted to the others.

    python -m bench.fit_runs                 figures: all, by device, and H100s by constants fitted to A100s alone
    python -m bench.fit_runs --write         the fitted constants into the package's hardware files
    python -m bench.fit_runs --plot FILE     a scatter plot of predicted and reported speeds

Five constants a device are fitted: the parts of the data sheet that products, attention and eager kernels reach, how
long a product's inner loop takes to begin, and what a block takes beside its kernels. The first two are those of A100
and H100 each; for the other three all devices have the same factor on figures that are in proportion to their data
sheets. GPUs of 500 W have one more factor, of products.
"""

import argparse
import json
import math
import pathlib
from dataclasses import replace

from fsdp_compile.explain.runs.fit import Free, apply, fit, leave_one_out, predicted, summary
from fsdp_compile.explain.runs.tables import REPORTED, Case, case_of, read_rows
from fsdp_compile.passes.cost.hardware import DATA, Hardware, Source, device, devices, to_json

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
FITTED = Source("fitted", "least squares over explain/runs/data/reported_runs.csv: python -m bench.fit_runs")
AS_FITTED = Source("assumed", "as for A100 and H100, which were fitted: python -m bench.fit_runs")

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
    """One line of figures."""
    figures = summary(errors)
    return f"{name:34} {len(errors):3} runs  " + "  ".join(f"{key} {value:+.2%}" for key, value in figures.items())


def plot(path: pathlib.Path, made: list[Case], speeds: list[float], errors: list[float]) -> None:
    """Predicted over reported tokens per second, each by constants that were fitted without it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5))
    for name in dict.fromkeys(case.hardware.name for case in made):
        chosen = [at for at, case in enumerate(made) if case.hardware.name == name]
        axes.scatter([speeds[at] for at in chosen], [speeds[at] * (1 + errors[at]) for at in chosen], s=18, label=name)
    ends = [min(speeds) / 1.5, max(speeds) * 1.5]
    axes.plot(ends, ends, color="gray", linewidth=0.8)
    axes.fill_between(ends, [0.9 * each for each in ends], [1.1 * each for each in ends], color="gray", alpha=0.15)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="reported tokens per second and GPU",
             ylabel="predicted, by constants fitted to the other runs")  # fmt: skip
    axes.legend(title="band: 10 %", frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--plot", type=pathlib.Path)
    args = parser.parse_args()
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
    if args.plot:
        plot(args.plot, made, speeds, errors)


if __name__ == "__main__":
    main()
