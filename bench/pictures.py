"""Pictures of the results, for docs/images: speed as bars, one step as lanes, memory as curves.

All panels of a picture have the same axis.
Bars show the median round, and lines on them the fastest and the slowest one. Date, commit and machine stand beneath.
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from bench.report import HERE, Found, computing, exposed, origin
from bench.systems import find, label

IMAGES = HERE.parent / "docs" / "images"
TIMELINES = ("smoke", "link", "cuda_link")  # parts whose steps are drawn
MEMORY = (*TIMELINES, "memory")  # and whose memory

INK, GRID = "#33415c", "#e4e7ec"
LINK_COLOURS = {"all_gather": "#5b8def", "reduce_scatter": "#e07a5f", "all_reduce": "#e07a5f"}
WAIT = dict(facecolors="white", edgecolors="#9aa5b1", hatch="////", linewidth=0)
INKED = ("axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color")
STYLE = {"font.size": 9, "axes.edgecolor": GRID, "axes.spines.top": False, "axes.spines.right": False,
         "axes.axisbelow": True, "figure.dpi": 150, **dict.fromkeys(INKED, INK)}  # fmt: skip


def draw(name: str, part: Found) -> list[Path]:
    done = []
    with plt.rc_context(STYLE):
        if part["settings"]:
            done.append(_bars(name, part))
        if part.get("calls") and name in TIMELINES:
            done.append(_timeline(name, part))
        if part.get("memory") and name in MEMORY:
            done.append(_memory(name, part))
    return done


def _save(figure: Any, name: str, part: Found) -> Path:
    figure.tight_layout()
    figure.text(0.01, -0.01, f"{origin(part)}; python -m bench {name.rsplit('-', 1)[0]}", va="top", fontsize=7)
    IMAGES.mkdir(parents=True, exist_ok=True)
    target = IMAGES / f"{name}.png"
    figure.savefig(target, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    return target


def _bars(name: str, part: Found) -> Path:
    """Speed of each system; a panel for each setting of the link, all with one axis."""
    settings, rows = part["settings"], {system: row for row, system in enumerate(part["first"])}
    size = (3.1 * len(settings) + 2.4, 0.3 * len(rows) + 1.2)
    figure, panels = plt.subplots(1, len(settings), figsize=size, sharex=True, sharey=True, squeeze=False)
    number, unit = part["per_step"]["number"], part["per_step"]["unit"]
    speeds = [number / figures["spread"][0] for setting in settings for figures in setting["systems"].values()]
    for axes, setting in zip(panels[0], settings, strict=True):
        for system, figures in setting["systems"].items():
            _bar(axes, -rows[system], system, number, figures)
        axes.set_xlim(0, 1.22 * max(speeds))
        axes.set_title(_title(part, setting), loc="left", fontsize=9)
        axes.set_xlabel(f"{unit} per second")
        axes.grid(axis="x", color=GRID)
        axes.tick_params(length=0)
    panels[0][0].set_yticks([-row for row in rows.values()], [label(system) for system in rows])
    return _save(figure, f"{name}-speed", part)


def _bar(axes: Axes, at: float, system: str, number: float, figures: Found) -> None:
    speed, (low, high) = number / figures["step"], sorted(number / seconds for seconds in figures["spread"])
    errors = [[max(0.0, speed - low)], [max(0.0, high - speed)]]
    axes.barh(at, speed, height=0.72, color=find(system).colour, edgecolor="white", linewidth=0)
    halo = [withStroke(linewidth=2.4, foreground="white")]  # seen on dark bars too
    axes.errorbar(speed, at, xerr=errors, fmt="none", ecolor=INK, elinewidth=0.9, capsize=2, path_effects=halo)
    text = f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"
    axes.annotate(text, (max(high, speed), at), (4, 0), textcoords="offset points", va="center", fontsize=8)


def _title(part: Found, setting: Found) -> str:
    if part["mode"] != "link":
        return part["about"]
    return f"communication {setting['ratio']:g} of compute" if setting["ratio"] else "a link that takes no time"


def _timeline(name: str, part: Found) -> Path:
    """One step of ours above one of FSDP2's: what computes, waits, and is on the link."""
    ours = next(each for each in ("ours_planned", "ours_compiled", "ours") if each in part["calls"])
    shown = [ours, *[each for each in ("fsdp2_compile", "fsdp2") if each in part["calls"]][:1]]
    figure, axes = plt.subplots(figsize=(9, 0.75 * 2 * len(shown) + 1.0))
    ticks = {}
    for row, system in enumerate(shown):
        top = 3.0 * (len(shown) - row)
        _lanes(axes, top, system, part["calls"][system])
        ticks |= {top: f"{label(system)}: compute", top - 1: "link"}
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.25e3 * max(part["calls"][system]["step"] for system in shown))
    axes.set_xlabel("milliseconds of one step")
    setting = part["settings"][-1]
    for row, system in enumerate(shown):
        text = f"{1e3 * exposed(part, setting, system):,.0f} ms exposed"
        end = 1e3 * part["calls"][system]["step"]
        axes.annotate(text, (end, 3.0 * (len(shown) - row)), (6, 0), textcoords="offset points", va="center")
    axes.set_title(f"{_title(part, setting)}", loc="left", fontsize=9)
    keys = [Patch(color=LINK_COLOURS[kind], label=kind.replace("_", "-")) for kind in ("all_gather", "reduce_scatter")]
    keys.append(Patch(facecolor="white", edgecolor="#9aa5b1", hatch="////", label="computation waits"))
    axes.legend(handles=keys, frameon=False, fontsize=8, ncols=3, loc="upper right", bbox_to_anchor=(1, -0.13))
    return _save(figure, f"{name}-timeline", part)


def _lanes(axes: Axes, top: float, system: str, calls: Found) -> None:
    def bars(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(1e3 * begin, 1e3 * (end - begin)) for begin, end in spans]

    axes.broken_barh(bars(computing(calls)), (top - 0.4, 0.8), facecolors=find(system).colour)
    waits = [(b - call["origin"], e - call["origin"]) for call in calls["list"] for b, e in call["waits"]]
    axes.broken_barh(bars(waits), (top - 0.4, 0.8), **WAIT)
    for call in calls["list"]:
        span = bars([(call["begin"] - call["origin"], call["end"] - call["origin"])])
        axes.broken_barh(span, (top - 1.4, 0.8), facecolors=LINK_COLOURS.get(call["kind"], "#999"), edgecolors="white")


def _memory(name: str, part: Found) -> Path:
    """Bytes alive in forward and backward, shards and optimizer state included.

    The unsharded model is left out: it needs several times as much, and would hide the others.
    """
    drawn = {system: memory for system, memory in part["memory"].items() if memory["curve"] and system != "unsharded"}
    figure, axes = plt.subplots(figsize=(6.8, 3.4))
    for system, memory in drawn.items():
        _curve(axes, system, memory)
    axes.set_xlabel("progress through forward and backward")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID)
    axes.set_title(part["about"], loc="left", fontsize=9)
    axes.set_ylabel("MB alive")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return _save(figure, f"{name}-memory", part)


def _curve(axes: Axes, system: str, memory: Found) -> None:
    points = memory["curve"]
    last = points[-1][0] or 1.0
    sizes = [(memory["resident"] + size) / 1e6 for _, size in points]
    style = dict(linewidth=1.4, drawstyle="steps-post", color=find(system).colour, label=label(system))
    axes.plot([at / last for at, _ in points], sizes, **style)
