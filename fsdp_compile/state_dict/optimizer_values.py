"""Optimizer state as `optimizer.state_dict()` shows it and `optimizer.load_state_dict()` takes it.

    what the optimizer has                           what its state dict shows, unless LOCAL is set
    exp_avg   ShardedTensor of the parameter's shape   ShardedValue of that shape
    others    0-d and other plain tensors, numbers     as they are: equal on all ranks

Sharded tensors share memory with the optimizer in both directions: a checkpoint is read into its state.
"""

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compile.core.sharded_tensor import ShardedTensor
from fsdp_compile.state_dict.model import LOCAL, settings_of
from fsdp_compile.state_dict.sharded_value import ManagedParameter, full_tensor, managed

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

    Optimizers are noticed when they first step; what was loaded into one before that is converted then. Those with an
    attribute `shards_own_state` that is true are left alone: optim/owners.py shards state in another way.
    """
    if optimizer not in _watched and optimizer not in _unrelated:
        _watch(optimizer)


@torch.compiler.disable  # once for each optimizer, in a step that may be compiled
def _watch(optimizer: Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if getattr(optimizer, "shards_own_state", False) or not any(managed(param) for param in params):
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


def sharded_states(optimizer: Optimizer, state_dict: StateDict, kind: StateDictType | None = None) -> dict[Any, State]:
    """The states of a state dict with a `ShardedValue` for each sharded tensor; all else is as it is.

    Tensors of other shapes than their parameter's are plain, and equal on all ranks. In LOCAL, which `kind` says or, if
    it is None, what is set for the parameter's unit, sharded tensors stay as they are too.
    """
    states = dict(state_dict["state"])
    for key, param in params_by_key(optimizer, state_dict["param_groups"]):
        parameter = managed(param)
        if key in states and parameter and (kind or settings_of(parameter.unit).state_dict_type) is not LOCAL:
            states[key] = {name: _value(parameter, value) for name, value in states[key].items()}
    return states


def _value(parameter: ManagedParameter, value: Any) -> Any:
    if type(value) is ShardedTensor:
        return parameter.value(value.to_local())
    # DCP's stagers do not copy 0-d tensors.
    return value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value


# --- in ---------------------------------------------------------------------------------------------------------------


def _local_states(optimizer: Optimizer, state_dict: StateDict) -> dict[Any, State]:
    """The states of a state dict as `optimizer` has them."""
    states = dict(state_dict["state"])
    for key, param in params_by_key(optimizer, state_dict["param_groups"]):
        if key in states:
            states[key] = local_state(param, states[key])
    return states


def local_state(param: nn.Parameter, state: State) -> State:
    """One parameter's state as its optimizer has it: tensors of the parameter's shape are sharded as it is.

    Sharded tensors share memory with the given ones where these are sharded in the same way.

    Raises:
        RuntimeError: a tensor is another rank's part.
    """
    parameter = managed(param)
    if parameter is None:
        return {name: full_tensor(value) for name, value in state.items()}
    return {name: _local(parameter, name, value) for name, value in state.items()}


# Of a parameter of shape () all state has that shape. These are what torch's optimizers have one of for each parameter.
_SCALARS = ("step", "mu_product", "eta", "mu")


def _local(parameter: ManagedParameter, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    is_scalar = value.dim() == 0 and (parameter.shape or name in _SCALARS)
    what = f"optimizer state {name} of parameter {parameter.name}"
    local = None if is_scalar else parameter.local_of(value, what)
    if local is None:
        return full_tensor(value)
    return ShardedTensor(local if parameter.is_alike(value) else local.clone(), parameter.spec)
