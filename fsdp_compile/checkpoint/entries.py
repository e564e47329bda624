"""The entries of the `state` that `save` and `load` take: models, optimizers, objects with `state_dict()`, and values.

entry.collect()               what is saved: nested values, sharded ones over memory of the shards
entry.fill(saved, partial)    what is read of `saved`, the `Stored` of a checkpoint, each with the tensor to fill
entry.put(loaded)             the same with values in the place of each `Stored`
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from fsdp_compile.checkpoint.by_rank import PerRank
from fsdp_compile.checkpoint.directory import first_names, memory_read_by
from fsdp_compile.checkpoint.structure import Stored
from fsdp_compile.checkpoint.untrusted import CheckpointError
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.core.sharding import clean_names
from fsdp_compile.state_dict.model import load_model_state, model_state, unwrapped
from fsdp_compile.state_dict.optimizer import load_saved_state, state_to_fill, state_to_save
from fsdp_compile.tensors.nested import Path, dotted, is_container, items, leaves, map_items, map_leaves

_EXTRA = "_extra_state"  # the last part of its names in a model's state dict


class Entry(ABC):
    """One entry of `state`, under the key `key`."""

    def __init__(self, key: str) -> None:
        self.key = key

    @abstractmethod
    def collect(self) -> Any:
        """What is saved."""

    @abstractmethod
    def fill(self, saved: Any, partial: bool) -> tuple[Any, list[str]]:
        """What is read of `saved`, with `partial` nothing that this has not; and names that it cannot take.

        CheckpointError if names are missing, or values do not fit.
        """

    @abstractmethod
    def put(self, loaded: Any) -> Any:
        """Load; return what `state` has afterwards."""

    def is_compared(self, path: Path, value: Any) -> bool:
        """Whether the value at `path` of what is saved is compared between ranks, as each may have its own."""
        return True

    def is_first_ranks(self, path: Path, value: Any) -> bool:
        """Whether the value at `path` is saved as the first rank has it that has one, though others may differ."""
        return False


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# --- models -----------------------------------------------------------------------------------------------------------


class Model(Entry):
    """A model, sharded or not, under original names."""

    def __init__(self, key: str, model: nn.Module, only_trained: bool = False, strict: bool = True) -> None:
        super().__init__(key)
        self.model, self.only_trained, self.strict = model, only_trained, strict and not only_trained

    def collect(self) -> dict[str, Any]:
        """Values over memory of the model."""
        state = model_state(self.model)
        self._of_params = {param.data_ptr() for param in self.model.parameters()}
        if self.only_trained:  # torch's own `ignore_frozen_params` keeps further names of tied ones
            kept = model_state(self.model, keep_vars=True)
            frozen = {
                name for name, value in kept.items() if isinstance(value, nn.Parameter) and not value.requires_grad
            }
            state = {name: value for name, value in state.items() if name not in frozen}
        return state

    def is_compared(self, path: Path, value: Any) -> bool:
        """Extra state alone."""
        return not isinstance(value, Tensor)

    def is_first_ranks(self, path: Path, value: Any) -> bool:
        """Buffers, such as statistics of a rank's own batches. They belong together: all are of one rank."""
        is_extra = str(path[1]).rpartition(".")[2] == _EXTRA
        is_plain = isinstance(value, Tensor) and not hasattr(value, "placements")
        return is_plain and not is_extra and value.data_ptr() not in self._of_params

    def fill(self, saved: Any, partial: bool) -> tuple[Any, list[str]]:
        """The model says what it has; extra state is read as it was saved."""
        own = self.collect()
        tied = first_names({name: memory_read_by(value) for name, value in own.items()})  # one name is enough
        saved |= {first: saved[name] for name, first in tied.items() if name in saved and first not in saved}
        saved |= {name: saved[first] for name, first in tied.items() if first in saved and name not in saved}
        missing = [name for name, value in own.items() if name not in saved and _has_leaves(value)]
        if missing and (self.strict or self.only_trained):
            raise _missing_names_error(self.key, missing)
        own = {name: value for name, value in own.items() if name not in missing}
        for name, value in own.items():
            here = saved.get(name)
            if name.rpartition(".")[2] == _EXTRA or not isinstance(value, Tensor):
                _choose(here, value)
            elif not isinstance(here, Stored) or here.tensor is None:
                raise CheckpointError(f"{self.key}.{name}: expected a tensor in the checkpoint, as the model has one, "
                                      f"found another value; load a checkpoint of this model")  # fmt: skip
            else:
                here.fill(value)
        chosen = {name: saved.get(name, value) for name, value in own.items()}
        return chosen, [name for name in saved if name not in own]

    def put(self, loaded: Any) -> nn.Module:
        """Load into the model."""
        load_model_state(self.model, loaded, self.strict)
        return self.model


# --- optimizers -------------------------------------------------------------------------------------------------------


class InModel(Entry):
    """An optimizer over parameters of a model, under the model's names. It is never stepped."""

    def __init__(self, key: str, models: Sequence[nn.Module], optimizer: Optimizer) -> None:
        super().__init__(key)
        params = {param for group in optimizer.param_groups for param in group["params"]}
        owner = next((model for model in models if params <= set(model.parameters())), None)
        if owner is None:
            raise ValueError(f"state[{key!r}]: no model in state has all of the optimizer's parameters; save and load "
                             f"the two together")  # fmt: skip
        self.model, self.optimizer = unwrapped(owner), optimizer

    def collect(self) -> dict[str, Any]:
        """The state that the optimizer has: nothing before its first step. Names are in the model's order."""
        found = state_to_save(self.model, self.optimizer)
        order = {name: index for index, name in enumerate(clean_names(self.model).values())}
        groups = [
            {**group, "params": sorted(group["params"], key=order.__getitem__)} for group in found["param_groups"]
        ]
        states = {name: state for name, state in found["state"].items() if state}
        return {"state": states, "param_groups": groups} if states else {"param_groups": groups}

    def is_compared(self, path: Path, value: Any) -> bool:
        """Groups, as ranks may have other parameters. State is equal, or with `by_owner` on one rank alone."""
        return path[1] == "param_groups"

    def fill(self, saved: Any, partial: bool) -> tuple[Any, list[str]]:
        """All that was saved of the optimizer's parameters, whether it has stepped or not."""
        names, states, groups = clean_names(self.model), saved.get("state", {}), saved["param_groups"]
        own = {names[param] for group in self.optimizer.param_groups for param in group["params"]}
        unread = [name for name in states if name not in own]
        states = {name: state for name, state in states.items() if name in own}
        outlines = map_leaves(lambda _, stored: stored.outline, states)
        targets = state_to_fill(self.model, self.optimizer, outlines)
        for (_, stored), (_, target) in zip(leaves(states), leaves(targets), strict=True):
            stored.fill(target)
        for (_, key, *_), stored in leaves(groups):
            like = [group[key] for group in self.optimizer.param_groups if isinstance(group.get(key), Tensor)]
            stored.fill(torch.empty_like(stored.outline, device=like[0].device) if stored.tensor and like else None)
        return {"state": states, "param_groups": groups}, unread

    def put(self, loaded: Any) -> Optimizer:
        """Load state and options; warn of what the checkpoint does not have."""
        off = list(_switched_off(self.optimizer, loaded["param_groups"]))
        anew = load_saved_state(self.model, self.optimizer, loaded)
        if anew or off:
            new = f"the checkpoint has no state of {listed(anew)}, which starts anew" if anew else ""
            options = f"the saved options replace {listed(off)}" if off else ""
            warn_caller(f"state[{self.key!r}]: " + "; ".join(filter(None, (new, options))))
        return self.optimizer


def _switched_off(optimizer: Optimizer, saved: list[dict[str, Any]]) -> Iterator[str]:
    """Options that the optimizer was made with, such as amsgrad, and that all saved groups have switched off."""
    for key, value in optimizer.defaults.items():
        kept = [group[key] for group in saved if key in group]
        if key != "lr" and value and kept and not any(kept):
            yield f"{key}={value} by {kept[0]}"


# --- objects and values -----------------------------------------------------------------------------------------------


class Object(Entry):
    """An object with `state_dict()` and `load_state_dict()`, which gets what was saved."""

    def __init__(self, key: str, value: Stateful) -> None:
        super().__init__(key)
        self.value = value

    def collect(self) -> Any:
        """Its state dict."""
        return self.value.state_dict()

    def fill(self, saved: Any, partial: bool) -> tuple[Any, list[str]]:
        """All that was saved; with `partial` what its state dict has now. Tensors that fit are filled in place."""
        return _choose(saved, self.collect(), (self.key,), partial, depth=1), []

    def put(self, loaded: Any) -> Stateful:
        """Call its `load_state_dict`."""
        self.value.load_state_dict(loaded)
        return self.value


class Value(Entry):
    """A tensor, a value, or dicts and lists of them: tensors are filled in place, dicts and lists changed in place."""

    def __init__(self, key: str, value: Any) -> None:
        super().__init__(key)
        self.value = value

    def collect(self) -> Any:
        """The value itself."""
        return self.value

    def fill(self, saved: Any, partial: bool) -> tuple[Any, list[str]]:
        """All that was saved; with `partial` what the value has."""
        return _choose(saved, self.value, (self.key,), partial, math.inf, exact=True), []

    def put(self, loaded: Any) -> Any:
        """The value itself if it can be changed, else what was loaded."""
        return _merge_into(self.value, loaded)


def _choose(saved: Any, own: Any, path: Path = (), partial: bool = False, depth: float = 0, exact: bool = False) -> Any:
    """What is read of `saved`, each `Stored` with what it fills of `own`, what `state` has at `path`.

    Args:
        saved: containers of `Stored`.
        own: nested likewise, as far as it has something.
        path: for errors.
        partial: whether names are left out that dicts of `own` do not have.
        depth: how many levels of dicts, from here, are compared by names: CheckpointError if `saved` lacks some.
        exact: whether a tensor of another shape is an error; otherwise another one takes its place.
    """
    if isinstance(saved, Stored):
        fits = isinstance(own, Tensor) and saved.tensor is not None and own.shape == saved.tensor.size
        is_kept = fits or exact or isinstance(own, PerRank) or saved.of_ranks
        saved.fill(own if is_kept and not is_container(own) else None)
        return saved
    mine = dict(items(own)) if is_container(own) else {}
    if isinstance(saved, dict):
        compares = depth > 0 and isinstance(own, dict)
        lost = {key: value for key, value in mine.items() if compares and key not in saved}
        if missing := [dotted((*path, key)) for key, value in lost.items() if _has_leaves(value)]:
            raise _missing_names_error(path[0], missing)
        kept = copy.copy(saved)
        for key, value in saved.items():
            is_of_others = isinstance(value, Stored) and value.is_of_some  # and there are more ranks now, or fewer
            if key not in mine and (is_of_others or (partial and compares)):
                del kept[key]
        for key, value in lost.items():  # empty dicts, of which an older checkpoint has no name
            kept.setdefault(key, value)
        saved = kept
    return map_items(lambda key, item: _choose(item, mine.get(key), (*path, key), partial, depth - 1, exact), saved)


def _merge_into(own: Any, new: Any) -> Any:
    if isinstance(own, dict) and isinstance(new, dict):
        for key, value in new.items():
            own[key] = _merge_into(own.get(key), value)
        return own
    if isinstance(own, list) and isinstance(new, list):
        own[:] = [_merge_into(own[index] if index < len(own) else None, value) for index, value in enumerate(new)]
        return own
    return new


def _has_leaves(value: Any) -> bool:
    return not is_container(value) or any(True for _ in leaves(value))


def _missing_names_error(key: str, names: list[str]) -> CheckpointError:
    return CheckpointError(f"state[{key!r}] has names that the checkpoint does not have: {listed(names)}")


def entries_of(state: dict[str, Any]) -> dict[str, Entry]:
    """An entry for each key; ValueError for an optimizer without its model, or for a model within a dict."""
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    found: dict[str, Entry] = {}
    for key, value in state.items():
        if isinstance(value, Entry):
            found[key] = value
        elif isinstance(value, nn.Module):
            found[key] = Model(key, value)
        elif isinstance(value, Optimizer):
            found[key] = InModel(key, models, value)
        elif isinstance(value, Stateful):
            found[key] = Object(key, value)
        else:
            _refuse_stateful(value, f"state[{key!r}]")
            found[key] = Value(key, value)
    return found


def _refuse_stateful(value: Any, where: str) -> None:
    if isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_stateful(inner, f"{where}[{key!r}]")
    elif isinstance(value, Stateful):  # as models and optimizers are; DCP would pickle it, and loading would replace it
        raise ValueError(f"{where}: expected a tensor or a plain value, found a {type(value).__name__}; put what has a "
                         f"state_dict() into the outermost dict")  # fmt: skip
