"""Whatever steps the parameters, and however often a model changes between eager and compiled: the same numbers."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import MODELS, Case, Residual, Stack, squared_error, vectors
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fsdp_compile import fully_shard

from ..ranks import on_ranks
from ..training import assert_bitwise, build, executor, follow, mine, shard

MLP = MODELS["mlp"]
Step = Callable[[Any], None]  # of an optimizer, given what runs the model
Recipe = Callable[[Any], Step]  # made for a sharded model


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, **options)


def _foreach(model: Any) -> Step:
    optimizer = _adamw(model, foreach=True)
    return lambda loss: (optimizer.zero_grad(), loss().backward(), optimizer.step())


def _fused(model: Any) -> Step:
    optimizer = _adamw(model, fused=True)
    return lambda loss: (optimizer.zero_grad(), loss().backward(), optimizer.step())


def _compiled_step(model: Any) -> Step:
    optimizer = _adamw(model, foreach=True)
    step = torch.compile(optimizer.step, backend="aot_eager")
    return lambda loss: (optimizer.zero_grad(), loss().backward(), step())


def _clipped_with_schedule(model: Any) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)

    def step(loss: Any) -> None:
        optimizer.zero_grad()
        loss().backward()
        model.clip_grad_norm_(0.05)
        optimizer.step()
        schedule.step()

    return step


def _scaled(model: Any) -> Step:
    optimizer, scaler = _adamw(model), ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(loss: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def _inside_backward(model: Any) -> Step:
    optimizers = {param: torch.optim.SGD([param], lr=0.05) for param in model.parameters()}

    def step_one(param: Tensor) -> None:
        optimizers[param].step()
        param.grad = None

    handles = [param.register_post_accumulate_grad_hook(step_one) for param in model.parameters()]

    def step(loss: Any) -> None:
        model.zero_grad()
        loss().backward()

    step.handles = handles  # type: ignore[attr-defined]  # a function that carries them
    return step


RECIPES: tuple[Recipe, ...] = (_foreach, _fused, _compiled_step, _clipped_with_schedule, _scaled, _inside_backward)


@pytest.mark.nightly
@on_ranks(2)
def test_optimizers() -> None:
    """Under every kind of optimizer a compiled model trains as an eager one, bit for bit, across `torch._dynamo.reset`:
    foreach, fused, compiled, clipped under a schedule, with loss scaling, inside backward."""
    eager, model = shard(MLP), shard(MLP)
    run, seeds = executor(model, "aot_eager"), itertools.count()
    for recipe in RECIPES:
        steps = recipe(eager), recipe(model)
        for number in range(3):
            batch = mine(MLP, next(seeds))
            steps[0](lambda batch=batch: MLP.loss(eager, batch))
            steps[1](lambda batch=batch: MLP.loss(run, batch))
            assert_bitwise(model, eager, f"{recipe.__name__}, step {number}")
        for step in steps:
            for handle in getattr(step, "handles", ()):
                handle.remove()
        if recipe is _compiled_step:
            torch._dynamo.reset()  # in mid-training


class _Unseen(nn.Linear):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class _UnseenBlock(Residual):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def _with_breaks() -> Stack:
    stack = Stack([Residual(11, 23), _UnseenBlock(11, 23), Residual(11, 23)])
    stack.blocks[2].down = _Unseen(23, 11)
    return stack


@pytest.mark.nightly  # by day test_forward_set_on_a_block_breaks_the_graph of test_stock_code.py
@on_ranks(2)
def test_graph_breaks() -> None:
    """A unit, or a module inside a unit, that Dynamo may not see breaks the graph and changes no number."""
    case = Case(_with_breaks, vectors, squared_error)
    reference = build(case)
    model = fully_shard(build(case), auto_wrap_policy={Residual, _UnseenBlock})
    run = torch.compile(model, backend="aot_eager")
    for _ in range(2):  # a class that breaks in one place only is given up for all its modules, after the first step
        follow(run, reference, case, steps=1)
    follow(run, reference, case)
    follow(model, reference, case)
