"""Models and optimizers, sharded or not, among what `save` and `load` are given: by original names and shapes."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from fsdp_compile.core.lookup import WRAPPED


class _Model:
    """A model as DCP takes it: parameters alias the shards."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Sharded values."""
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them."""
        set_model_state_dict(self.model, state)


class _Optimizer:
    """An optimizer as DCP takes it, with names of the parameters of `model`."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer, self.model = optimizer, model

    def state_dict(self) -> dict[str, Any]:
        """Sharded values; state that is not there yet is made."""
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them."""
        set_optimizer_state_dict(self.model, self.optimizer, state)


def as_states(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with what DCP takes in the place of models and optimizers.

    ValueError for an optimizer whose parameters are in none of the models; for a model, an optimizer or an object with
    `state_dict()` that lies deeper: it would be pickled as it is, and loading would put another one in its place.
    """
    for key, value in state.items():
        if not isinstance(value, Stateful):
            _refuse_stateful(value, f"state[{key!r}]")
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    shown = dict(state)
    for key, value in state.items():
        if isinstance(value, nn.Module):
            shown[key] = _Model(_inner(value))
        elif isinstance(value, Optimizer):
            shown[key] = _Optimizer(value, _inner(_owner(key, value, models)))
    return shown


def _refuse_stateful(value: Any, where: str) -> None:
    if isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_stateful(inner, f"{where}[{key!r}]")
    elif isinstance(value, Stateful):  # as models and optimizers are
        raise ValueError(f"{where}: expected a tensor or a plain value, found a {type(value).__name__}; put what has a "
                         f"state_dict() into the outermost dict")  # fmt: skip


def _inner(model: nn.Module) -> nn.Module:
    """The module in our wrapper and in the compiler's, so that optimizer state gets the same names as parameters."""
    model = getattr(model, "_orig_mod", model)
    return model._modules.get(WRAPPED) or model


def _owner(key: str, optimizer: Optimizer, models: Iterable[nn.Module]) -> nn.Module:
    wanted = {param for group in optimizer.param_groups for param in group["params"]}
    for model in models:
        if wanted <= set(model.parameters()):
            return model
    raise ValueError(f"state[{key!r}]: expected a model in state with all of the optimizer's parameters, found none; "
                     f"save and load the two together")  # fmt: skip
