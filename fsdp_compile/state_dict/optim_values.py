"""The values of optimizer state in `optimizer.state_dict()` and `optimizer.load_state_dict()`.

    what the optimizer has                    what its state dict shows (unless LOCAL is set)
    exp_avg   1-D [n], like this rank's part  PieceTensor of the parameter's shape
    step      ()                              PieceTensor of shape (): a number beside the parameter
    others    a Python number, None           as they are

A rank that stores nothing of a parameter has no state for it, yet shows it, without elements: so all ranks have the
same keys. Tensors that are cut share memory with the optimizer, both ways: a checkpoint is read into its state.

Optimizers are noticed when they step for the first time; whatever was loaded into one before that is converted then.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.state_dict.kinds import settings_of
from fsdp_compile.state_dict.pieces import Managed, managed
from fsdp_compile.state_dict.sharded_value import PieceTensor

State = dict[str, Any]

_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_unrelated: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch_state(optimizer: Optimizer, *_: Any) -> None:
    """From now on convert what goes in and out of `optimizer`'s state dict, if it has sharded parameters."""
    if optimizer not in _watched and optimizer not in _unrelated:
        _watch(optimizer)


@torch.compiler.disable  # once for each optimizer, in a step that may be compiled; state may have been loaded before
def _watch(optimizer: Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(managed(param) for param in params):
        _unrelated.add(optimizer)
        return
    _watched.add(optimizer)
    optimizer.register_state_dict_post_hook(_show)
    optimizer.register_load_state_dict_pre_hook(_take)
    for param in params:
        if param in optimizer.state:
            optimizer.state[param] = local_state(param, optimizer.state[param])


def look_again() -> None:
    """Parameters were sharded: optimizers that had none may have some now."""
    _unrelated.clear()


def numbered(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Iterator[tuple[Any, nn.Parameter]]:
    """The optimizer's parameters, each with what stands for it in the parameter groups of a state dict."""
    for own, saved in zip(optimizer.param_groups, groups, strict=False):
        yield from zip(saved["params"], own["params"], strict=False)


def _show(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {**state_dict, "state": sharded_states(optimizer, state_dict)}


def _take(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = dict(state_dict["state"])
    for key, param in numbered(optimizer, state_dict["param_groups"]):
        if key in states:
            states[key] = local_state(param, states[key])
            if not states[key]:
                del states[key]
    return {**state_dict, "state": states}


# --- out --------------------------------------------------------------------------------------------------------------


def sharded_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[Any, State]:
    """The states of a state dict as pieces; of parameters that are absent from this rank, without elements.

    Raises:
        ValueError: a tensor is neither of the shape of this rank's part nor a number: it cannot be cut otherwise.
    """
    states: dict[Any, State] = {}
    pairs = [(key, param, managed(param)) for key, param in numbered(optimizer, state_dict["param_groups"])]
    present = _present(pairs, state_dict["state"])
    for key, param, found in pairs:
        state = state_dict["state"].get(key)
        if found is None or settings_of(found.unit).state_dict_type is StateDictType.LOCAL_STATE_DICT:
            if state is not None:
                states[key] = state
        elif found.is_here and state is not None:
            states[key] = {name: _piece(found, param, name, value) for name, value in state.items()}
        elif not found.is_here and (like := state or _neighbour(found, present)):
            states[key] = {name: empty(found, value) for name, value in like.items() if isinstance(value, Tensor)}
    return states


def _piece(found: Managed, param: nn.Parameter, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, PieceTensor):
        return value
    if value.dim() == 0:
        return found.number(value.clone())  # a stager of DCP takes what is 0-d as it is
    if value.shape == param.shape:
        return found.piece(value)
    raise ValueError(
        f"optimizer state {name} of parameter {found.name}: expected a number or this rank's part, shape "
        f"{tuple(param.shape)}, found shape {tuple(value.shape)}, which cannot be cut for other ranks; save it per "
        f"rank with LOCAL_STATE_DICT"
    )


def empty(found: Managed, like: Tensor) -> Tensor:
    """State as `like`, of a parameter that this rank stores nothing of."""
    local = torch.empty(0, dtype=like.dtype, device=like.device)
    is_number = like.is_number if isinstance(like, PieceTensor) else like.dim() == 0
    return found.number(local) if is_number else found.piece(local)


def _present(pairs: list[tuple[Any, nn.Parameter, Managed | None]], states: Mapping) -> dict[FlatParam, State]:
    """State of some parameter on this rank, by flat parameter; empty if those that are here have none."""
    present: dict[FlatParam, State] = {}
    for key, _, found in pairs:
        if found is not None and found.is_here and found.trains:
            flat = found.unit.flat_of(found.index)
            present[flat] = present.get(flat) or states.get(key, {})
    return present


def _neighbour(found: Managed, present: dict[FlatParam, State]) -> State | None:
    """State of a parameter beside an absent one, from which to learn what state it has elsewhere.

    Parameters of a flat parameter get gradients together. If none of its other parameters is on this rank, any other
    parameter has to do.
    """
    if not found.trains:
        return None
    flat = found.unit.flat_of(found.index)
    return present[flat] if flat in present else next(filter(None, present.values()), None)


# --- in ---------------------------------------------------------------------------------------------------------------


def local_state(param: nn.Parameter, state: State) -> State:
    """One parameter's state as its optimizer has it, from pieces, tensors in full shape, or parts as they are.

    Empty for a parameter that is absent from this rank. ValueError for a tensor of another shape.
    """
    found = managed(param)
    if found is None:
        return {name: _whole(value) for name, value in state.items()}
    if not found.is_here:
        for value in state.values():
            _whole_elsewhere(found, value)
        return {}
    return {name: _part(found, param, name, value) for name, value in state.items()}


def _part(found: Managed, param: nn.Parameter, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if found.is_alike(value):
        return value.local.view(()) if value.is_number else value.local
    if value.dim() == 0 and (found.cut.shape or name == "step"):  # of a parameter of shape () all state is 0-d
        return _whole(value)
    if value.shape == param.shape and not isinstance(value, DTensor):
        return value
    part = found.part_of(value)
    if part is None:
        raise ValueError(
            f"optimizer state {name} of parameter {found.name}: expected a number, shape {found.cut.shape} or this "
            f"rank's part {tuple(param.shape)}, found shape {tuple(value.shape)}; load the state of the same model"
        )
    return part.clone()


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _whole_elsewhere(found: Managed, value: Any) -> None:
    """Take part in the gather of a value that other ranks need whole."""
    if isinstance(value, DTensor) and not found.is_alike(value):
        value.full_tensor()
