"""Optimizer state by original names: of one parameter, and of a whole state dict by numbers."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import OptimStateKeyType
from torch.optim import Optimizer

from fsdp_compile.core.lookup import clean_names

StateDict = dict[str, Any]
Params = list[dict[str, Any]] | Iterable[nn.Parameter]


def name_of(param: nn.Parameter, names: dict[nn.Parameter, str]) -> str:
    """The name of an optimizer's parameter. ValueError if it is not in the model."""
    if param not in names:
        shape = tuple(param.shape)
        raise ValueError(f"optim: expected parameters of the model, found one of shape {shape} that is not; pass the "
                         f"module that all of them are in")  # fmt: skip
    return names[param]


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Params | None = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """The same state dict by names or by numbers: from and to the optimizer of an unsharded model.

    Args:
        optim_state_dict: by numbers (names are wanted) or by names (numbers are).
        optim_state_key_type: what is wanted.
        model: where names come from; sharded or not.
        optim_input: what the optimizer was made from: parameters, or groups of them.
        optim: the optimizer; None, and no `optim_input` either: one over `model.parameters()`.

    Raises:
        ValueError: a key is not one of a parameter.
    """
    groups = _groups(model, optim, optim_input)
    names = clean_names(model)
    ordered = [name_of(param, names) for group in groups for param in group]
    new: dict[Any, Any] = dict(enumerate(ordered))
    if optim_state_key_type is OptimStateKeyType.PARAM_ID:
        new = {name: number for number, name in new.items()}
    unknown = [key for key in optim_state_dict["state"] if key not in new]
    unknown += [key for group in optim_state_dict["param_groups"] for key in group["params"] if key not in new]
    if unknown:
        raise ValueError(f"optim_state_dict: expected keys among {list(new)}, found {unknown}; pass the optimizer or "
                         f"the optim_input that it belongs to")  # fmt: skip
    return {
        "state": {new[key]: state for key, state in optim_state_dict["state"].items()},
        "param_groups": [
            {**group, "params": sorted(new[key] for key in group["params"])}
            if optim_state_key_type is OptimStateKeyType.PARAM_ID
            else {**group, "params": [new[key] for key in group["params"]]}
            for group in optim_state_dict["param_groups"]
        ],
    }


def _groups(model: nn.Module, optim: Optimizer | None, given: Params | None) -> list[list[nn.Parameter]]:
    if optim is not None:
        return [list(group["params"]) for group in optim.param_groups]
    listed: list[Any] = list(model.parameters() if given is None else given)
    return [list(each["params"]) for each in listed] if listed and isinstance(listed[0], dict) else [listed]
