"""Pictures of the results: speed as bars, one step as lanes, memory as curves."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.report import RESULTS, Found, computing, exposed
from bench.systems import find, label

INK, GRID = "#33415c", "#e4e7ec"
LINK_COLOURS = {"all_gather": "#5b8def", "reduce_scatter": "#e07a5f", "all_reduce": "#e07a5f"}
STYLE = {
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 150,
}


def draw(name: str, part: Found) -> list[Path]:
    """All pictures that the part's figures allow."""
    done = []
    with plt.rc_context(STYLE):
        if part["settings"]:
            done.append(_bars(name, part))
        if part.get("calls"):
            done.append(_timeline(name, part))
        if part.get("memory"):
            done.append(_memory(name, part))
    return done


def _save(figure: Any, name: str) -> Path:
    target = RESULTS / f"{name}.png"
    figure.savefig(target, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    return target


def _bars(name: str, part: Found) -> Path:
    """Speed of each system; a panel for each setting of the link."""
    settings = part["settings"]
    figure, panels = plt.subplots(
        1, len(settings), figsize=(3.4 * len(settings) + 1.6, 0.34 * len(part["first"]) + 1.1)
    )
    number, unit = part["per_step"]["number"], part["per_step"]["unit"]
    for index, (axes, setting) in enumerate(zip(panels if len(settings) > 1 else [panels], settings, strict=True)):
        names = list(setting["systems"])[::-1]
        speeds = [number / setting["systems"][system]["step"] for system in names]
        bars = axes.barh(range(len(names)), speeds, color=[find(system).colour for system in names], height=0.7)
        axes.bar_label(bars, [f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}" for speed in speeds], padding=3)
        axes.set_yticks(range(len(names)), [label(system) for system in names] if index == 0 else [""] * len(names))
        axes.set_xlim(0, 1.2 * max(speeds))
        axes.tick_params(length=0)
        axes.set_title(_title(part, setting), loc="left", fontsize=9)
        axes.set_xlabel(f"{unit} per second")
    return _save(figure, f"{name}-speed")


def _title(part: Found, setting: Found) -> str:
    if part["mode"] != "link":
        return part["about"]
    return f"communication {setting['ratio']:g} of compute" if setting["ratio"] else "a link that takes no time"


def _timeline(name: str, part: Found) -> Path:
    """One step of ours above one of FSDP2's: what computes, what waits, what is on the link."""
    order = [
        system
        for system in ("ours_planned:layers", "ours_planned", "ours_compiled", "ours", "fsdp2_compile", "fsdp2")
        if system in part["calls"]
    ]
    shown = [order[0], *[system for system in order[1:] if system.startswith("fsdp2")][:1]]
    figure, axes = plt.subplots(figsize=(9, 0.75 * 2 * len(shown) + 0.6))
    for row, system in enumerate(shown):
        _lanes(axes, 3 * (len(shown) - row), system, part["calls"][system])
    ticks = [
        (3 * (len(shown) - row) - lane, f"{label(s)}: {('compute', 'link')[lane]}")
        for row, s in enumerate(shown)
        for lane in (0, 1)
    ]
    axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("milliseconds of one step; blue gathers, red reduces, hatched: computation waits")
    setting = part["settings"][-1]
    waits = ", ".join(f"{label(s)} {1e3 * exposed(part, setting, s):,.0f} ms" for s in shown)
    axes.set_title(f"{_title(part, setting)}; exposed: {waits}", loc="left", fontsize=9)
    return _save(figure, f"{name}-timeline")


def _lanes(axes: Axes, top: float, system: str, calls: Found) -> None:
    def bars(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(1e3 * begin, 1e3 * (end - begin)) for begin, end in spans]

    axes.broken_barh(bars(computing(calls)), (top - 0.4, 0.8), facecolors=find(system).colour)
    waits = [(b - call["origin"], e - call["origin"]) for call in calls["list"] for b, e in call["waits"]]
    axes.broken_barh(bars(waits), (top - 0.4, 0.8), facecolors="white", edgecolors="#b8bfca", hatch="////", linewidth=0)
    for call in calls["list"]:
        span = bars([(call["begin"] - call["origin"], call["end"] - call["origin"])])
        axes.broken_barh(span, (top - 1.4, 0.8), facecolors=LINK_COLOURS.get(call["kind"], "#999"), edgecolors="white")


def _memory(name: str, part: Found) -> Path:
    """Bytes alive beside parameters' shards and optimizer states in forward and backward."""
    figure, axes = plt.subplots(figsize=(7, 3))
    for system, memory in part["memory"].items():
        points = memory["curve"]
        if points:
            whole = points[-1][0] or 1.0
            axes.plot(
                [at / whole for at, _ in points],
                [(memory["resident"] + size) / 1e6 for _, size in points],
                color=find(system).colour,
                label=label(system),
                linewidth=1.4,
                drawstyle="steps-post",
            )
    axes.set_xlabel("forward and backward, as a part of their time")
    axes.set_ylabel("MB alive")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID)
    axes.set_title(part["about"], loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, f"{name}-memory")
