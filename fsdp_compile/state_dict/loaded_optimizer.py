"""The state that an optimizer over sharded parameters loads, or had before they were sharded, becomes as they are.

    exp_avg   full, sharded in another way, or of FSDP1   ShardedTensor of the parameter's shape, cut or gathered
              sharded as the parameter                    itself, over the same memory: nothing is communicated
    others    0-d and other plain tensors, numbers        the same: equal on all ranks
    nested    dicts, lists, tuples, dataclasses           the same containers, with each tensor converted as above

`optimizer.state_dict()` is torch's own, of the sharded tensors that the optimizer has. But `load_state_dict` takes
tensors as they come, and `Adagrad` makes some with its parameters, so a hook on steps of all optimizers looks once at
each: nothing else tells of an optimizer before it updates full state on every rank.
"""

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compile.core.sharding import clean_name
from fsdp_compile.state_dict.sharded_value import full_tensor, is_alike, local_of, managed
from fsdp_compile.tensors.nested import Path, dotted, map_leaves, nested_as
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

StateDict = dict[str, Any]
State = dict[str, Any]  # of one parameter

# State of a parameter of shape () has that shape too. These are not sharded: one per parameter in torch's optimizers.
SCALARS = ("step", "mu_product", "eta", "mu")

# torch's hook on steps belongs to the process, and so do these two sets.
_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_unrelated: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # had no sharded parameter when last looked at


def watch_optimizers() -> None:
    """Call `watch_state` on each optimizer before its next step. Called whenever parameters have been sharded."""
    _register_hook()
    _unrelated.clear()


@functools.cache
def _register_hook() -> None:
    register_optimizer_step_pre_hook(watch_state)


def watch_state(optimizer: Optimizer, *_: Any) -> None:
    """Shard the state of `optimizer`, and from now on what it loads, if it has sharded parameters.

    One with a true attribute `shards_own_state` is left alone: optim/owners.py shards state in another way.
    """
    if optimizer not in _watched and optimizer not in _unrelated:
        _watch_optimizer(optimizer)


@torch.compiler.disable  # once for each optimizer, in a step that may be compiled
def _watch_optimizer(optimizer: Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if getattr(optimizer, "shards_own_state", False) or not any(managed(param) is not None for param in params):
        _unrelated.add(optimizer)
        return
    _watched.add(optimizer)
    try:
        optimizer.register_load_state_dict_pre_hook(_before_load)
    except AttributeError:  # it has no hooks, as it is around another optimizer, which is watched when it steps
        return
    for param in params:
        if param in optimizer.state:
            optimizer.state[param] = local_state(param, optimizer.state[param])


def _before_load(optim: Optimizer, state_dict: StateDict) -> StateDict:
    """What `load_state_dict` of a watched optimizer gets: state that is sharded as its parameters."""
    for own, group in zip(optim.param_groups, state_dict["param_groups"], strict=False):
        if "lr" in own and "lr" not in group:
            raise ValueError(
                "load_state_dict: a parameter group has no lr; torch's set_optimizer_state_dict loses the options of a "
                "group if an empty one is before it: save and load with fsdp_compile.checkpoint, or leave out the "
                "empty group"
            )
    states = dict(state_dict["state"])
    for key, param in params_by_key(optim, state_dict["param_groups"]):
        if key in states:
            states[key] = local_state(param, nested_as(optim.state.get(param, {}), states[key]))
    return {**state_dict, "state": states}


def params_by_key(
    optimizer: Optimizer, groups: list[dict[str, Any]], named: dict[str, nn.Parameter] | None = None
) -> Iterator[tuple[Any, nn.Parameter]]:
    """The optimizer's parameters, each with its key in the parameter groups of a state dict: an integer, or a name, of
    which `named` says what it means.
    """
    for own, saved in zip(optimizer.param_groups, groups, strict=False):
        for key, param in zip(saved["params"], own["params"], strict=False):
            yield key, (named or {}).get(clean_name(key), param) if isinstance(key, str) else param


def local_state(param: nn.Parameter, state: State) -> State:
    """One parameter's state as its optimizer has it: tensors of the parameter's shape are sharded like it.

    They share memory with given ones that are sharded in the same way. RuntimeError for another rank's part.
    """
    sharded = managed(param)

    def to_local(path: Path, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        local = None
        if sharded is not None and (value.dim() or not (sharded.dim() or path[-1] in SCALARS)):
            local = local_of(sharded, value, f"optimizer state {dotted(path)} of parameter {sharded.spec.named()}")
        if local is None:
            return full_tensor(value)
        return ShardedTensor(local if is_alike(value, sharded.spec) else local.clone(), sharded.spec)

    converted: State = map_leaves(to_local, state)
    return converted
