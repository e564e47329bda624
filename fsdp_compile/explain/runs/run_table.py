"""A table of training runs beside what is predicted for each."""

import json
from dataclasses import dataclass
from typing import Any

from fsdp_compile.explain.prediction import FORMAT, RunPrediction
from fsdp_compile.explain.runs.fit import summary


@dataclass(frozen=True)
class RunTable:
    """Predictions for the rows of a table of runs: `str()` is a table of text, `to_json()` a file.

    Attributes:
        rows: one for each row of the table, in order.
    """

    rows: tuple[RunPrediction, ...]

    @property
    def summary(self) -> dict[str, float | int | None]:
        """How far predictions are from what was reported.

        `rows` and `predicted` count; `compared` counts the rows that have both figures. Of the relative errors of
        those, `mape` is the mean size, `p90` the size that nine of ten do not exceed, `bias` the mean: positive where
        predictions are too fast.
        """
        errors = [each.relative_error for each in self.rows if each.relative_error is not None]
        return {
            "rows": len(self.rows),
            "predicted": sum(each.tok_s_gpu is not None for each in self.rows),
            "compared": len(errors),
            **(summary(errors) if errors else {"mape": None, "p90": None, "bias": None}),
        }

    def to_dicts(self) -> list[dict[str, Any]]:
        """For each row its columns as they were read, and the predicted ones."""
        return [
            {
                **each.row,
                "predicted_tok_s_gpu": each.tok_s_gpu,
                "predicted_peak_gib": each.peak_gib,
                "predicted_fits": each.fits,
                "relative_error": each.relative_error,
                "error": each.error,
            }
            for each in self.rows
        ]

    def to_json(self) -> str:
        """JSON: `format`, `summary` and `rows`."""
        table = {"format": FORMAT, "summary": self.summary, "rows": self.to_dicts()}
        return json.dumps(table, indent=1, allow_nan=False) + "\n"

    def __str__(self) -> str:
        heads = ("model", "device", "GPUs", "batch", "seq", "tokens/s/GPU", "predicted", "error", "peak GiB", "")
        rows = [heads, *map(_shown, self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(f"{cell:<{width}}" if at in (0, 1, 9) else f"{cell:>{width}}"
                      for at, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in rows
        ]  # fmt: skip
        totals = self.summary
        lines += [
            "",
            f"{totals['predicted']} of {totals['rows']} rows are predicted, {totals['compared']} compared",
        ]
        if totals["compared"]:
            lines.append(f"MAPE {totals['mape']:.1%}, p90 {totals['p90']:.1%}, bias {totals['bias']:+.1%}")
        return "\n".join(lines) + "\n"


def _shown(each: RunPrediction) -> tuple[str, ...]:
    row = each.row
    named = tuple(row.get(name) or "" for name in ("model", "device", "gpus", "micro_batch", "seq"))
    figures = ("" if value is None else f"{value:,.0f}" for value in (each.reported, each.tok_s_gpu))
    error = "" if each.relative_error is None else f"{each.relative_error:+.1%}"
    peak = "" if each.peak_gib is None else f"{each.peak_gib:.1f}"
    note = each.error or ("does not fit" if each.fits is False else "")
    return (*named, *figures, error, peak, note)
