"""What a comparison has shown: a table, JSON, and a page that fetches nothing, with pictures."""

import html
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_compile.compare.systems import SYSTEMS, Turn
from fsdp_compile.explain.report import table

FORMAT = 1
FAR = 1.2  # by what factor measured seconds may differ from predicted ones before somebody should know
TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}  # of losses, relative: systems round at different places
COLORS = ("#1fa187", "#0b7a6c", "#06423c", "#f0a830", "#c8501e", "#8c6d46", "#8a95a1")


@dataclass(frozen=True)
class Row:
    """A system.

    Attributes:
        system: its name.
        label: what it is, as code.
        failed: why it does not run; None: it does.
        first: seconds of the first step, which compiles, with an empty cache.
        step: seconds of a step, the median.
        low: the tenth of all steps that is fastest takes no longer.
        high: nine tenths of all steps take no longer.
        speed: of all ranks, per second of the median step.
        unit: of `speed`.
        peak: bytes alive at most on a rank.
        losses: of each step from the first one, the mean over ranks.
        predicted: seconds of a step by `explain`; None: nothing is predicted.
        waits: seconds of a step in which the host waits for collectives; None: that is not seen.
    """

    system: str
    label: str
    failed: str | None = None
    first: float = 0.0
    step: float = 0.0
    low: float = 0.0
    high: float = 0.0
    speed: float = 0.0
    unit: str = "samples"
    peak: int = 0
    losses: tuple[float, ...] = ()
    predicted: float | None = None
    waits: float | None = None

    @classmethod
    def of(cls, system: str, turns: Sequence[Turn], failed: str | None, predicted: float | None, again: bool) -> "Row":
        """A row of all turns; `again`: each turn began with fresh weights."""
        label = SYSTEMS[system].label
        if failed is not None or not turns:
            return cls(system, label, failed or "it had no turn")
        seconds = sorted(each for turn in turns for each in turn.seconds)
        middle = statistics.median(seconds)
        return cls(
            system=system,
            label=label,
            first=next(turn.first for turn in turns if turn.first is not None),
            step=middle,
            low=seconds[(len(seconds) - 1) // 10],
            high=seconds[-1 - (len(seconds) - 1) // 10],
            speed=turns[0].number / middle,
            unit=turns[0].unit,
            peak=max(turn.peak or 0 for turn in turns),
            losses=tuple(loss for turn in (turns[:1] if again else turns) for loss in turn.losses),
            predicted=predicted,
            waits=turns[-1].waits,
        )


@dataclass(frozen=True)
class Comparison:
    """All rows, where they were measured, and what predictions are for, or why there are none."""

    where: dict[str, Any]
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def ran(self) -> list[Row]:
        """The rows of systems that ran."""
        return [row for row in self.rows if row.failed is None]

    def apart(self, row: Row) -> float | None:
        """By how much a row's losses differ from the first row's, relative, at most; None where they are of others."""
        alike = [each for each in self.ran if SYSTEMS[each.system].shares]
        if row not in alike or row is alike[0]:
            return None
        pairs = zip(row.losses, alike[0].losses, strict=False)
        return max(abs(mine - first) / max(abs(first), 1e-6) for mine, first in pairs)

    def differences(self) -> Iterator[str]:
        """A sentence for each row whose losses differ by more than rounding."""
        for row in self.ran:
            apart = self.apart(row)
            if apart is not None and not apart <= TOLERANCE[self.where["precision"]]:  # also if it is NaN
                yield (f"losses of {row.system} differ by up to {apart:.1%} from those above: unless the model draws "
                       f"random numbers, as dropout does, or is chaotic, one of them is wrong")  # fmt: skip

    @property
    def _notes(self) -> list[str]:
        """Sentences below the table."""
        off = [row.system for row in self.ran if row.predicted and not 1 / FAR <= row.step / row.predicted <= FAR]
        advice = [f"steps of {', '.join(off)} differ by more than {FAR - 1:.0%} from what is predicted: `fsdp-compile "
                  "calibrate FILE.json` measures this machine, and --hardware FILE.json predicts for it"]  # fmt: skip
        return [*self.differences(), *([self.note] if self.note else []), *(advice if off else [])]

    def __str__(self) -> str:
        heads, cells = self._heads_and_cells()
        lines = [self._where_in_words, "", *table(["~" + heads[0], *heads[1:]], cells)]
        lines += [f"{row.system} failed: {row.failed}" for row in self.rows if row.failed is not None]
        return "\n".join([*lines, "", *self._notes]) + "\n"

    @property
    def _where_in_words(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.where.items())

    def _heads_and_cells(self) -> tuple[list[str], list[list[str]]]:
        unit = self.ran[0].unit if self.ran else "samples"
        heads = ["system", f"{unit}/s", "step ms", "10 to 90 %", "predicted", "waits ms", "first step s", "peak MB",
                 "first loss", "last loss", "apart"]  # fmt: skip
        cells = []
        for row in self.ran:
            apart = self.apart(row)
            predicted, waits = ("" if each is None else f"{1e3 * each:,.1f}" for each in (row.predicted, row.waits))
            cells.append([row.system, f"{row.speed:,.0f}", f"{1e3 * row.step:,.1f}",
                          f"{1e3 * row.low:,.1f} to {1e3 * row.high:,.1f}", predicted, waits, f"{row.first:,.1f}",
                          f"{row.peak / 1e6:,.1f}", f"{row.losses[0]:.4f}", f"{row.losses[-1]:.4f}",
                          "" if apart is None else f"{apart:.0e}"])  # fmt: skip
        return heads, cells

    def to_json(self) -> str:
        """All figures."""
        rows = [{**asdict(row), "apart": self.apart(row) if row in self.ran else None} for row in self.rows]
        return json.dumps({"format": FORMAT, "where": self.where, "rows": rows, "note": self.note}, indent=1) + "\n"

    def to_svg(self) -> str:
        """The picture of speed."""
        return bars(self.ran) + "\n"

    def to_html(self) -> str:
        """A page that fetches nothing."""
        heads, cells = self._heads_and_cells()
        notes = [f"{row.system} failed: {row.failed}" for row in self.rows if row.failed is not None]
        notes += self._notes
        labels = [f"{row.system}: {row.label}" for row in self.rows]
        pictures = [("Speed, all ranks", bars(self.ran)), ("Loss", curves(self.ran))] if self.ran else []
        title = f"{self.where['model']}: systems side by side"
        return page(title, self._where_in_words, heads, cells, [*notes, *labels], pictures)


# --- page and pictures ------------------------------------------------------------------------------------------------

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1f2328;
background:#fff}table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.2rem .7rem;text-align:right;
border-bottom:1px solid #ddd;white-space:nowrap}td:first-child,th:first-child{text-align:left}svg{max-width:100%}"""


def page(
    title: str, about: str, heads: Sequence[str], cells: Sequence[Sequence[str]], notes: Sequence[str],
    pictures: Sequence[tuple[str, str]],
) -> str:  # fmt: skip
    """A page of HTML with a table and pictures."""

    def line(kind: str, texts: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(each)}</{kind}>" for each in texts) + "</tr>"

    body = [f"<h1>{html.escape(title)}</h1><p>{html.escape(about)}</p>"]
    body += [f"<h2>{html.escape(name)}</h2>{picture}" for name, picture in pictures]
    body += ["<h2>Figures</h2><table>", line("th", heads), *(line("td", row) for row in cells), "</table>"]
    body += [f"<p>{html.escape(each)}</p>" for each in notes]
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f"<style>{STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n")  # fmt: skip


def bars(rows: Sequence[Row]) -> str:
    """A bar for each row's speed, with a line from the slowest tenth of its steps to the fastest."""
    most = max((row.speed * row.step / row.low for row in rows), default=0.0)
    parts = [_svg_start(720, 34 * len(rows) + 30)]
    for at, row in enumerate(rows):
        y, width = 34 * at + 4, 430 * row.speed / most
        ends = [140 + 430 * row.speed * row.step / (most * seconds) for seconds in (row.high, row.low)]
        parts.append(f'<text x="132" y="{y + 17}" text-anchor="end">{html.escape(row.system)}</text>')
        parts.append(f'<rect x="140" y="{y}" width="{width:.1f}" height="24" fill="{_color(row)}"/>')
        for color, wide in (("#fff", 5), ("#1f2328", 2)):
            parts.append(f'<path d="M{ends[0]:.1f} {y + 12}H{ends[1]:.1f}" stroke="{color}" stroke-width="{wide}"/>')
        parts.append(f'<text x="{ends[1] + 8:.1f}" y="{y + 17}">{row.speed:,.0f}</text>')
    unit = rows[0].unit if rows else "samples"
    unit += " a second of the median step; the lines reach from the 10th to the 90th percentile"
    return "".join([*parts, f'<text x="140" y="{34 * len(rows) + 20}" font-size="12">{unit}</text></svg>'])


def curves(rows: Sequence[Row]) -> str:
    """The losses of each row by step."""
    finite = [loss for row in rows for loss in row.losses if abs(loss) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    count, span = max(len(row.losses) for row in rows), (high - low) or 1.0
    parts = [_svg_start(720, 260), f'<text x="4" y="16">{high:.3f}</text><text x="4" y="236">{low:.3f}</text>']
    for at, row in enumerate(rows):
        points = [f"{70 + 480 * step / max(1, count - 1):.1f},{10 + 220 * (high - loss) / span:.1f}"
                  for step, loss in enumerate(row.losses) if abs(loss) < float("inf")]  # fmt: skip
        width = 1.5 + (len(rows) - at - 1) * 0.8  # wide below, thin above: all are seen where they coincide
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{_color(row)}" '
                     f'stroke-width="{width:.1f}"/>')  # fmt: skip
        parts.append(f'<text x="575" y="{20 + 20 * at}" fill="{_color(row)}">{html.escape(row.system)}</text>')
    return "".join([*parts, '<text x="70" y="254" font-size="12">steps</text></svg>'])


def _svg_start(width: int, height: int) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            f'font-family="system-ui,sans-serif" font-size="14" fill="#1f2328">'
            f'<rect width="{width}" height="{height}" fill="#fff"/>')  # fmt: skip


def _color(row: Row) -> str:
    return COLORS[[*SYSTEMS].index(row.system)]
