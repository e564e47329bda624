"""Optimizers that step on flat shards do what they do without; what one process shows is in fake/test_flat_steps.py."""

from typing import Any

import pytest
import torch
from models import seeded
from torch import nn

from fsdp_compile import compile_step, fully_shard
from fsdp_compile.optim import flat_step

from ..ranks import on_ranks
from ..training import local

CLOSE = {"rtol": 1e-6, "atol": 1e-7}  # kernels compute the last few elements of a tensor with other instructions


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.Tanh()) for _ in range(3)])


def _assert_equal(one: nn.Module, other: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(local(mine), local(theirs), **CLOSE)
        states = [optimizer.state[param] for optimizer, param in zip(optimizers, (mine, theirs), strict=True)]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            assert type(value) is type(states[1][name])
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(local(value), local(states[1][name]), **CLOSE)


@pytest.mark.parametrize("how", ["step", "in backward", "state"])
@on_ranks(2)
def test_before_other_steps(rank: int, how: str) -> None:
    """Steps that update parameters one by one count as ordinary steps where flat ones came before: those of
    `compile_step`, its updates in backward, and steps after a parameter has got more state than others."""
    models = [fully_shard(_model(), auto_wrap_policy=None) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    flat_step(optimizers[1], False)
    options: dict[str, Any] = {"backend": "aot_eager", "update_in_backward": how == "in backward"}
    step = compile_step(models[0], optimizers[0], lambda output: output.square().sum(), **options)
    for turn in range(6):
        x = torch.randn(3, 9, generator=seeded(turn + 10 * rank))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            if turn in (2, 3) and how != "state" and optimizer is optimizers[0]:
                step(x)
                continue
            model(x).square().sum().backward()
            if turn == 2 and how == "state":  # it cannot be joined any more
                optimizer.state[model[0][0].weight]["of_a_user"] = 0
            optimizer.step()
    _assert_equal(*models, optimizers)
