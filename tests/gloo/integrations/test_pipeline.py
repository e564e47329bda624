"""Stages of `torch.distributed.pipelining` that are sharded over the ranks beside them train as one process does."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard

from ..ranks import Ranks, on_ranks
from ..wire import wire

MICROBATCHES = 4
ONE_STAGE = (ScheduleGPipe, Schedule1F1B)  # on each rank; other schedules have two
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
SPLIT = (ScheduleInterleavedZeroBubble, *V_SHAPED)  # backwards of inputs come before those of parameters
SCHEDULES = (*ONE_STAGE, ScheduleLoopedBFS, ScheduleInterleaved1F1B, *SPLIT)


class Block(nn.Module):
    """What reads the parameters is not what makes the output, so that the backward of parameters begins inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.hidden: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.up(x))
        self.hidden = [h]
        return x + torch.tanh(self.down(h))


def _stages(count: int, blocks: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(*[Block() for _ in range(blocks)]) for _ in range(count)]


def _train(rank: int, kind: Any, blocks: int, reshards: bool) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, part = mesh.get_coordinate() or (0, 0)
    count = 2 if kind in ONE_STAGE else 4
    plain, mine = _stages(count, blocks), _stages(count, blocks)
    chosen = [place] if kind in ONE_STAGE else [place, 3 - place if kind in V_SHAPED else place + 2]
    stages = []
    for number in chosen:
        for block in mine[number]:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshards)
        fully_shard(mine[number], mesh=mesh["dp"])
        stages.append(PipelineStage(mine[number], number, count, torch.device("cpu"), group=mesh.get_group("pp")))
    schedule = kind(stages[0] if kind in ONE_STAGE else stages, MICROBATCHES, loss_fn=F.mse_loss)
    named = [(i, name, param) for i in chosen for name, param in mine[i].named_parameters()]
    optimizer = torch.optim.AdamW([param for *_, param in named], lr=0.01)
    reference = torch.optim.AdamW(nn.ModuleList(plain).parameters(), lr=0.01)
    for step in range(2):
        x, target = torch.randn(2, 16, 6, generator=seeded(step)).unbind()
        optimizer.zero_grad()
        reference.zero_grad()
        given: list[Tensor] = [x[8 * part : 8 * part + 8]] if 0 in chosen else []
        last = {"target": target[8 * part : 8 * part + 8], "losses": []} if count - 1 in chosen else {}
        with wire() as sent:
            schedule.step(*given, **last)
        F.mse_loss(nn.Sequential(*plain)(x), target).backward()
        for i, name, param in named:
            assert param.grad is not None
            torch.testing.assert_close(param.grad.full_tensor(), plain[i].get_parameter(name).grad)
        optimizer.step()
        reference.step()
    for i, name, param in named:
        torch.testing.assert_close(param.full_tensor(), plain[i].get_parameter(name))
    return sum(each.kind == "reduce" for each in sent)


DAILY = [(Schedule1F1B, 2, True), (ScheduleZBVZeroBubble, 2, False), (ScheduleDualPipeV, 3, True)]
NIGHTLY = [(kind, blocks, reshards) for kind in SCHEDULES for blocks in (1, 2, 3) for reshards in (True, False)]


@pytest.mark.parametrize(
    ("kind", "blocks", "reshards"),
    [*DAILY, *[pytest.param(*row, marks=pytest.mark.nightly) for row in NIGHTLY if row not in DAILY]],
)
def test_schedules(four: Ranks, kind: Any, blocks: int, reshards: bool) -> None:
    """Gradients and parameters are those of one process, also where a schedule splits backward into two parts. A stage
    reduces once a step, where backward is not split."""
    units = blocks * (1 if kind in ONE_STAGE else 2)  # of each rank
    for reduces in four.run(_train, kind, blocks, reshards):
        assert units < reduces <= MICROBATCHES * units if kind in SPLIT else reduces == units


# --- what split backwards do, without a pipeline ----------------------------------------------------------------------


class Checkpointed(Block):
    """Computed again in each part of backward."""

    def forward(self, x: Tensor) -> Tensor:
        """As of `Block`."""
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class Scaled(Block):
    """Computes with a parameter before it reads the result."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        """Of another weight."""
        return x + torch.tanh(F.linear(x, self.up.weight * self.scale.exp()) @ self.down.weight.t())


def _tied() -> list[Block]:
    blocks = [Block(), Block()]
    blocks[1].up.weight = blocks[0].up.weight
    return blocks


def _partly_frozen() -> list[Block]:
    blocks = [Block(), Block()]
    blocks[0].up.requires_grad_(False)
    blocks[1].down.requires_grad_(False)
    return blocks


def _frozen_between() -> list[Block]:
    blocks = [Block(), Block(), Block()]
    blocks[1].requires_grad_(False)
    return blocks


def _split(model: nn.Sequential, xs: list[Tensor]) -> None:
    groups = []
    for x in xs:
        loss = model(x).square().mean()
        groups.append(stage_backward_input([loss], None, [x], model.parameters())[1])
    for each in groups:
        stage_backward_weight(model.parameters(), each)


def _inputs_first(model: nn.Sequential, xs: list[Tensor]) -> None:
    for x in xs:
        loss = model(x).square().mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()


def _from_inside(model: nn.Sequential, xs: list[Tensor]) -> None:
    for x in xs:
        loss, (hidden,) = model(x).square().mean(), model[1].hidden
        grad, _ = torch.autograd.grad(loss, (hidden, x), retain_graph=True)
        torch.autograd.backward(hidden, grad)


def _added(model: Any, xs: list[Tensor]) -> None:
    """As pipelines that mix split backwards and others, and come to parameters in the order of a set."""
    model.set_requires_gradient_sync(False)
    for block in model:
        block.set_gradient_divide_factor(4.0)  # of two ranks
    model(xs[0]).square().mean().backward()
    params = list(model.parameters())
    grads = torch.autograd.grad(model(xs[1]).square().mean(), params)
    pairs = list(zip(params, grads, strict=True))
    for param, grad in reversed(pairs) if dist.get_rank() else pairs:
        param.grad += grad
    model.set_requires_gradient_sync(True)
    torch.distributed.fsdp.fully_shard.state(model)._root_post_backward_final_callback()  # type: ignore[attr-defined]
    for param in params:
        param.grad *= 2


MODELS: dict[str, Callable[[], list[Block]]] = {
    "plain": lambda: [Block(), Block(), Block()],
    "checkpointed": lambda: [Checkpointed(), Checkpointed()],
    "scaled": lambda: [Scaled(), Scaled()],
    "tied": _tied,
    "partly_frozen": _partly_frozen,
    "frozen_between": _frozen_between,
    "compiled": lambda: [Block(), Block()],
}
WAYS = {"split": _split, "inputs_first": _inputs_first, "from_inside": _from_inside, "added": _added}
ROWS = [("split", name) for name in MODELS] + [(way, "plain") for way in WAYS if way != "split"]


def _expected(model: nn.Module, xs: list[Tensor], way: str) -> Iterator[Tensor | None]:
    for x in xs:
        loss = model(x).square().mean()
        if way == "from_inside":
            (hidden,) = model[1].hidden
            torch.autograd.backward(hidden, torch.autograd.grad(loss, hidden, retain_graph=True)[0])
        else:
            loss.backward()
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        yield param.grad


@pytest.mark.parametrize(("way", "name"), ROWS, ids=map("-".join, ROWS))
@on_ranks(2)
def test_backward_in_parts(rank: int, way: str, name: str) -> None:
    """A backward pass that leaves out parameters may be followed by one that begins inside a unit."""
    for reshards in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*MODELS[name]())
        xs = list(torch.randn(2, 4, 6, generator=seeded(rank)).requires_grad_().unbind())
        expected = list(_expected(copy.deepcopy(model), xs, way))
        for block in model:
            fully_shard(block, reshard_after_forward=reshards)
            if name == "compiled":
                block.compile(backend="aot_eager")
        fully_shard(model)
        WAYS[way](model, xs)
        for param, grad in zip(model.parameters(), expected, strict=True):
            assert (param.grad is None) == (grad is None)
            if param.grad is not None:
                torch.testing.assert_close(param.grad.full_tensor(), grad)
        for block in model:
            block.hidden = []
        assert not any(unit.awaiting_backward for unit in model._fsdp.units_below)
