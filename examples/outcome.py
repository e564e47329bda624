"""What came out of train_gpt.py: a table, a picture, and whether two runs agree."""

import statistics
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measures import Run
from options import TOLERANCE


def table(runs: dict[str, Run], device: torch.device) -> str:
    """One column per run, one row per figure, all of rank 0."""
    titles = [
        "",
        "compile, s (first step less median)",
        "median step, ms",
        "tokens/s, all ranks",
        f"peak memory from step 2, MB ({'allocated' if device.type == 'cuda' else 'growth of resident set'})",
        "final loss",
    ]
    width = max(map(len, titles))
    rows = zip(titles, *(column(name, run) for name, run in runs.items()), strict=True)
    return "\n".join(f"{title:<{width}}" + "".join(f"{cell:>12}" for cell in cells) for title, *cells in rows)


def column(name: str, run: Run) -> list[str]:
    """The figures of one run, in the order of the table's titles."""
    compiling = f"{run.seconds[0] - run.step:.1f}" if name == "compiled" else "-"
    return [name, compiling, f"{1e3 * run.step:.1f}", f"{run.speed:,.0f}", f"{run.peak:,.0f}", f"{run.losses[-1]:.4f}"]


LOOK = {  # wide and pale below, thin and dark above: both are seen where they coincide
    "eager": {"color": "#f6b67f", "linewidth": 5, "marker": "o", "markersize": 5},
    "compiled": {"color": "#1f4e79", "linewidth": 1.5, "marker": ".", "markersize": 4},
}


def draw(runs: dict[str, Run], path: Path) -> None:
    """Loss curves on the left, throughputs on the right."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    draw_losses(left, runs)
    draw_speeds(right, runs)
    figure.savefig(path, dpi=150)


def draw_losses(axes: Axes, runs: dict[str, Run]) -> None:
    """One line per run over the steps."""
    for name, run in runs.items():
        axes.plot(range(1, len(run.losses) + 1), run.losses, label=name, **LOOK[name])
    axes.set_title("Training loss", loc="left")
    axes.set(xlabel="step", ylabel="cross-entropy, nats per byte")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)


def draw_speeds(axes: Axes, runs: dict[str, Run]) -> None:
    """One bar per run, its figure above it."""
    speeds = [run.speed for run in runs.values()]
    bars = axes.bar(list(runs), speeds, width=0.55, color=[LOOK[name]["color"] for name in runs])
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3)
    axes.set_title("Throughput", loc="left")
    axes.set_ylabel("tokens/s, all ranks, median step")
    axes.margins(x=0.3, y=0.12)


def comparison(runs: dict[str, Run], ranks: int, device: torch.device) -> str:
    """One sentence: what was compared, and what came out."""
    if len(runs) < 2:
        return f"Nothing was compared: only the {next(iter(runs))} run was asked for."
    eager, compiled = runs["eager"], runs["compiled"]
    ratio = compiled.speed / eager.speed
    apart = max(abs(a - b) / abs(a) for a, b in zip(eager.losses, compiled.losses, strict=True))
    return (
        f"Compared on {ranks} rank(s) of {device}: {len(eager.losses)} training steps of one sharded model from the "
        f"same weights on the same batches, run eagerly and by torch.compile; the losses differ by up to {apart:.2%}, "
        f"and the compiled steps process {ratio:.2f} times as many tokens per second."
    )


def disagreement(eager: Run, compiled: Run, bf16: bool) -> str | None:
    """Say where the curves part, or None: rounding may move a loss by the tolerance, a wrong gradient moves it more."""
    early, end = TOLERANCE[bf16]
    for step, (a, b) in enumerate(zip(eager.losses[:20], compiled.losses[:20], strict=True), 1):
        if not abs(a - b) <= early * abs(a):  # false for nan too
            return f"step {step}: eager loss {a:.6f}, compiled {b:.6f}, more than {early:.1%} apart"
    a, b = (statistics.mean(run.losses[-5:]) for run in (eager, compiled))
    if not abs(a - b) <= end * abs(a):
        return f"mean of the last 5 losses: eager {a:.6f}, compiled {b:.6f}, more than {end:.0%} apart"
    return None
