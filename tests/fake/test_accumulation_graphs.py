"""What backward does in the graphs of models that accumulate (world size 4, rank 1)."""

import gc
import re
from functools import cache
from typing import Any

import pytest
import torch
from compiling import BACKENDS, printed_graphs, small
from generated import Program, programs
from models import MODELS
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import MixedPrecision, fully_shard


def test_gradients_are_handed_over_at_once() -> None:
    """Under no_sync a graph passes a unit's gradients to the eager runtime as soon as they are packed."""
    layers = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model = fully_shard(layers, auto_wrap_policy={nn.Linear}, reshard_after_forward=True)
    with model.no_sync(), printed_graphs() as printed:
        torch.compile(model, fullgraph=True)(torch.ones(4, 3)).sum().backward()
    (graph,) = (text for text in printed if text.startswith("--- backward graph after all_gather_into_buffer"))
    events = re.findall(r"= (?:fsdp_flat\.)?(mm|defer_reduce)\(", graph)
    assert events == ["mm", "defer_reduce", "mm", "mm", "defer_reduce"]


@pytest.mark.parametrize("syncs", [True, False])
def test_a_model_that_is_deleted(syncs: bool) -> None:
    """A backward that accumulates, or adds what was accumulated, raises where its model is gone."""
    model: Any = fully_shard(nn.Linear(3, 3))
    for each in (False, syncs):
        model.set_requires_gradient_sync(each)
    loss = torch.compile(model, backend="aot_eager")(torch.ones(4, 3)).sum()
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="the model of this forward was deleted"):
        loss.backward()


class _Repeated(nn.Module):
    """Its blocks run two and three times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks, self.blocks[0]):
            x = block(x).relu()
        return x


@pytest.mark.parametrize("no_sync", [False, True])
def test_a_unit_that_is_called_several_times(no_sync: bool) -> None:
    """It is gathered once in forward and once in backward; its gradients' sums are packed and sent once, then cast."""
    model = fully_shard(_Repeated(), reshard_after_forward=True, mixed_precision=MixedPrecision(torch.bfloat16))
    model.set_requires_gradient_sync(not no_sync)
    with printed_graphs() as printed:
        torch.compile(model, fullgraph=True)(torch.ones(4, 5)).sum().backward()
    forward, backward = (text for text in printed if "after all_gather_into_buffer" in text.split("\n")[0])
    calls = ["= all_gather_into", "pack_grads(", "= all_to_all_single", "fsdp_flat.defer_reduce("]
    assert [forward.count(call) for call in calls] == [2, 0, 0, 0]
    assert [backward.count(call) for call in calls] == [2, 2, 0 if no_sync else 2, 2 if no_sync else 0]


@cache
def _program(backend: str, no_sync: bool) -> Program:
    """Backward of the MLP."""
    torch.manual_seed(0)
    case = MODELS["mlp"]
    model = fully_shard(case.build())
    model.set_requires_gradient_sync(False)
    model.set_requires_gradient_sync(not no_sync)
    compiled = torch.compile(model, fullgraph=True, backend=BACKENDS[backend])
    inputs = case.batch(1, 4)
    return programs(lambda: case.loss(compiled, inputs))[1]


either = pytest.mark.parametrize("backend", [pytest.param("default", marks=pytest.mark.nightly), "backend"])


@either
def test_packs_are_handed_over_without_copies(backend: str) -> None:
    """Gradients are written straight into what is handed over, and generated code never touches it again."""
    program = _program(backend, no_sync=True)
    calls = [step for step in program.steps if step.function == "torch.ops.fsdp_flat.defer_reduce.default"]
    packed = {program.memory(step.names[0]) for step in calls}
    assert len(calls) == len(packed) == 4 and not [step for step in program.steps if step.is_reduce]
    assert any(step.is_gather for step in program.steps)
    assert sum(step.is_product and program.memory(step.out or "") in packed for step in program.steps) == 8
    assert [move for move in program.moves() if program.memory(move.target) in packed] == []
    for step in calls:
        later = program.code.split(step.text, 1)[1].split("return (")[0]
        assert re.findall(rf".*\b{step.names[0]}\b.*", later) == [f"        del {step.names[0]}"]


@either
def test_what_was_kept_is_added_in_place(backend: str) -> None:
    """Each unit has one reduce, of the buffer that gradients are written into and kept ones are added to."""
    program = _program(backend, no_sync=False)
    added = [program.memory(step.names[0]) for step in program.steps if "add_accumulated_" in step.function]
    reduced = [program.memory(step.names[0]) for step in program.steps if step.is_reduce]
    assert len(set(added)) == 4 and added == reduced
    assert len(program.products_into_packs()) == 8 and program.parameter_moves() == []


@pytest.mark.parametrize(
    "options", [{"reshard_after_forward": False}, {"sharding_strategy": ShardingStrategy.NO_SHARD}]
)
def test_a_backward_that_sends_nothing_under_no_sync_is_compiled_with_a_link(options: dict[str, Any]) -> None:
    """Where backward neither gathers nor reduces there is nothing to plan, whatever the link."""
    model = fully_shard(small(), **options)
    run = torch.compile(model, backend="fsdp_compile", options={"link": "custom:2e-5,1e9"})
    with model.no_sync(), printed_graphs() as printed:
        run(torch.ones(4, 3)).sum().backward()
    last = printed[-1]
    assert last.startswith("--- backward") and "defer_reduce" in last and "gather" not in last
