"""From options, each of one value or of several, to an explanation with one prediction for each combination."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_compile.explain import predict_step
from fsdp_compile.explain.explanation import Explanation
from fsdp_compile.explain.prediction import Setting
from fsdp_compile.passes.cost.hardware import Hardware, device, read_hardware

USUAL = "h100-80"  # hardware, where none is named


def explain_settings(
    model: nn.Module | Callable[[], nn.Module],
    example_inputs: Callable[[int, int], Sequence[Any]] | None,
    chosen: Mapping[str, Any],
    hardware: str | Path | Hardware | None,
    calibration: str | Path | None,
    name: str | None,
    alternatives: bool,
) -> Explanation:
    """What `fsdp_compile.explain` does, with the fields of `Setting` in one mapping."""
    used, makes = hardware_of(hardware, calibration), factory(model)
    settings = combinations({**chosen, "hardware": used.name})
    predictions = predict_step(
        makes, settings, example_inputs, hardware={used.name: used}, name=name, alternatives=alternatives
    )
    return Explanation(tuple(predictions))


def combinations(chosen: Mapping[str, Any]) -> list[Setting]:
    """One setting for each combination of values; a value is one or a sequence of several.

    Raises:
        TypeError: an option is no field of `Setting`.
        ValueError: a value is none that the field can have, or a sequence is empty.
    """
    names = [each.name for each in fields(Setting)]
    for name, value in chosen.items():
        if name not in names:
            raise TypeError(f"{name}: expected one of {', '.join(names)}, found another option")
        if isinstance(value, Sequence) and not value:
            raise ValueError(f"{name}: expected at least one value, found none")
    several = [value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
               for value in chosen.values()]  # fmt: skip
    return [Setting(**dict(zip(chosen, values, strict=True))) for values in product(*several)]


def factory(model: nn.Module | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A function that makes the model, without memory where tensors are fake; its errors name `model`.

    Raises:
        ValueError: `model` is no module and no function, or has parameters on an accelerator.
    """
    if isinstance(model, nn.Module):
        return partial(_copy, _on_no_accelerator(model))
    if not callable(model):
        raise ValueError(f"model: expected a module or a function that makes one, found {type(model).__name__}")

    def make() -> nn.Module:
        try:
            made = model()
        except Exception as error:
            raise ValueError(f"model: expected a function that makes a module, but it raised {type(error).__name__}: "
                             f"{error}") from error  # fmt: skip
        if not isinstance(made, nn.Module):
            raise ValueError(
                f"model: expected a function that makes a module, found one that makes {type(made).__name__}"
            )
        return _on_no_accelerator(made)

    return make


def _on_no_accelerator(model: nn.Module) -> nn.Module:
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        if each.device.type not in ("cpu", "meta"):
            raise ValueError(f"model: expected tensors on the CPU or the meta device, found {name} on {each.device}; "
                             "leave out what moves it there")  # fmt: skip
    return model


def _copy(model: nn.Module) -> nn.Module:
    """A copy of `model` whose tensors are made anew, without their values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)


def hardware_of(hardware: str | Path | Hardware | None, calibration: str | Path | None) -> Hardware:
    """Hardware by its name, with what was measured or fitted in a calibration in place of its own constants.

    Raises:
        ValueError: hardware of that name is unknown, a file is no hardware file, or the calibration is of another one.
    """
    if calibration is None:
        return hardware if isinstance(hardware, Hardware) else device(str(hardware or USUAL))
    measured = read_hardware(Path(calibration))
    if hardware is None:
        return measured
    base = hardware if isinstance(hardware, Hardware) else device(str(hardware))
    if measured.name != base.name:
        raise ValueError(f"calibration: expected a file of {base.name}, found one of {measured.name}")
    known = {name: source for name, source in measured.sources.items() if source.origin in ("measured", "fitted")}
    links = {name: link for name in ("node", "network")
             if (link := getattr(measured, name)).origin == "measured"}  # fmt: skip
    figures = {name: getattr(measured, name) for name in known}
    return replace(base, **figures, **links, sources={**base.sources, **known})
