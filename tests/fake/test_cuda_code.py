"""The code that Inductor generates for CUDA, read without a GPU: the plan's order, no copies, one buffer for a unit."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from cuda_code import as_for_cuda
from generated import Program, launches, programs, sent
from models import WIDTH, Stack, mlp, squared_error
from torch import Tensor, nn

from bench.emulated import noted
from fsdp_compile import fully_shard
from fsdp_compile.passes.inductor import fsdp_compile_backend
from fsdp_compile.passes.plan.plan import Plan

OPTIONS = {
    "rule": {},
    "no packs": {"disable": ("pack_in_place",)},
    "slow": {"link": "custom:1e-6,1e6", "device": "h100"},  # bytes count
    "far": {"link": "custom:1e-2,1e12", "device": "h100"},  # launches count
}


class Attention(nn.Module):
    """A block whose queries, keys and values have a matrix each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


BUILD = {
    "mlp": lambda: (mlp(blocks=5), (8, 7)),
    "attention": lambda: (Stack([Attention() for _ in range(4)], width=WIDTH), (4, 9, 7)),
}


NAMES = [name if name != "attention" else pytest.param(name, marks=pytest.mark.nightly) for name in BUILD]


@cache
def compiled(name: str, option: str) -> tuple[list[Plan], tuple[Program, Program]]:
    """The plans and the programs of forward and backward."""
    torch.manual_seed(0)
    model, shape = BUILD[name]()
    run = torch.compile(fully_shard(model), fullgraph=True, backend=fsdp_compile_backend, options=OPTIONS[option])
    inputs = (torch.rand(shape), torch.rand(*shape[:-1], 5))
    with noted() as graphs, as_for_cuda():
        both = programs(lambda: squared_error(run, inputs))
    return [plan for _, plan in graphs.values()], both


@pytest.mark.parametrize(
    "option", ["rule", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("slow", "far"))]
)
@pytest.mark.parametrize("name", NAMES)
def test_generated_code_follows_the_plan(name: str, option: str) -> None:
    """Collectives and waits stand in the plan's order; what it launches together is one call."""
    plans, both = compiled(name, option)
    for plan, program in zip(plans, both, strict=True):
        assert "triton" in program.code and "cpp_fused" not in program.code
        assert launches(program) == [step.kind for step in plan.steps if step.kind != "free" for _ in step.units]
        calls = [len(sent(step)) for step in program.steps if step.is_gather or step.is_reduce]
        assert calls == [len(step.units) for step in plan.of("gather", "reduce")]
    together = any(len(step.units) > 1 for plan in plans for step in plan.steps)
    assert together == any("coalesced" in program.code for program in both)
    if option != "slow":  # where launches cost nothing, either order may be the shorter one
        assert together == (option == "far")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_moves_parameters_or_gradients(name: str) -> None:
    """No Triton kernel and no call stores bytes of a parameter or gradient that it did not make."""
    _, (forward, backward) = compiled(name, "rule")
    assert forward.gathered() and backward.gathered() and backward.packed()
    assert forward.parameter_moves() == backward.parameter_moves() == []


@pytest.mark.nightly
def test_the_count_sees_copies() -> None:
    """Without the pass that makes gradients placeable Triton kernels copy them, and the count says so."""
    _, (_, backward) = compiled("mlp", "no packs")
    assert backward.parameter_moves()


@pytest.mark.parametrize("name", NAMES)
def test_products_write_gradients_in_place(name: str) -> None:
    """As many products write into a slice of a pack as there are linear layers."""
    _, (_, backward) = compiled(name, "rule")
    layers = sum(isinstance(each, nn.Linear) for each in BUILD[name]()[0].modules())
    assert len(backward.products_into_packs()) == layers


@pytest.mark.parametrize("option", ["rule", "slow"])
@pytest.mark.parametrize("name", NAMES)
def test_no_kernel_ties_units_together(name: str, option: str) -> None:
    """Horizontal fusion does not put gradients of two units into one kernel."""
    assert compiled(name, option)[1][1].shared_kernels() == []
