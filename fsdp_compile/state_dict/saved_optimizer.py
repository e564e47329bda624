"""The state of an optimizer for a checkpoint, by names: without communication, and without a step of the optimizer."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.core.sharding import clean_names
from fsdp_compile.state_dict.loaded_optimizer import (
    SCALARS,
    State,
    StateDict,
    local_state,
    shards_own_state,
    watch_state,
)
from fsdp_compile.state_dict.optimizer import name_of, named_state, saved_settings
from fsdp_compile.state_dict.sharded_value import managed
from fsdp_compile.tensors.nested import ABSENT, Path, leaves, map_leaves
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.tensor_parallel import is_dtensor


def state_to_save(model: nn.Module, optim: Optimizer) -> StateDict:
    """The state that the optimizer has, by names, whichever kind is set; its tensors share memory with the optimizer.

    An optimizer that has not stepped yet has no state, and does not step here.
    """
    watch_state(optim)
    _, named = named_state(model, optim, optim.state_dict())
    if shards_own_state(optim):
        named["state"] = {name: _own_state(state) for name, state in named["state"].items()}
    return named


def state_to_fill(model: nn.Module, optim: Optimizer, saved: dict[str, State]) -> dict[str, State]:
    """`saved`, states by name with tensors without values, with tensors in their places that can be filled.

    Where the optimizer has a tensor of that shape it is filled in place; others are new, and sharded as their
    parameters if they have their shapes.
    """
    params = {name: param for param, name in clean_names(model).items()}
    own = dict(leaves(state_to_save(model, optim)["state"]))

    def to_fill(path: Path, outline: Any) -> Any:
        if not isinstance(outline, Tensor):
            return outline
        here, param = own.get(path), params[path[0]]
        if isinstance(here, Tensor) and (here.shape, here.dtype) == (outline.shape, outline.dtype):
            return here
        return _new_like(param, path[-1], outline)

    return {name: map_leaves(to_fill, state, (name,)) for name, state in saved.items() if name in params}


def load_saved_state(model: nn.Module, optim: Optimizer, saved: StateDict) -> list[str]:
    """Load state by names; return the names of what the optimizer needs or has and `saved` lacks: it starts anew.

    A parameter that `saved` does not have keeps its group's settings. Names in `saved` that are none of the optimizer's
    are ignored. ValueError: parameters of one group are in several groups of `saved`.
    """
    names, current = clean_names(model), optim.state
    ordered = [param for group in optim.param_groups for param in group["params"]]
    had = [(param, key) for param in ordered for key in current.get(param, {})]
    groups, keys = [], itertools.count()
    for group, settings in zip(
        optim.param_groups, saved_settings(optim.param_groups, saved["param_groups"], names), strict=True
    ):
        own = {key: group[key] for key in ("param_names",) if key in group}
        groups.append({**settings, **own, "params": [next(keys) for _ in group["params"]]})
    found = [saved["state"].get(name_of(param, names), {}) for param in ordered]
    converted = found if shards_own_state(optim) else map(local_state, ordered, found)
    states = {index: state for index, state in enumerate(converted) if state}
    optim.load_state_dict({"state": states, "param_groups": groups})
    of_param = dict(zip(ordered, found, strict=True))
    stateless = {param for param in ordered if param.requires_grad and not of_param[param] and saved["state"]}
    lost = [f"{names[param]}.{key}" for param, key in had if key not in of_param[param] and param not in stateless]
    return [*(names[param] for param in ordered if param in stateless), *lost]


def _own_state(state: State) -> State:
    """State that an optimizer shards itself: what is in full on the owner of a parameter is `ABSENT` on other ranks."""
    sharded = [leaf for _, leaf in leaves(state) if isinstance(leaf, ShardedTensor)]
    if not sharded or any(leaf.spec.numel for leaf in sharded):
        return state
    return map_leaves(lambda _, leaf: leaf if isinstance(leaf, ShardedTensor) else ABSENT, state)


def _new_like(param: nn.Parameter, key: Any, outline: Tensor) -> Tensor:
    """A tensor for the state `key` of `param`, of the shape and dtype that `outline` has."""
    parameter = managed(param)
    alike = outline.shape == param.shape and (outline.dim() > 0 or key not in SCALARS)
    if alike and parameter is not None:
        local = torch.empty(parameter.spec.numel, dtype=outline.dtype, device=parameter.local.device)
        return ShardedTensor(local, parameter.spec)
    if alike and is_dtensor(param):
        return torch.empty_like(param, dtype=outline.dtype, requires_grad=False)
    return torch.empty(outline.shape, dtype=outline.dtype, device=param.device if outline.dim() else "cpu")
