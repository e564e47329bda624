"""Refusals leave a model as it was: calls that must fail, and what may not change by them. What ranks store."""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fsdp_compile import fully_shard
from fsdp_compile.core.unit import unit_of
from fsdp_compile.tensors.sharded_tensor import ShardedTensor


def units(model: nn.Module) -> list[Any]:
    return list(dict.fromkeys(at[0] for p in model.parameters() if (at := unit_of(p))))


def state(model: nn.Module) -> list[Any]:
    return [(type(m), list(m.__dict__)) for m in model.modules()] + [
        (id(p), type(p), None if is_lazy(p) else tuple(p.shape)) for p in model.parameters()
    ]


def refused(model: Any, error: type[Exception] | tuple[type[Exception], ...], message: str, **arguments: Any) -> None:
    """The call raises `error` with `message`, and the model is as it was."""
    before = state(model) if isinstance(model, nn.Module) else None
    with pytest.raises(error, match=message):
        fully_shard(model, **arguments)
    assert before is None or state(model) == before


def local(tensor: Tensor) -> Tensor:
    """What this rank stores of a sharded tensor, 1-D; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor


def managed(model: nn.Module) -> set[str]:
    """Names of the parameters that are sharded."""
    return {name for name, param in model.named_parameters() if unit_of(param)}
