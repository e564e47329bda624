"""Optimizer state as `optimizer.state_dict()` shows it and `optimizer.load_state_dict()` takes it.

    what the optimizer has                       what its state dict shows, unless LOCAL is set
    exp_avg   1-D [n], as this rank's elements   ShardedValue of the parameter's shape
    step      ()                                 ShardedValue of shape (): a scalar that belongs to the parameter
    others    a Python number, None              as they are

A rank that stores no element of a parameter has no state for it, yet shows it, without elements, so that all ranks have
the same keys. Sharded tensors share memory with the optimizer in both directions: a checkpoint is read into its state.
"""

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.state_dict.kinds import LOCAL, settings_of
from fsdp_compile.state_dict.sharded_value import ManagedParameter, ShardedValue, full_tensor, managed

StateDict = dict[str, Any]
State = dict[str, Any]  # of one parameter

# torch's hook on steps belongs to the process, and so do these two sets.
_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_unrelated: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # they had no sharded parameter when they were looked at


def watch_optimizers() -> None:
    """Look at every optimizer before it steps, also at those that had no sharded parameter before; see `watch_state`.

    It is called each time that parameters have been sharded.
    """
    _register_hook()
    _unrelated.clear()


@functools.cache
def _register_hook() -> None:
    register_optimizer_step_pre_hook(watch_state)


def watch_state(optimizer: Optimizer, *_: Any) -> None:
    """From now on convert what enters and leaves the state dict of `optimizer`, if it has sharded parameters.

    Optimizers are noticed when they first step; what was loaded into one before that is converted then.
    """
    if optimizer not in _watched and optimizer not in _unrelated:
        _watch(optimizer)


@torch.compiler.disable  # once for each optimizer, in a step that may be compiled
def _watch(optimizer: Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(managed(param) for param in params):
        _unrelated.add(optimizer)
        return
    _watched.add(optimizer)
    optimizer.register_state_dict_post_hook(lambda optim, state: {**state, "state": sharded_states(optim, state)})
    optimizer.register_load_state_dict_pre_hook(lambda optim, state: {**state, "state": _local_states(optim, state)})
    for param in params:
        if param in optimizer.state:
            optimizer.state[param] = local_state(param, optimizer.state[param])


def params_by_key(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Iterator[tuple[Any, nn.Parameter]]:
    """The optimizer's parameters, each with what stands for it in the parameter groups of a state dict."""
    for own, saved in zip(optimizer.param_groups, groups, strict=False):
        yield from zip(saved["params"], own["params"], strict=False)


# --- out --------------------------------------------------------------------------------------------------------------


def sharded_states(optimizer: Optimizer, state_dict: StateDict) -> dict[Any, State]:
    """The states of a state dict as sharded values; those of parameters that are absent here have no elements.

    Raises:
        ValueError: a tensor is neither a scalar nor of the shape of this rank's elements, so that nobody knows how to
            shard it for other ranks.
    """
    states: dict[Any, State] = {}
    members = [(key, param, managed(param)) for key, param in params_by_key(optimizer, state_dict["param_groups"])]
    examples: dict[FlatParam, State] = {}  # the state of some trained parameter that is present, if it has any
    for key, param, parameter in members:
        if parameter is not None and parameter.is_stored_here and param.requires_grad:
            flat = parameter.unit.flat_of(parameter.index)
            examples[flat] = examples.get(flat) or state_dict["state"].get(key, {})
    for key, param, parameter in members:
        state = state_dict["state"].get(key)
        if parameter is None or settings_of(parameter.unit).state_dict_type is LOCAL:
            if state is not None:
                states[key] = state
        elif parameter.is_stored_here and state is not None:
            states[key] = {name: _sharded(parameter, name, value) for name, value in state.items()}
        elif not parameter.is_stored_here:
            example = state or (_example_for(parameter, examples) if param.requires_grad else None)
            if example:
                tensors = {name: value for name, value in example.items() if isinstance(value, Tensor)}
                states[key] = {name: empty_value(parameter, value) for name, value in tensors.items()}
    return states


def _example_for(absent: ManagedParameter, examples: dict[FlatParam, State]) -> State | None:
    """State of another parameter, which tells what state an absent one has on the ranks that store it.

    Parameters of one flat parameter get gradients together. If this rank stores none of them, any other must do.
    """
    flat = absent.unit.flat_of(absent.index)
    return examples[flat] if flat in examples else next(filter(None, examples.values()), None)


def _sharded(parameter: ManagedParameter, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, ShardedValue):
        return value
    if value.dim() == 0:
        return parameter.scalar(value.clone())  # DCP's stagers do not copy 0-d tensors
    if value.shape == parameter.param.shape:
        return parameter.value(value)
    raise ValueError(
        f"optimizer state {name} of parameter {parameter.name}: expected a scalar or this rank's elements, shape "
        f"{tuple(parameter.param.shape)}, found shape {tuple(value.shape)}, which cannot be sharded for other ranks; "
        f"save it per rank with LOCAL_STATE_DICT"
    )


def empty_value(parameter: ManagedParameter, like: Tensor) -> Tensor:
    """State such as `like`, for a parameter of which this rank stores nothing."""
    local = torch.empty(0, dtype=like.dtype, device=like.device)
    is_scalar = like.spec.is_scalar if isinstance(like, ShardedValue) else like.dim() == 0
    return parameter.scalar(local) if is_scalar else parameter.value(local)


# --- in ---------------------------------------------------------------------------------------------------------------


def _local_states(optimizer: Optimizer, state_dict: StateDict) -> dict[Any, State]:
    """The states of a state dict as `optimizer` has them, without those of parameters that are absent here."""
    states = dict(state_dict["state"])
    for key, param in params_by_key(optimizer, state_dict["param_groups"]):
        if key in states:
            states[key] = local_state(param, states[key])
    return {key: state for key, state in states.items() if state}


def local_state(param: nn.Parameter, state: State) -> State:
    """One parameter's state as its optimizer has it, from sharded values, tensors of full shape or local elements.

    It is empty for a parameter that is absent here; this rank then still takes part in gathering what others need.

    Raises:
        ValueError: a tensor has another shape.
    """
    parameter = managed(param)
    if parameter is None:
        return {name: full_tensor(value) for name, value in state.items()}
    if parameter.is_stored_here:
        return {name: _local(parameter, name, value) for name, value in state.items()}
    for value in state.values():
        if not parameter.is_alike(value):
            full_tensor(value)
    return {}


def _local(parameter: ManagedParameter, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if parameter.is_alike(value):
        return value.local.view(()) if value.spec.is_scalar else value.local
    if value.dim() == 0 and (parameter.shape or name == "step"):  # of a parameter of shape () all state is 0-d
        return full_tensor(value)
    if value.shape == parameter.param.shape and not isinstance(value, DTensor):
        return value
    local = parameter.local_of(value)
    if local is None:
        raise ValueError(
            f"optimizer state {name} of parameter {parameter.name}: expected a scalar, shape {parameter.shape} or this "
            f"rank's elements {tuple(parameter.param.shape)}, found shape {tuple(value.shape)}; load the state of the "
            f"same model"
        )
    return local.clone()
