"""Predictions and reports: what a step will take, compute, communicate and keep in memory.

predict_step    what one step of a model takes, in each of some settings

prediction.py   what is asked of a prediction and what it says: plain data
settings.py     from options of one value or several to an explanation
steps.py        a model in many settings: traced a few times (tracing.py, kernels.py), the rest is computed from that
work.py         what a step computes and keeps in memory, without ranks, links or seconds
pricing.py      from work, a setting and hardware to a prediction; graphs.py: what graphs of this package do otherwise
explanation.py  predictions of one model, and the forms in which they are read: text.py, JSON, trace, a page (page/)
calibrate.py    measure this machine, and write a hardware file
report.py       trace a sharded model as far as its joint graph, read the workload from it, search a plan, report on it

`fsdp_compile.explain`, the function, is defined in api.py, because it may shard the model first. The attribute of that
name is always the function: import from this package by `from fsdp_compile.explain.report import Report`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_compile.explain.prediction import Prediction, Setting
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
