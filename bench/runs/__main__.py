"""Each row of a table of training runs beside what is predicted for it, as text or JSON.

python -m bench runs CSV [--json [FILE]] [--hardware NAME|FILE]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.runs.fit import summary
from bench.runs.tables import RunPrediction, predict_runs
from fsdp_compile.explain.prediction import FORMAT
from fsdp_compile.passes.cost.hardware import device

HEADS = ("model", "device", "GPUs", "batch", "seq", "tokens/s/GPU", "predicted", "error", "peak GiB", "")


def totals(rows: Sequence[RunPrediction]) -> dict[str, float | int | None]:
    """How many rows there are, are predicted, and have both speeds; of the errors of these, `fit.summary`."""
    errors = [each.relative_error for each in rows if each.relative_error is not None]
    counts = {"rows": len(rows), "predicted": sum(each.error is None for each in rows), "compared": len(errors)}
    return {**counts, **(summary(errors) if errors else {"mape": None, "p90": None, "bias": None})}


def as_json(rows: Sequence[RunPrediction]) -> str:
    """`format`, `summary` and `rows`: the columns of each as they were read, and the predicted ones."""
    shown: list[dict[str, Any]] = [
        {**each.row, "predicted_tok_s_gpu": each.tok_s_gpu, "predicted_peak_gib": each.peak_gib,
         "predicted_fits": each.fits, "relative_error": each.relative_error, "error": each.error}
        for each in rows
    ]  # fmt: skip
    return json.dumps({"format": FORMAT, "summary": totals(rows), "rows": shown}, indent=1, allow_nan=False) + "\n"


def as_text(rows: Sequence[RunPrediction]) -> str:
    """A table, and a line on how far predictions are off."""
    cells = [HEADS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(f"{cell:<{width}}" if at in (0, 1, 9) else f"{cell:>{width}}"
                  for at, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in cells
    ]  # fmt: skip
    found = totals(rows)
    lines += ["", f"{found['predicted']} of {found['rows']} rows are predicted, {found['compared']} compared"]
    if found["compared"]:
        lines.append(f"MAPE {found['mape']:.1%}, p90 {found['p90']:.1%}, bias {found['bias']:+.1%}")
    return "\n".join(lines) + "\n"


def _cells(each: RunPrediction) -> tuple[str, ...]:
    named = tuple(each.row.get(name) or "" for name in ("model", "device", "gpus", "micro_batch", "seq"))
    figures = ("" if value is None else f"{value:,.0f}" for value in (each.reported, each.tok_s_gpu))
    error = "" if each.relative_error is None else f"{each.relative_error:+.1%}"
    peak = "" if each.peak_gib is None else f"{each.peak_gib:.1f}"
    return (*named, *figures, error, peak, each.error or ("does not fit" if each.fits is False else ""))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench runs", description="Predict each row of a table of runs.")
    parser.add_argument("table", type=Path, metavar="CSV", help="columns as in bench/runs/data/reported_runs.csv")
    parser.add_argument("--json", nargs="?", metavar="FILE", const="-", help="JSON to FILE; without FILE, printed")
    parser.add_argument("--hardware", "--device", metavar="NAME|FILE", help="of all rows (default: the column device)")
    args = parser.parse_args(arguments)
    try:
        rows = predict_runs(args.table, device(args.hardware) if args.hardware else None)
    except ValueError as error:
        parser.error(str(error))
    if args.json in (None, "-"):
        sys.stdout.write(as_json(rows) if args.json else as_text(rows))
    else:
        Path(args.json).write_text(as_json(rows), encoding="utf-8")
        print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
