"""What a comparison has shown: a table, and JSON."""

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
        where = ", ".join(f"{name} {value}" for name, value in self.where.items())
        lines = [where, "", *self._table()]
        lines += [f"{row.system} failed: {row.failed}" for row in self.rows if row.failed is not None]
        return "\n".join([*lines, "", *self._notes]) + "\n"

    def _table(self) -> Iterator[str]:
        unit = self.ran[0].unit if self.ran else "samples"
        heads = ["~system", f"{unit}/s", "step ms", "10 to 90 %", "predicted", "first step s", "peak MB",
                 "first loss", "last loss", "apart"]  # fmt: skip
        cells = []
        for row in self.ran:
            apart = self.apart(row)
            predicted = "" if row.predicted is None else f"{1e3 * row.predicted:,.1f}"
            cells.append([row.system, f"{row.speed:,.0f}", f"{1e3 * row.step:,.1f}",
                          f"{1e3 * row.low:,.1f} to {1e3 * row.high:,.1f}", predicted, f"{row.first:,.1f}",
                          f"{row.peak / 1e6:,.1f}", f"{row.losses[0]:.4f}", f"{row.losses[-1]:.4f}",
                          "" if apart is None else f"{apart:.0e}"])  # fmt: skip
        return table(heads, cells)

    def to_json(self) -> str:
        """All figures."""
        rows = [{**asdict(row), "apart": self.apart(row) if row in self.ran else None} for row in self.rows]
        return json.dumps({"format": FORMAT, "where": self.where, "rows": rows, "note": self.note}, indent=1) + "\n"
