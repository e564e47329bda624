"""Ways in which sharded training under a compiler goes wrong without a word, seen in numbers. Each has its test.

Elsewhere, beside what they belong to:
    tied parameters come back untied                            test_feature_table.py: test_row
    padding carries NaN into norms, gradients or parameters     test_steps.py: test_padding_is_never_seen
    weights gathered before optimizer.step() are read after it  test_unshard.py: test_older_values_are_not_used
    a graph that one rank has cached runs wrongly on another    test_cache.py; test_group_names.py
    silent ZeRO-2: full parameters kept from forward to backward    fake/test_passes.py: test_forward_saves_only_*
    waits right behind their starts, gathers at the top, late reduces  fake/test_order.py
"""

import copy

import pytest
import torch
from models import MLP, MODELS
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from fsdp_compile import fully_shard, summon_full_params

from ..ranks import on_ranks
from ..training import assert_bitwise, backward, build, executor, local, mine, shard


@on_ranks(2)
def test_settings_of_the_first_model_inherited_by_the_second() -> None:
    """The trap: code that was compiled for one model runs for another of its class that has other settings."""
    low = MixedPrecision(param_dtype=torch.bfloat16)
    plain, other = shard(MLP), shard(MLP, "SHARD_GRAD_OP", mixed_precision=low)
    runs = [executor(model, "aot_eager") for model in (plain, other)]
    alone = [shard(MLP), shard(MLP, "SHARD_GRAD_OP", mixed_precision=low)]
    for step in range(2):
        for run, model, expected in zip(runs, (plain, other), alone, strict=True):
            backward(run, MLP, mine(MLP, step))
            backward(expected, MLP, mine(MLP, step))
            assert_bitwise(model, expected, f"step {step}")
    outputs = [run(mine(MLP, 0)[0]).dtype for run in runs]
    assert outputs == [torch.float32, torch.bfloat16]


def _frozen(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if not param.requires_grad}


@on_ranks(2)
def test_frozen_parameters_returned_trainable() -> None:
    """The trap: parameters are made anew on the way, as trainable ones."""
    case = MODELS["frozen"]
    expected, model = _frozen(build(case)), shard(case)
    found = {"fully_shard": _frozen(model)}
    for how in ("eager", "aot_eager"):
        backward(executor(model, how), case, mine(case, 1))
        found[how] = _frozen(model)
    with summon_full_params(model, with_grads=True):
        found["inside summon_full_params"] = _frozen(model)
    found["after it"] = _frozen(model)
    found["deepcopy"] = _frozen(copy.deepcopy(model))
    model.zero_grad()
    found["double"] = _frozen(model.double())
    assert expected and found == dict.fromkeys(found, expected)


class _Touched(nn.Module):
    """A weight that does not matter, but has a gradient, as scripts make it for DDP's sake."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * self.weight.sum()


@pytest.mark.parametrize("is_called_twice", [False, True])
@on_ranks(2)
def test_equal_constants_as_gradients(is_called_twice: bool) -> None:
    """The trap: equal computations become one, and the gradients of two parameters one memory. Nothing reads what these
    parameters were gathered from; where another unit is called twice, its reduces become one before that is looked at.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), _Touched(), _Touched())
    model = nn.Sequential(*model, model[0]) if is_called_twice else model
    fully_shard(model, auto_wrap_policy={_Touched, nn.Linear})
    run = executor(model, "inductor")
    for times in (1, 2):
        run(torch.ones(4, 6)).square().mean().backward()
        one, other = (local(layer.weight.grad) for layer in model[1:3])
        assert not one.any() and not other.any()
        one.add_(times)  # memory of its own
        assert not other.any() and local(model[0].weight.grad).any()
        model.zero_grad()


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.cos(self.scale)


class _Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.conv(x[:, None]).sum(1))


class _Embedded(nn.Module):
    """A block whose gradient passes an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.table = nn.Parameter(torch.randn(8)), nn.Embedding(7, 8, padding_idx=0)
        self.scale, self.conv = _Scale(), _Conv()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x) + torch.sin(self.gain)
        x = x + self.table((x[:, 0] > 0).long() * 6) * 0.5
        return self.conv(self.scale(x))


@pytest.mark.nightly
@on_ranks(2)
def test_a_fused_loop_that_reads_before_the_wait() -> None:
    """The trap: the C++ backend fuses loops of two shapes, forgets that one reads what a collective fills, and moves
    both before the wait (Note [Loops that forget the wait])."""
    torch.manual_seed(0)
    expected = nn.Sequential(_Embedded(), _Conv(), _Conv())
    model = fully_shard(copy.deepcopy(expected), auto_wrap_policy={_Scale, _Conv, _Embedded})
    x = torch.randn(6, 8)
    expected(x).sum().backward()
    executor(model, "inductor")(x).sum().backward()
    for param, same in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), same.grad, atol=1e-5, rtol=1e-5)  # type: ignore[union-attr]  # backward has set it
