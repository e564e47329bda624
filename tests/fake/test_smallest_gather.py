"""What follows from a parameter alone is gathered only where it does, and generated code reads it where it lies."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import RANK, WORLD_SIZE
from cuda_code import as_for_cuda
from generated import Program, programs, sent
from joint import JointPasses
from torch import Tensor, nn
from weights import UNMOVED, Block, D, Float8Block, Float8RowsBlock, Microscaled, OfTwo, OneWeight, ScaledBlock

from fsdp_compile import fully_shard
from fsdp_compile.core.layout import lay_out
from fsdp_compile.passes.inductor import fsdp_compile_backend


def trained(*make: Callable[[], nn.Module], disable: tuple[str, ...] = (), **options: Any) -> JointPasses:
    """What the passes make of modules, each a unit."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(each() for each in make))
    fully_shard(model, auto_wrap_policy=set(map(type, model)), **options)
    backend = JointPasses(disable)
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(4, D)).square().mean().backward()
    return backend


LOW = partial(OneWeight, lambda weight: weight.bfloat16().float())


def test_what_does_not_follow_from_a_parameter_alone() -> None:
    """Sums, chance, buffers, two parameters, views of a segment, or more bytes: the graph is that without the pass. So
    it is where a format sends the unit."""
    assert trained(*UNMOVED).texts == trained(*UNMOVED, disable=("smallest_gather",)).texts
    assert trained(LOW, wire="fp8").texts == trained(LOW, wire="fp8", disable=("smallest_gather",)).texts


def test_stages() -> None:
    """Both stages gather what is computed on the shard; backward the last one, as the result of the first is kept."""
    found = trained(LOW, LOW, reshard_after_forward=WORLD_SIZE // 2)  # the second one stays unsharded
    half, whole = D * D, 2 * D * D
    assert [each[2] for each in found.forward] == [half, whole] * 2
    assert [each[2] for each in found.backward if each[0] == "all_gather"] == [whole]


def test_of_equal_choices_the_earlier() -> None:
    """Casts of two weights are one gather: what follows from one of them, in as many bytes, is computed behind it."""
    both = partial(OfTwo, lambda one, other: (one.bfloat16() + -other.bfloat16()).float())
    assert trained(both).forward == [("all_gather", torch.bfloat16, 2 * 2 * D * D)]


@pytest.mark.parametrize(("shape", "begins"), [((6, 10), 2), ((4, 8), 0), ((2, 24), 16)])
def test_scales_of_blocks_that_ranks_share(shape: tuple[int, int], begins: int) -> None:
    """Each stored element gets the value of its block, also where a shard begins within one; padding gets ones. The
    maximum of each block is that of its elements here."""
    layout, (rows, block) = lay_out([("weight", shape), ("bias", (5,))], WORLD_SIZE), shape
    values = torch.arange(1.0, rows + 1)
    found = torch.ops.fsdp_flat.expand_scales(values, layout.text, ["0"], [rows, 0])
    expected, record = torch.ones(layout.shard_numel), layout.record(0, RANK)
    assert record is not None and record.first % block == begins
    of_elements = values.repeat_interleave(block)[record.first : record.last + 1]
    expected[record.offset : record.offset + record.numel] = of_elements
    assert torch.equal(found, expected)
    maxima, _ = torch.ops.fsdp_flat.segment_maxima(found, layout.text, ["0"], [0], [rows], False)
    assert torch.equal(maxima, values.where(torch.isin(values, of_elements), -torch.inf))


def test_scales_of_rows_and_of_a_matrix_share_a_reduction() -> None:
    """One all-reduce has maxima of rows, of blocks of 16 and of whole matrices, of three units; all gather float8."""
    nbytes = (8 * 4 * D, 6 * D * D + 6 * D, D * D, D * D, 8 * 4 * D, 6 * D * D + 6 * D)
    gathers = [("all_gather", torch.uint8, each) for each in nbytes]
    forward = trained(Float8RowsBlock, Microscaled, Float8Block).forward
    assert forward == [("all_reduce", torch.float32, 8 * (4 * D + D * D // 16 + 2)), *gathers]


class Scheduled(OneWeight):
    """Scaled by a number that changes from step to step, and by what follows from a constant; computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def compute(self, weight: Tensor) -> Tensor:
        scaled = [(weight * self.scale * torch.full((), 2.0).sqrt()).bfloat16() for _ in range(2)]
        return torch.stack(scaled).sum(0).float()


def test_a_number_that_changes() -> None:
    """A Python number that Dynamo has made an input stays one: no graph has its value of the first step."""
    model = Scheduled()
    fully_shard(model)
    backend = JointPasses()
    run = torch.compile(model, backend=backend, fullgraph=True)
    for scale in (0.5, 0.75, 1.25):
        model.scale = scale
        run(torch.randn(4, D)).square().mean().backward()
    assert [each[1] for each in backend.forward] == [torch.bfloat16, torch.float32]


class ReturnsWeight(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = self.weight.bfloat16()
        return x @ low.float() * self.bias.detach().amax(), low  # nothing else is used of the bias


def test_what_is_returned_is_a_copy() -> None:
    """A cast of a weight that a forward returns has memory of its own, as it has in an eager step."""
    model, backend = fully_shard(ReturnsWeight(D, D)), JointPasses()
    result, low = torch.compile(model, backend=backend, fullgraph=True)(torch.randn(4, D))
    assert [each[:2] for each in backend.forward] == [("all_reduce", torch.float32), ("all_gather", torch.bfloat16)]
    assert low.untyped_storage().nbytes() == low.nbytes and low._base is None
    (result.sum() + low.float().sum()).backward()


# --- generated code ---------------------------------------------------------------------------------------------------


def code_for_cuda(*make: Callable[[], nn.Module], autocast: bool = False) -> tuple[Program, Program]:
    """The programs of forward and backward of blocks, each a unit, as for CUDA."""
    torch.manual_seed(0)
    model = nn.Sequential(*(each() for each in make))
    fully_shard(model, auto_wrap_policy=set(map(type, model)))
    run = torch.compile(model, fullgraph=True, backend=fsdp_compile_backend)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return run(torch.randn(16, D)).float().square().mean()

    with as_for_cuda():
        return programs(loss)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        pytest.param(Block, "bfloat16", marks=pytest.mark.nightly),
        pytest.param(Float8Block, "uint8", marks=pytest.mark.nightly),
        (ScaledBlock, "uint8"),
    ],
)
def test_products_read_what_was_gathered(make: type[nn.Module], dtype: str) -> None:
    """One launch gathers a unit; products and kernels read views of its buffer, and nothing only moves parameters."""
    forward, backward = code_for_cuda(make, make, autocast=make is Block)
    for program in (forward, backward):
        assert program.parameter_moves() == []
        gathers = re.findall(r"gather [^,]*, [\d +]+ bytes of (\w+), group 0, computed from the shard by", program.code)
        assert set(gathers) == {dtype}
    assert [len(sent(step)) for step in forward.steps if step.is_gather] == [2, 2]
    maxima = [sum("all_reduce" in step.function for step in program.steps) for program in (forward, backward)]
    assert maxima == [int(make is not Block), 0]
    if make is not Float8Block:  # which multiplies in float32
        products = [step for step in forward.steps if step.is_product]
        assert make is Block or all("_scaled_mm" in step.function for step in products)
        read = {name for step in products for name in map(forward.viewed, step.names)}
        # torch 2.14 leaves the addition of a bias, which is gathered beside the weights, in a product of autocast
        assert len(products) == 4 and len(read & forward.gathered()) in ((2, 4) if make is Block else (2,))


def test_maxima_hide_behind_gathers() -> None:
    """Maxima are reduced first, and waited for behind the gathers that do not need them."""
    forward, _ = code_for_cuda(OneWeight, Float8Block)
    (reduce,) = [step for step in forward.steps if "all_reduce" in step.function]
    steps = [step for step in forward.steps if step is reduce or step.is_gather or step.is_wait]
    waits_for = {name for step in steps[1:3] if step.is_wait for name in step.names}
    assert steps[0] is reduce and steps[1].is_gather and steps[2].is_wait and waits_for == set(reduce.names)
