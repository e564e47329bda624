"""Optimizers that step during backward, and loss scaling."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MLP
from tiers import both_ways, compiled_late
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import _apply_optimizer_in_backward

from fsdp_compile import fully_shard

from ..ranks import on_ranks
from ..training import assert_same_parameters, backward, build, executor, local, mine, reference_and_model, shard, whole

RATE = 0.05


def _apply(model: nn.Module) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": RATE})


def _mark(model: nn.Module) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": RATE}, register_hook=False)


def _register(model: nn.Module) -> None:
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=RATE)

        def step(param: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            param.grad = None

        param.register_post_accumulate_grad_hook(step)


ATTACH: dict[str, Callable[[nn.Module], None]] = {"apply": _apply, "mark": _mark, "hooks": _register}


DAILY, LATE = ("hooks", False), pytest.mark.nightly


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(
    ("attach", "how", "first", "offload"),
    [
        *((attach, "eager", first, False) for attach in ATTACH for first in (False, True)),
        ("apply", "eager", False, True),
        *(
            pytest.param(attach, "aot_eager", first, False, marks=() if (attach, first) == DAILY else LATE)
            for attach in ATTACH
            for first in (False, True)
        ),
    ],
)
@on_ranks(2)
def test_optimizer_in_backward(attach: str, how: str, strategy: str, first: bool, offload: bool) -> None:
    """Optimizers attached to parameters, before sharding or after a pass, step with reduced gradients within backward.

    After it parameters are updated and gradients None. Offloaded shards are stepped on the CPU, with gradients made
    anew. E-OIB-1..4, E-ERR-4, E-LAZY-5, E-LIM-16, E-OFF-9.
    """
    reference, model = build(MLP), build(MLP)
    if first:
        ATTACH[attach](model)
    fully_shard(model, sharding_strategy=ShardingStrategy[strategy], cpu_offload=CPUOffload(offload))
    optimizer = torch.optim.SGD(reference.parameters(), lr=RATE)
    run = executor(model, how)
    if not first:
        backward(run, MLP, mine(MLP, 9))
        model.zero_grad()
        ATTACH[attach](model)
    for seed in range(3):
        optimizer.zero_grad()
        backward(reference, MLP, whole(MLP, seed))
        optimizer.step()
        backward(run, MLP, mine(MLP, seed))
        assert all(param.grad is None for param in model.parameters())
        assert not offload or all(param.device.type == "cpu" for param in model.parameters())
        assert_same_parameters(model, reference)


# --- loss scaling -----------------------------------------------------------------------------------------------------


@both_ways
@on_ranks(2)
def test_all_ranks_skip_a_step(rank: int, how: str) -> None:
    """Infinity in one rank's part of the gradients makes ShardedGradScaler skip the step on every rank."""
    _, model = reference_and_model(MLP)
    run = executor(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for broken in (False, True, False):
        before = [local(param.detach()).clone() for param in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(MLP.loss(run, mine(MLP, 1))).backward()
        if broken and rank == 0:
            here = next(grad for param in model.parameters() if (grad := local(param.grad)).numel())
            here[0] = torch.inf
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        after = [local(param) for param in model.parameters()]
        stood_still = [torch.equal(a, b) for a, b in zip(before, after, strict=True) if b.numel()]
        assert all(stood_still) if broken else not any(stood_still), stood_still
        assert scaler.get_scale() == (scale / 2 if broken else scale)


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))  # the first rank holds it all

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@on_ranks(4)
def test_ranks_without_gradients_hear_of_infinity() -> None:
    """A rank that holds no part of any gradient scales down with the others."""
    model = fully_shard(_Tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    for scale in (1024.0, 512.0):
        assert scaler.get_scale() == scale
        scaler.scale(model(torch.full((3,), torch.inf))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert local(model.weight).eq(1).all()


@compiled_late
@on_ranks(2)
def test_float16_with_loss_scaling(how: str) -> None:
    """The scale comes down from where float16 overflows until steps happen; ranks agree at each step (E-CLIP-3)."""
    precision = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    reference, model = build(MLP), shard(MLP, mixed_precision=precision)
    run = executor(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**24, growth_interval=100)
    skipped = 0
    for seed in range(12):
        optimizer.zero_grad()
        scaler.scale(MLP.loss(run, mine(MLP, 1))).backward()
        scale = scaler.get_scale()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(1e6)
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        scales: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(scales, (scaler.get_scale(), norm.isfinite().item()))
        assert len(set(scales)) == 1, f"step {seed}: {scales}"
    assert 0 < skipped < 12, skipped
    before = MLP.loss(reference, whole(MLP, 1))
    assert MLP.loss(model, mine(MLP, 1)) < before * 2
