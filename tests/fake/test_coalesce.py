"""What a plan launches together is one call in the graph and in the generated code, where a call can do that."""

import pathlib
from typing import Any

import pytest
import torch
from generated import Program, programs, sent
from torch import nn

from fsdp_compile import MixedPrecision, fully_shard
from fsdp_compile.comm import collectives
from fsdp_compile.passes.graph.analyze import can_coalesce
from fsdp_compile.passes.inductor import fsdp_compile_backend
from fsdp_compile.passes.plan.plan import Plan

FAR = "custom:1e-3,1e9"  # latency is all that counts


@pytest.fixture
def launches_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake group stands for NCCL, not for gloo."""
    monkeypatch.setattr(collectives, "_COPYING_BACKENDS", ("gloo",))
    monkeypatch.setattr(collectives, "_senders", lambda *_: ())


class Chain(nn.Module):
    """Units of one linear layer each."""

    def __init__(self, units: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(units))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return inputs.square().mean()


def compiled(model: nn.Module, **options: object) -> tuple[Program, Program]:
    run = torch.compile(model, backend=fsdp_compile_backend, options=options, fullgraph=True)
    return programs(lambda: run(torch.randn(2, 16)))


def chain() -> nn.Module:
    return fully_shard(Chain(), auto_wrap_policy={nn.Linear})


def sizes(program: Program) -> list[tuple[str, int]]:
    """Each launch: what it is, and of how many units."""
    calls = [step for step in program.steps if step.is_gather or step.is_reduce]
    return [("gather" if each.is_gather else "reduce", len(sent(each))) for each in calls]


def test_gloo_launches_one_by_one(plans: dict[str, Plan]) -> None:
    """Gloo has no call for several: neither does the plan count on one, nor does the graph have it."""
    for program in compiled(chain(), link=FAR):
        assert {units for _, units in sizes(program)} == {1}
    assert all(len(step.units) == 1 for plan in plans.values() for step in plan.steps)


GATHER = (collectives.ALL_GATHER, torch.bfloat16, 4, "0")
REDUCE = (collectives.REDUCE_SCATTER, torch.bfloat16, "sum", 4, "0")
TREE = (collectives.REDUCE_SCATTER, torch.bfloat16, "tree", 4, "0")
ALL_REDUCE = (collectives.ALL_REDUCE, torch.bfloat16, "sum", "0")


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ((), True),
        ((GATHER, GATHER), True),
        ((GATHER, (collectives.ALL_GATHER, torch.float32, 4, "0")), False),
        ((GATHER, (collectives.ALL_GATHER, torch.bfloat16, 4, "1")), False),
        ((REDUCE, REDUCE), True),
        ((REDUCE, (collectives.REDUCE_SCATTER, torch.bfloat16, "avg", 4, "0")), False),
        ((TREE, TREE), False),
        ((ALL_REDUCE, ALL_REDUCE), False),
    ],
)
def test_what_one_call_starts(starts: tuple[tuple[Any, ...], ...], expected: bool) -> None:
    """Starts of one operator, with equal arguments and dtypes; no sums in a tree, and no all-reduces over replicas."""
    graph, nodes = torch.fx.Graph(), list[torch.fx.Node]()
    for target, dtype, *arguments in starts:
        nodes.append(graph.call_function(target, (graph.placeholder("sent"), *arguments)))
        nodes[-1].meta["val"] = torch.empty(4, dtype=dtype, device="meta")
    assert can_coalesce(nodes) == expected


@pytest.mark.nightly
@pytest.mark.usefixtures("launches_several")
def test_units_of_two_dtypes_are_not_launched_together() -> None:
    """Where units differ in what one call has to have in common, the plan launches each by itself."""
    model = Chain()
    for layer in model.layers[::2]:
        fully_shard(layer, mixed_precision=MixedPrecision(torch.bfloat16, cast_forward_inputs=True))
    fully_shard(model, auto_wrap_policy={nn.Linear})
    with torch.autocast("cpu", torch.bfloat16):  # one dtype computes, two are gathered
        forward, backward = compiled(model, link=FAR, disable=("smallest_gather",))
    assert sizes(forward) == [("gather", 1)] * 4
    # The first layer's input has no gradient, and the last layer stays.
    assert sorted(sizes(backward)) == [("gather", 1)] * 2 + [("reduce", 1)] * 4


@pytest.mark.usefixtures("launches_several")
def test_a_plan_by_hand(plans: dict[str, Plan], tmp_path: pathlib.Path) -> None:
    """What a file says to launch together is: four units at once."""
    names = " ".join(f"layers.{number}" for number in range(4))
    compiled(chain())
    forward, backward = plans.values()
    end = max(each.at for each in forward.of("free"))
    together = f"at 0 gather {names}\nat 0 wait {names}\nat {end} free {names}\n"
    path = tmp_path / "plan.txt"
    path.write_text(f"forward:\n{together}backward:\n{backward}")
    torch._dynamo.reset()
    assert sizes(compiled(chain(), plan=str(path))[0]) == [("gather", 4)]
