"""`compile_step(..., update_in_backward=True)`: what is refused, what plans know, and how much memory a step takes."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, mlp
from torch import Tensor, fx, nn
from workloads import blocks, no_prefetch, random_workload

from bench.rules import one_ahead
from fsdp_compile import compile_step, fully_shard
from fsdp_compile.comm.collectives import WAIT
from fsdp_compile.config import CompileConfig
from fsdp_compile.core.ops import UPDATE_SHARD
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.passes.graph.nodes import Tag, set_tag
from fsdp_compile.passes.pipeline import GraphContext
from fsdp_compile.passes.plan.plan import PlanError, verify
from fsdp_compile.passes.plan.schedule import order_of_blocks, search_plan
from fsdp_compile.passes.post_grad.plan_by_cost import updating_in_backward
from fsdp_compile.passes.post_grad.updates import place_updates

pytestmark = pytest.mark.usefixtures("emulated")
INPUTS, TARGET = MODELS["mlp"].batch(0, 8)


def _model(width: int = 16, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(mlp(blocks=layers, width=width, hidden=2 * width))


def _step(optimizer: Callable[..., Any] = torch.optim.AdamW, loss_fn: Any = F.mse_loss, model: Any = None,
          **options: Any) -> Any:  # fmt: skip
    model = model or _model()
    return compile_step(model, optimizer(model.parameters()), loss_fn, update_in_backward=True, **options)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (
            {"clip_norm": 1.0},
            "update_in_backward cannot be combined with clip_norm.* found clip_norm=1.0, accumulate=1",
        ),
        ({"accumulate": 2}, "update_in_backward cannot .* accumulate .* accumulate=2"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "update_in_backward cannot .* scaler, .* scaler=GradScaler"),
        ({"optimizer": torch.optim.Adafactor}, "update_in_backward takes elementwise .*SGD, .* not Adafactor"),
        ({"optimizer": type("Own", (torch.optim.SGD,), {})}, "update_in_backward takes elementwise .* not Own"),
        (
            {"optimizer": lambda params: torch.optim.SGD(params, differentiable=True)},
            "update_in_backward takes elementwise .* not SGD",
        ),
    ],
)
def test_refused(options: dict[str, Any], found: str) -> None:
    """What needs the gradients of all units before an update is refused, and named; units stay as they were."""
    model = _model()
    with pytest.raises(ValueError, match=found):
        _step(model=model, **options)
    assert not any(unit.may_update for unit in units_gathered_below(model))


def test_refused_before_backward() -> None:
    """Several gradients of a unit, and step hooks, are refused before anything is updated."""
    step = _step(backend="aot_eager")
    step.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="update_in_backward: the optimizer has step hooks"):
        step(INPUTS, target=TARGET)

    def twice(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output + step.model(INPUTS), target)

    def beside(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + next(step.model.parameters()).square().sum()

    for loss_fn in (twice, beside):
        step = _step(backend="aot_eager", loss_fn=loss_fn)
        before = [param.detach().to_local().clone() for param in step.model.parameters()]
        with pytest.raises(ValueError, match=r"update_in_backward: the unit of \S+ gets several gradients in a step"):
            step(INPUTS, target=TARGET)
        assert all(map(torch.equal, before, (param.to_local() for param in step.model.parameters())))


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.layer(x).tanh())
        return output


def test_a_graph_that_calls_a_unit_twice() -> None:
    """Within a graph, where autograd shows one gradient of a unit, a second call of the unit is refused by its name."""
    model = _Twice()
    fully_shard(model.layer)
    fully_shard(model)
    step = compile_step(model, torch.optim.AdamW(model.parameters()), F.mse_loss, update_in_backward=True)
    with pytest.raises(Exception, match="unit layer is called several times in a forward"):
        for _ in range(2):
            step(torch.ones(2, 8), target=torch.ones(2, 8))


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_plans_wait_for_reduces_in_time() -> None:
    """Every rule and every search waits for a unit's reduce when the last gradient of a further unit is there."""
    for seed in range(20):
        step = random_workload(random.Random(seed), 5, may_keep=False)
        workload = updating_in_backward(step, [unit.name for unit in step.units])
        plans = [no_prefetch(workload), order_of_blocks(workload), one_ahead(workload)]
        for plan in (*plans, search_plan(workload).plan):
            verify(workload, plan)
    updated = updating_in_backward(blocks(3), ["blocks.2", "blocks.1", "root"])  # with gradients from tasks 6, 7 and 9
    assert {unit: at for at, task in enumerate(updated.tasks) for unit in task.reduced} == {3: 8, 2: 9}
    with pytest.raises(PlanError, match="which needs the gradients"):
        verify(updated, one_ahead(blocks(3)))


def test_no_update_before_the_last_gather() -> None:
    """An update that autograd has put before an all-gather of the same unit goes behind its wait, not behind others."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    nodes = []
    for kind, unit in (("update", 0), ("update", 1), ("wait", 0), ("wait", 2)):
        nodes.append(graph.call_function(UPDATE_SHARD if kind == "update" else WAIT, (given, given)))
        set_tag(nodes[-1], Tag(kind, unit, "", True))
    graph.output(tuple(nodes))
    place_updates(GraphContext(graph, CompileConfig(), "backward", 0))
    first, second, wait, other = nodes
    assert [node for node in graph.nodes if node in nodes] == [second, wait, first, other]
