"""The code that Inductor generates for CUDA, read without a GPU: the plan's order, no copies, no races."""

import re
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from cuda_code import as_for_cuda
from features import HYBRID
from generated import Program, launches, programs, sent
from models import mlp, squared_error
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from bench.emulated import noted
from fsdp_compile import fully_shard
from fsdp_compile.passes.inductor import fsdp_compile_backend
from fsdp_compile.passes.plan.plan import Plan

OPTIONS = {
    "rule": {},
    "slow": {"link": "custom:1e-6,1e6", "device": "h100"},  # bytes count
    "far": {"link": "custom:1e-2,1e12", "device": "h100"},  # launches count
}
BLOCKS = 3


@cache
def compiled(option: str) -> tuple[list[Plan], tuple[Program, Program]]:
    """The plans and the programs of forward and backward of a perceptron."""
    torch.manual_seed(0)
    run = torch.compile(fully_shard(mlp(BLOCKS)), fullgraph=True, backend=fsdp_compile_backend, options=OPTIONS[option])
    with noted() as graphs, as_for_cuda():
        both = programs(lambda: squared_error(run, (torch.rand(8, 7), torch.rand(8, 5))))
    return [plan for _, plan in graphs.values()], both


@pytest.mark.parametrize("option", OPTIONS)
def test_generated_code(option: str) -> None:
    """Collectives and waits stand in the plan's order; what it launches together is one call. No Triton kernel and no
    call moves bytes of a parameter or gradient: products write into a slice of a pack. No kernel ties units together.
    """
    plans, (forward, backward) = compiled(option)
    for plan, program in zip(plans, (forward, backward), strict=True):
        assert "triton" in program.code and "cpp_fused" not in program.code
        assert launches(program) == [step.kind for step in plan.steps if step.kind != "free" for _ in step.units]
        calls = [len(sent(step)) for step in program.steps if step.is_gather or step.is_reduce]
        assert calls == [len(step.units) for step in plan.of("gather", "reduce")]
        assert program.gathered() and program.parameter_moves() == []
    together = any(len(step.units) > 1 for plan in plans for step in plan.steps)
    assert together == any("coalesced" in program.code for program in (forward, backward))
    if option != "slow":  # where launches cost nothing, either order may be the shorter one
        assert together == (option == "far")
    layers = sum(isinstance(each, nn.Linear) for each in mlp(BLOCKS).modules())
    assert backward.packed() and len(backward.products_into_packs()) == layers
    assert option == "far" or backward.shared_kernels() == []


HYBRID_SHARD = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, **HYBRID}
LOW = {"mixed_precision": MixedPrecision(torch.bfloat16)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(pytest.param(options, marks=pytest.mark.nightly) for options in (
            HYBRID_SHARD, LOW | HYBRID_SHARD, {"reshard_after_forward": False}, {"reshard_after_forward": 2})),
    ],
    ids=str,
)  # fmt: skip
def test_memory_in_flight(options: dict[str, Any]) -> None:
    """Nothing else uses memory of a collective, with and without reduces: `programs` looks at all code."""
    torch.manual_seed(0)
    model = fully_shard(mlp(blocks=2), **options)
    run: Any = torch.compile(model, fullgraph=True)
    for syncs in (False, True):
        with nullcontext() if syncs else model.no_sync(), as_for_cuda():
            _, backward = programs(lambda: squared_error(run, (torch.rand(8, 7), torch.rand(8, 5))))
        assert any(step.is_reduce for step in backward.steps) == syncs


LINES = {"wait": r"collectives\.wait\(", "reduce": r" = .*reduce_scatter", "waited": r" torch.*\.wait_tensor\.",
         "kernel": r"extern_kernels\.|\.run\("}  # fmt: skip


def test_races_are_found() -> None:
    """A wait that is late or missing, a gradient that is computed when it is sent, and memory that is freed then."""
    code = compiled("rule")[1][1].code.splitlines()
    at = {name: [i for i, line in enumerate(code) if re.search(each, line)] for name, each in LINES.items()}
    waits, launched = at["wait"][-1], at["reduce"][0]
    after = next(i for i in at["kernel"] if i > waits)
    before = max(i for i in at["kernel"] if i < launched)
    freed = re.sub(r".*default\((\w+).*", r"del \1", code[launched])
    for line, place in ((waits, after), (at["waited"][0], at["reduce"][2]), (before, launched)):
        moved = [*code]
        moved.insert(place, moved.pop(line))
        assert Program("\n".join(moved)).races()
    for lines in ([*code[: launched + 1], freed, *code[launched + 1 :]], code[: at["waited"][-1]]):
        assert Program("\n".join(lines)).races()
