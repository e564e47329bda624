"""What is looked at before a compiled forward, however the model was compiled."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from models import MLP, Case, mlp, squared_error, vectors
from torch import nn

from fsdp_compile import FullyShardedDataParallel
from fsdp_compile.edits import writeback

from ..ranks import on_ranks
from ..training import backward, follow, mine, reference_and_model, shard, units

SMALL = Case(lambda: mlp(2), vectors, squared_error)
OPTIONS: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}


def _compile_module(model: nn.Module) -> nn.Module:
    return torch.compile(model, **OPTIONS)


def _compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(**OPTIONS)
    return model


def _compile_units(model: Any) -> nn.Module:
    model.blocks[0].compile(**OPTIONS)
    model.blocks[1] = torch.compile(model.blocks[1], **OPTIONS)
    return model


def _compile_function(model: nn.Module) -> Any:
    return torch.compile(lambda *args: model(*args), **OPTIONS)


def _compile_copy(model: nn.Module) -> nn.Module:
    return torch.compile(copy.deepcopy(model), **OPTIONS)


WAYS: dict[str, Callable[[Any], Any]] = {
    "module": _compile_module, "in place": _compile_in_place, "copy": _compile_copy, "units": _compile_units,
    "function": _compile_function, "not compiled": lambda model: model,
}  # fmt: skip


@pytest.mark.nightly
@on_ranks(2)
def test_units_are_looked_at_once_a_step() -> None:
    """Each of three units is looked at once before each forward, whoever is compiled, without a graph break or a second
    compilation; by a guard of a function around the model, which Dynamo also calls while it compiles."""
    for way, compile_in_this_way in WAYS.items():
        torch._dynamo.reset()
        run = compile_in_this_way(shard(SMALL))
        for step in range(3):
            with (
                torch._dynamo.config.patch(error_on_recompile=step > 0),
                mock.patch.object(writeback, "refresh", wraps=writeback.refresh) as refresh,
            ):
                backward(run, SMALL, mine(SMALL, step))
            calls = refresh.call_count if step or way != "function" else min(refresh.call_count, 3)
            assert calls == 3, f"{way}, step {step}: {refresh.call_count}"
    wrapped = FullyShardedDataParallel(SMALL.build())
    with mock.patch.object(writeback, "refresh", wraps=writeback.refresh) as refresh:
        backward(torch.compile(wrapped, **OPTIONS), SMALL, mine(SMALL, 0))
    assert refresh.call_count == 1


@on_ranks(2)
def test_what_was_gathered_by_hand_is_freed() -> None:
    """A compiled forward gathers for itself: it frees what `unshard` gathered, and an eager one reads nothing stale."""
    reference, model = reference_and_model(MLP)
    run = _compile_module(model)
    model.unshard()
    assert units(model)[0].prefetched is not None
    follow(run, reference, MLP, steps=1)
    assert units(model)[0].prefetched is None
    follow(model, reference, MLP, steps=1)


@on_ranks(2)
def test_what_does_not_fit_is_refused_before_a_compiled_step() -> None:
    """A replacement of another shape or dtype raises before anything is computed; the model stays usable (E-WB-4)."""
    reference, model = reference_and_model(MLP)
    run = _compile_module(model)
    before = model.head.weight.data
    with pytest.raises(ValueError, match=r"data: expected a tensor of the full shape \(5, 11\), found \(11, 5\)"):
        model.head.weight.data = torch.zeros(11, 5)
    model.head.weight.data = torch.zeros(5, 11, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"parameter head.weight: expected torch.float32 .*, found torch.float64"):
        run(mine(MLP, 1)[0])
    model.head.weight.data = before
    follow(run, reference, MLP)
