"""State of optimizers over sharded parameters: sharded as these are, and by their names.

`optimizer.state_dict()` is torch's own, of the sharded tensors that the optimizer has. But `load_state_dict` takes
tensors as they come, and `Adagrad` makes some with its parameters, so a hook on steps of all optimizers looks once at
each: nothing else tells of an optimizer before it updates full state on every rank.

    exp_avg   full, sharded in another way, or of FSDP1   ShardedTensor of the parameter's shape, cut or gathered
              sharded as the parameter                    itself, over the same memory: nothing is communicated
    others    0-d and other plain tensors, numbers        the same: equal on all ranks
    nested    dicts, lists, tuples, dataclasses           the same containers, with each tensor converted as above
"""

import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    StateDictType,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compile.comm import collectives
from fsdp_compile.core.sharding import clean_name, clean_names, units_used_below
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.state_dict.model import FULL, SHARDED, is_first_rank, settings_of
from fsdp_compile.state_dict.sharded_value import full_tensor, is_alike, local_of, managed, torch_value
from fsdp_compile.tensors.nested import ABSENT, Path, dotted, leaves, map_leaves, nested_as
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.tensor_parallel import is_dtensor

StateDict = dict[str, Any]
State = dict[str, Any]  # of one parameter
Group = dict[str, Any]  # of parameters
Params = list[dict[str, Any]] | Iterable[nn.Parameter]


# State of a parameter of shape () has that shape too. These are not sharded: one per parameter in torch's optimizers.
SCALARS = ("step", "mu_product", "eta", "mu")

# torch's hook on steps belongs to the process, and so do these two sets.
_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_unrelated: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # had no sharded parameter when last looked at
_register_once = functools.cache(register_optimizer_step_pre_hook)


def watch_optimizers() -> None:
    """Call `watch_state` on each optimizer before its next step. Called whenever parameters have been sharded."""
    _register_once(watch_state)
    _unrelated.clear()


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

    return dict(map_leaves(to_local, state))


# --- to names ---------------------------------------------------------------------------------------------------------


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: StateDict | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """The optimizer's state by parameter names, in original shapes, of the kind that is set for `model`.

    FULL: plain tensors, gathered; all ranks must call it, and with `rank0_only` all but the first get {}. SHARDED: a
    `ShardedTensor` for each tensor, without communication; if it was set, DTensors with rows as FSDP1 has them, for
    which all ranks gather. LOCAL: what this rank has. Scalars, such as step counts, stay 0-d. Values are copies, by
    default on the CPU, except for LOCAL.

    Args:
        model: the module that was sharded, or one around it.
        optim: an optimizer over parameters of `model`.
        optim_state_dict: what to convert, also without "param_groups"; None: `optim.state_dict()`.
        group: the ranks that take part; None: those of the first unit.

    Returns:
        {"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}]}

    Raises:
        ValueError: a parameter is not in `model`, or a tensor fits neither its parameter nor is a scalar.
        RuntimeError: on all ranks: ranks have different state for a parameter.
    """
    settings = settings_of(next(iter(units_used_below(model)), None))
    return _by_name(model, optim, optim_state_dict, settings.state_dict_type, settings.optim_state_dict_config, group)


def _by_name(
    model: nn.Module,
    optim: Optimizer,
    state_dict: StateDict | None,
    kind: StateDictType,
    config: Any,
    group: dist.ProcessGroup | None,
    shares_memory: bool = False,
) -> StateDict:
    watch_state(optim)
    given = optim.state_dict() if state_dict is None else state_dict
    params, named = _named_state(model, optim, given)
    states, unit = named["state"], next(iter(units_used_below(model)), None)
    as_rows = kind is SHARDED and unit is not None and unit.state_settings is not None  # as FSDP1 has them
    has_values = kind is not FULL or not config.rank0_only or unit is None or is_first_rank(unit)
    if unit is not None and (as_rows or kind is FULL):  # ranks gather one after the other
        _check_alike(_shared_names(params, model, states), states, group or unit.group.find())

    def converted(leaf: Any) -> Any:
        if kind is FULL:
            leaf = full_tensor(leaf)
        elif as_rows and isinstance(leaf, ShardedTensor):
            leaf = torch_value(leaf)
        if not has_values or shares_memory or not isinstance(leaf, Tensor):
            return leaf if has_values else None
        return leaf.cpu() if config.offload_to_cpu and leaf.device.type != "cpu" else leaf.clone()

    order = {name: index for index, name in enumerate(states)}
    in_order = sorted(leaves(states), key=lambda item: (order[item[0][0]], dotted(item[0])))
    made = {path: converted(leaf) for path, leaf in in_order}
    if not has_values:
        return {}
    named["state"] = {name: state for name, state in map_leaves(lambda path, _: made[path], states).items() if state}
    return named if "param_groups" in given else {"state": named["state"]}


def _named_state(model: nn.Module, optim: Optimizer, given: StateDict) -> tuple[dict[str, nn.Parameter], StateDict]:
    """The optimizer's parameters by name, and `given` with names in the place of its keys.

    Parameters and states are in the model's order, which ranks share even where their optimizers have another one.
    """
    names = clean_names(model)
    groups = given["param_groups"] if "param_groups" in given else optim.state_dict()["param_groups"]
    pairs = params_by_key(optim, groups, {name: param for param, name in names.items()})
    name_by_key = {key: name_of(param, names) for key, param in pairs}
    key_by_name = {name: key for key, name in name_by_key.items()}
    params = {name: param for param, name in names.items() if name in key_by_name}
    named = {name: given["state"][key_by_name[name]] for name in params if key_by_name[name] in given["state"]}
    groups = [{**each, "params": [name_by_key[key] for key in each["params"]]} for each in groups]
    return params, {"state": named, "param_groups": groups}


def _shared_names(listed: Iterable[str], model: nn.Module, states: dict[str, State]) -> list[str]:
    """Those of `listed` whose state ranks hold together.

    The state of a parameter of no unit is this rank's own, and other ranks may lack the parameter, as in a model that
    is parallel in another way too. DTensors are gathered on all of their ranks in one order, so they count as shared.
    """
    own = {name for param, name in clean_names(model).items() if unit_of(param) is None}
    return [
        name for name in listed if name not in own or any(is_dtensor(leaf) for _, leaf in leaves(states.get(name, {})))
    ]


def _check_alike(names: Iterable[str], states: dict[str, State], group: dist.ProcessGroup) -> None:
    """Raise RuntimeError on all ranks of `group` if their states of `names` differ in names, paths or dtypes."""
    mine = {
        name: {
            dotted(path): str(getattr(leaf, "dtype", type(leaf).__name__))
            for path, leaf in leaves(states.get(name, {}))
        }
        for name in names
    }
    first, *others = collectives.gather_objects(mine, group)
    for rank, theirs in enumerate(others, 1):
        for name in {**first, **theirs}:
            here, there = (each.get(name, "no such parameter") for each in (first, theirs))
            if here != there:
                raise RuntimeError(
                    f"optimizer state of parameter {name}: expected the same on all ranks, found {here} on rank 0 of "
                    f"the group and {there} on rank {rank}"
                )


def name_of(param: nn.Parameter, names: dict[nn.Parameter, str]) -> str:
    """The name of a parameter of an optimizer; ValueError if it is none of the model's."""
    if param not in names:
        raise ValueError(f"optim: a parameter of shape {tuple(param.shape)} is not one of the model's; pass the module "
                         f"that all of the optimizer's parameters are in")  # fmt: skip
    return names[param]


# --- from names -------------------------------------------------------------------------------------------------------


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Turn a state dict by names, full, sharded or local, of any number of ranks, into one for `optim.load_state_dict`.

    If FULL with `rank0_only` is set for `model`, the first rank has the state and sends it parameter by parameter.

    Args:
        model: the module that was sharded, or one around it.
        optim: an optimizer over parameters of `model`.
        optim_state_dict: by names, as `optim_state_dict` or an unsharded model's optimizer gives it after re-keying.
            Without "param_groups" the optimizer's own settings stay.
        is_named_optimizer: whether the optimizer's own state dict has names.
        load_directly: call `optim.load_state_dict` as well.
        group: ignored; the ranks are those of the units.

    Raises:
        ValueError: parameters are missing, unexpected, or of another shape, or groups do not fit the optimizer's.
        RuntimeError: on all ranks: ranks have full or gathered state of different parameters.
    """
    unit = next(iter(units_used_below(model)), None)
    watch_state(optim)
    if unit is not None and getattr(settings_of(unit).optim_state_dict_config, "rank0_only", False):
        optim_state_dict = _from_first_rank(unit, model, optim_state_dict)
    states = optim_state_dict["state"]
    if unit is not None and not any(
        isinstance(leaf, ShardedTensor) for _, leaf in leaves(states)
    ):  # else nothing is sent
        _check_alike(_shared_names(states, model, states), states, unit.group.find())
    loaded = _to_load(model, optim, optim_state_dict, named=is_named_optimizer)
    if load_directly:
        optim.load_state_dict(loaded)
    return loaded


def _to_load(
    model: nn.Module,
    optim: Optimizer | None,
    state_dict: StateDict,
    optim_input: Params | None = None,
    named: bool = False,
) -> StateDict:
    """`state_dict`, by names, with the keys and groups of `optim`; ValueError where they do not fit."""
    names, saved = clean_names(model), state_dict.get("param_groups")
    if saved is not None and optim is None and optim_input is None:
        groups = [{"params": [param for param, name in names.items() if name in group["params"]]} for group in saved]
    else:
        groups = _groups_of(optim, model.parameters() if optim_input is None else optim_input)
    if saved is None:  # the optimizer's settings stay
        saved = [{**group, "params": [name_of(param, names) for param in group["params"]]} for group in groups]
    params = [param for group in groups for param in group["params"]]
    keys: dict[nn.Parameter, Any] = {param: index for index, param in enumerate(params)}
    if named and optim is not None:  # its names may have prefixes of wrappers
        own = params_by_key(optim, optim.state_dict()["param_groups"], {name: param for param, name in names.items()})
        keys = {param: key for key, param in own}
    saved_group = {name for group in saved for name in group["params"]}
    # Others load the state of parameters that fully_shard left alone, if it is not in this state dict.
    wanted = {param for param in params if name_of(param, names) in saved_group or unit_of(param) is not None}
    expected = {names[param] for param in wanted}
    if expected != saved_group or not expected >= state_dict["state"].keys():
        raise ValueError(
            f"optim_state_dict: expected the optimizer's parameters in its param_groups, found missing "
            f"{sorted(expected - saved_group)} and unexpected "
            f"{sorted((saved_group | state_dict['state'].keys()) - expected)}"
        )
    matched = [
        {**settings, "params": [keys[param] for param in group["params"] if param in wanted]}
        for group, settings in zip(groups, saved_settings(groups, saved, names), strict=True)
    ]
    # In the same order on all ranks, as some state may have to be gathered.
    states = {
        keys[param]: local_state(param, state_dict["state"].get(name, {}))
        for param, name in names.items()
        if param in wanted
    }
    return {"state": {key: state for key, state in states.items() if state}, "param_groups": matched}


def saved_settings(groups: list[Group], saved: list[Group], names: dict[nn.Parameter, str]) -> list[Group]:
    """For each of an optimizer's groups the saved one with its parameters; itself, if no group has any of them.

    Groups without parameters have no names: they are matched in order, if equally many were saved.
    """
    of_name = {name: group for group in saved for name in group["params"]}
    empty = [group for group in saved if not group["params"]]
    if len(empty) != sum(not group["params"] for group in groups):
        empty = []
    matched = []
    for group in groups:
        listed = [names[param] for param in group["params"] if names[param] in of_name]
        settings = of_name[listed[0]] if listed else empty.pop(0) if empty and not group["params"] else group
        if apart := [name for name in listed if of_name[name] is not settings]:
            raise ValueError(
                f"optim_state_dict: {apart[0]} and {listed[0]} are in one group of the optimizer and in different ones "
                f"of the state dict; make the optimizer with the saved groups"
            )
        matched.append(settings)
    return matched


def _groups_of(optim: Optimizer | None, optim_input: Params | None) -> list[dict[str, Any]]:
    """The groups of an optimizer, or those of `optim_input`, parameters or groups of them."""
    listed: list[Any] = list(optim.param_groups if optim is not None else optim_input or ())
    return listed if listed and isinstance(listed[0], dict) else [{"params": listed}]


def _from_first_rank(unit: Unit, model: nn.Module, state_dict: StateDict | None) -> StateDict:
    """Send the first rank's state dict to all, parameter by parameter; each rank keeps the elements that it stores."""
    from_first = [unit.group.find()]  # through which the first of all ranks that share the unit reaches the others
    if unit.replicas is not None and from_first[0].rank() == 0:
        from_first.insert(0, unit.replicas.find())

    def sent(value: Any) -> Any:
        for group in from_first:
            value = collectives.broadcast_object(value, group)
        return value

    mine = state_dict or {"state": {}, "param_groups": []}
    names, groups = sent((list(mine["state"]), mine["param_groups"]))
    params, states = {name: param for param, name in clean_names(model).items()}, {}
    for name in names:
        here = map_leaves(lambda _, leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, mine["state"].get(name))
        state = sent(here)
        if name in params:
            states[name] = local_state(params[name], state)
    return {"state": states, "param_groups": groups}


# --- of checkpoints, by names: without communication, and without a step of the optimizer -----------------------------


def state_to_save(model: nn.Module, optim: Optimizer) -> StateDict:
    """The state that the optimizer has, by names, whichever kind is set; its tensors share memory with the optimizer.

    An optimizer that has not stepped yet has no state, and does not step here.
    """
    watch_state(optim)
    _, named = _named_state(model, optim, optim.state_dict())
    if getattr(optim, "shards_own_state", False):
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
    names, own = clean_names(model), optim.param_groups
    ordered = [name_of(param, names) for group in own for param in group["params"]]
    had = [(names[param], key) for group in own for param in group["params"] for key in optim.state.get(param, {})]
    groups, keys = [], itertools.count()
    for group, settings in zip(own, saved_settings(own, saved["param_groups"], names), strict=True):
        kept = {key: group[key] for key in ("param_names",) if key in group}
        groups.append({**settings, **kept, "params": [next(keys) for _ in group["params"]]})
    found = {name: saved["state"].get(name, {}) for name in ordered}
    states = {index: found[name] for index, name in enumerate(ordered) if found[name]}
    optim.load_state_dict({"state": states, "param_groups": groups})
    trained = {names[param] for group in own for param in group["params"] if param.requires_grad}
    stateless = [name for name in ordered if name in trained and not found[name] and saved["state"]]
    return [*stateless, *(f"{name}.{key}" for name, key in had if key not in found[name] and name not in stateless)]


def _own_state(state: State) -> State:
    """State that an optimizer shards itself: what is in full on the owner of a parameter is `ABSENT` on other ranks."""
    sharded = [leaf for _, leaf in leaves(state) if isinstance(leaf, ShardedTensor)]
    if not sharded or any(leaf.spec.numel for leaf in sharded):
        return state
    return map_leaves(lambda _, leaf: leaf if isinstance(leaf, ShardedTensor) else ABSENT, state)


def _new_like(param: nn.Parameter, key: Any, outline: Tensor) -> Tensor:
    """A tensor for the state `key` of `param`, of the shape and dtype that `outline` has."""
    is_alike = outline.shape == param.shape and (outline.dim() or key not in SCALARS)
    if is_alike and (managed(param) is not None or is_dtensor(param)):
        return torch.empty_like(param.detach(), dtype=outline.dtype)
    return torch.empty(outline.shape, dtype=outline.dtype, device=param.device if outline.dim() else "cpu")


# --- between names and integers ---------------------------------------------------------------------------------------


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Params | None = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """Re-key an optimizer's state dict by names or by integers: to and from the optimizer of an unsharded model.

    Args:
        optim_state_dict: by integers or by names.
        optim_state_key_type: the keys that are wanted.
        model: where names come from; sharded or not.
        optim_input: what the optimizer was made from: parameters, or groups of them.
        optim: the optimizer; if None, and no `optim_input` either, one over `model.parameters()`.

    Raises:
        ValueError: a key does not belong to a parameter.
    """
    to_ids = optim_state_key_type is OptimStateKeyType.PARAM_ID
    states, groups = optim_state_dict["state"], optim_state_dict["param_groups"]
    if states and all(type(key) is (int if to_ids else str) for key in states):
        return optim_state_dict
    names = clean_names(model)
    of_optim = _groups_of(optim, model.parameters() if optim_input is None else optim_input)
    ordered = [name_of(param, names) for group in of_optim for param in group["params"]]
    new: dict[Any, Any] = {name: index for index, name in enumerate(ordered)} if to_ids else dict(enumerate(ordered))
    if unknown := [key for keys in (states, *(group["params"] for group in groups)) for key in keys if key not in new]:
        raise ValueError(f"optim_state_dict: expected keys among {list(new)}, found {unknown}; pass the optimizer or "
                         f"the optim_input that it belongs to")  # fmt: skip
    in_order = sorted if to_ids else list
    new_groups = [{**group, "params": in_order(new[key] for key in group["params"])} for group in groups]
    return {"state": {new[key]: state for key, state in states.items()}, "param_groups": new_groups}


# --- older functions of torch's FullyShardedDataParallel: their names say the kind ------------------------------------


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: Params | None = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """As `optim_state_dict` in FULL, whichever kind is set."""
    return _by_name(model, optim, None, FULL, FullOptimStateDictConfig(rank0_only=rank0_only), group)


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None) -> StateDict:
    """As `optim_state_dict` in SHARDED, whichever kind is set; a `ShardedTensor` shares memory with the optimizer."""
    return _by_name(model, optim, None, SHARDED, ShardedOptimStateDictConfig(), group, shares_memory=True)


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict,
    model: nn.Module,
    optim_input: Params | None = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """Turn a full state dict, which every rank has, into one for `load_state_dict`, without communication.

    Without `optim` it is for an optimizer over `optim_input`; without both, over `model.parameters()` in the groups of
    the state dict.
    """
    return _to_load(model, optim, full_optim_state_dict, optim_input)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: Params | None = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """As `shard_full_optim_state_dict`, of a full state dict that only the first rank has."""
    return _to_load(
        model, optim, _from_first_rank(units_used_below(model)[0], model, full_optim_state_dict), optim_input
    )


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
) -> StateDict:
    """Turn what `sharded_optim_state_dict` returned into a state dict for `load_state_dict`."""
    return optim_state_dict_to_load(model, optim, sharded_optim_state_dict)
