"""Predictions and reports: what a step will take, compute, communicate and keep in memory.

predict_step    what one step of a model takes, in each of some settings
predict_runs    the same for each row of a table of runs
fit_hardware    constants of a device that agree with a table of runs

prediction.py   what is asked of a prediction and what it says: plain data
settings.py     from options of one value or several to an explanation
steps.py        a model in many settings: traced a few times (tracing.py, kernels.py), the rest is computed from that
work.py         what a step computes and keeps in memory, without ranks, links or seconds
pricing.py      from work, a setting and hardware to a prediction; graphs.py: what graphs of this package do otherwise
explanation.py  predictions of one model, and the forms in which they are read: text.py, JSON, trace, a page (page/)
runs/           tables of training runs, whose models are known by name and size, and constants that agree with one
calibrate.py    measure this machine, and write a hardware file
report.py       trace a sharded model as far as its joint graph, read the workload from it, search a plan, report on it

`fsdp_compile.explain`, the function, is defined in api.py, because it may shard the model first. The attribute of that
name is always the function: import from this package by `from fsdp_compile.explain.report import Report`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_compile.explain.prediction import Prediction, RunPrediction, Setting
    from fsdp_compile.passes.cost.hardware import Hardware


def predict_step(
    make_model: Callable[[], Any],
    settings: "Sequence[Setting]",
    example_inputs: Callable[..., Sequence[Any]] | None = None,
    *,
    hardware: "Mapping[str, Hardware] | None" = None,
    name: str | None = None,
    alternatives: bool = True,
) -> "list[Prediction]":
    """Predict what a step of a model takes in each of `settings`, without running it.

    Neither a GPU nor other ranks are needed, nor memory for the model.

    Args:
        make_model: makes the model, unsharded. What it makes gets no memory.
        settings: clusters and options. The model is traced once for each sequence length and checkpointing; everything
            else is computed from that.
        example_inputs: given (batch, sequence), returns positional arguments of a forward; None: token ids, and
            targets if forward has a second argument, int64 of shape [batch, sequence].
        hardware: hardware by the names that settings give, beside the files that the package has.
        name: of the model; None: the name of its class.
        alternatives: whether other settings are tried too, for `Prediction.alternatives` and `.best`.

    Raises:
        ValueError: a setting names hardware that is unknown, or a model cannot be traced or is on a device.
    """
    from fsdp_compile.explain.steps import predict

    return predict(make_model, settings, example_inputs, hardware, name, alternatives)


def predict_runs(path: str | Path, hardware: "Mapping[str, Hardware] | str | None" = None) -> "list[RunPrediction]":
    """Predict each row of a table of runs.

    Args:
        path: of a CSV file with the columns of `runs/data/reported_runs.csv`; columns that are unknown are ignored.
        hardware: name or path of a hardware file for all rows; None: by the column `device`.

    Returns:
        One for each row, in order. A row that cannot be predicted has an `error`, and raises nothing.

    Raises:
        ValueError: the file cannot be read, or has no rows.
    """
    from fsdp_compile.explain.runs.tables import predict_rows, read_rows
    from fsdp_compile.passes.cost.hardware import device

    return predict_rows(read_rows(path), device(hardware) if isinstance(hardware, str) else hardware)


def fit_hardware(rows: "str | Path | Sequence[Mapping[str, str]]", base: "Hardware") -> "Hardware":
    """`base` with the constants that agree best with a table of runs.

    Args:
        rows: path of a CSV file, or its rows; each with its `tok_s_gpu`.
        base: where the search begins, which also stands for what few rows cannot tell.

    Raises:
        ValueError: no row can be predicted.
    """
    from fsdp_compile.explain.runs.fit import USUAL, apply, fit
    from fsdp_compile.explain.runs.tables import case_of, read_rows, reported
    from fsdp_compile.passes.cost.hardware import Source

    table = read_rows(rows) if isinstance(rows, (str, Path)) else rows
    usable = reported(table)
    if not usable:
        raise ValueError(f"rows: expected some with a speed in the column tok_s_gpu, found none among {len(table)}")
    cases = [case_of(row, base) for row in usable]
    point = fit(cases, [float(row["tok_s_gpu"]) for row in usable], USUAL)
    return apply(base, USUAL, point, Source("fitted", f"least squares over {len(usable)} runs"))
