"""What backward does in the graphs of models that accumulate, pinned (world size 4, rank 1).

Regenerate with EXPECTTEST_ACCEPT=1.
"""

import re
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from compiling import BACKENDS, printed_graphs, small
from expecttest import assert_expected_inline
from generated import Program, kernels_not_built, programs
from models import MODELS
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard


def _backward(no_sync: bool, layers: nn.Module | None = None) -> str:
    """The last backward graph before order is pinned, under no_sync or after it."""
    model = fully_shard(layers or small(), auto_wrap_policy={nn.Linear}, reshard_after_forward=True)
    with model.no_sync():
        pass
    with (
        model.no_sync() if no_sync else nullcontext(),
        printed_graphs() as printed,
        torch._inductor.config.patch(force_disable_caches=True),
        kernels_not_built(),
    ):
        loss = torch.compile(model, fullgraph=True)(torch.ones(4, 3)).sum()
        loss.backward()
    return next(
        text.split("\n", 1)[1] for text in reversed(printed) if "after all_gather_into_buffer" in text.split("\n")[0]
    )


def test_no_sync() -> None:
    """Under no_sync a unit's gradients are packed and handed over; nothing is reduced."""
    assert_expected_inline(
        _backward(no_sync=True),
        """\
primals_1: f32[16]
primals_2: i64[]
primals_4: f32[4, 3]
primals_5: f32[16]
primals_6: i64[]
relu: f32[4, 5]
tangents_1: f32[4, 2]
full_2: f32[64] = empty.memory_format([64], dtype=torch.float32, device=cpu, pin_memory=False)
gather_2: f32[64] = all_gather_into_tensor_out(primals_5, 4, '0', out=full_2)  # gather 2, MUST_RECOMPUTE
wait_2: f32[64] = fsdp_flat.wait_collective(gather_2, primals_5)  # wait 2, MUST_RECOMPUTE
view_7: f32[10] = slice.Tensor(wait_2, 0, 0, 10)  # view 2, MUST_RECOMPUTE
view_1: f32[2, 5] = reshape(view_7, [2, 5])  # MUST_RECOMPUTE
permute_1: f32[5, 2] = permute(view_1, [1, 0])  # MUST_RECOMPUTE
permute_2: f32[2, 5] = permute(permute_1, [1, 0])  # MUST_RECOMPUTE
mm: f32[4, 5] = mm(tangents_1, permute_2)
permute_3: f32[2, 4] = permute(tangents_1, [1, 0])
mm_1: f32[2, 5] = mm(permute_3, relu)
sum_1: f32[1, 2] = sum.dim_IntList(tangents_1, [0], True)
pack_2: f32[64] = fsdp_flat.pack_grads([mm_1, sum_1], '2x5@0,2@16|64/4%16')  # pack 2
defer_reduce_2: f32[] = fsdp_flat.defer_reduce(pack_2, primals_6, '2x5@0,2@16|64/4%16', True)  # defer_reduce 2
le: torch.bool[4, 5] = le.Scalar(relu, 0)
full_default_2: f32[] = full([], 0.0, dtype=torch.float32, layout=torch.strided, device=cpu, pin_memory=False)
where: f32[4, 5] = where.self(le, full_default_2, mm)
permute_6: f32[5, 4] = permute(where, [1, 0])
mm_2: f32[5, 3] = mm(permute_6, primals_4)
sum_2: f32[1, 5] = sum.dim_IntList(where, [0], True)
pack_0: f32[64] = fsdp_flat.pack_grads([mm_2, sum_2], '5x3@0,5@16|64/4%16')  # pack 0
defer_reduce_0: f32[] = fsdp_flat.defer_reduce(pack_0, primals_2, '5x3@0,5@16|64/4%16', True)  # defer_reduce 0
return [None, None, defer_reduce_0, None, None, None, defer_reduce_2]""",
    )


def test_gradients_are_handed_over_at_once() -> None:
    """Under no_sync a graph passes a unit's gradients to the eager runtime as soon as they are packed."""
    layers = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    events = re.findall(r"= (?:fsdp_flat\.)?(mm|defer_reduce)\(", _backward(no_sync=True, layers=layers))
    assert events == ["mm", "defer_reduce", "mm", "mm", "defer_reduce"]


def test_after_no_sync() -> None:
    """A graph that reduces after it adds what was kept to each pack, and reduces each once."""
    assert_expected_inline(
        _backward(no_sync=False),
        """\
primals_1: f32[16]
primals_2: i64[]
primals_3: f32[4, 3]
primals_4: f32[16]
primals_5: i64[]
relu: f32[4, 5]
tangents_1: f32[4, 2]
full_2: f32[64] = empty.memory_format([64], dtype=torch.float32, device=cpu, pin_memory=False)
gather_2: f32[64] = all_gather_into_tensor_out(primals_4, 4, '0', out=full_2)  # gather 2, MUST_RECOMPUTE
wait_2: f32[64] = fsdp_flat.wait_collective(gather_2, primals_4)  # wait 2, MUST_RECOMPUTE
view_7: f32[10] = slice.Tensor(wait_2, 0, 0, 10)  # view 2, MUST_RECOMPUTE
view_1: f32[2, 5] = reshape(view_7, [2, 5])  # MUST_RECOMPUTE
permute_1: f32[5, 2] = permute(view_1, [1, 0])  # MUST_RECOMPUTE
permute_2: f32[2, 5] = permute(permute_1, [1, 0])  # MUST_RECOMPUTE
mm: f32[4, 5] = mm(tangents_1, permute_2)
permute_3: f32[2, 4] = permute(tangents_1, [1, 0])
mm_1: f32[2, 5] = mm(permute_3, relu)
sum_1: f32[1, 2] = sum.dim_IntList(tangents_1, [0], True)
pack_2: f32[64] = fsdp_flat.pack_grads([mm_1, sum_1], '2x5@0,2@16|64/4%16')  # pack 2
add_accumulated_2: f32[64] = fsdp_flat.add_accumulated(pack_2, primals_5, True)  # add_accumulated 2
reduce_2: f32[64] = all_to_all_single(add_accumulated_2, [16, 16, 16, 16], [16, 16, 16, 16], '0')  # reduce 2, MUST_SAVE
le: torch.bool[4, 5] = le.Scalar(relu, 0)
full_default_2: f32[] = full([], 0.0, dtype=torch.float32, layout=torch.strided, device=cpu, pin_memory=False)
where: f32[4, 5] = where.self(le, full_default_2, mm)
permute_6: f32[5, 4] = permute(where, [1, 0])
mm_2: f32[5, 3] = mm(permute_6, primals_3)
sum_2: f32[1, 5] = sum.dim_IntList(where, [0], True)
pack_0: f32[64] = fsdp_flat.pack_grads([mm_2, sum_2], '5x3@0,5@16|64/4%16')  # pack 0
add_accumulated_0: f32[64] = fsdp_flat.add_accumulated(pack_0, primals_2, True)  # add_accumulated 0
reduce_0: f32[64] = all_to_all_single(add_accumulated_0, [16, 16, 16, 16], [16, 16, 16, 16], '0')  # reduce 0, MUST_SAVE
wait_reduce_2: f32[64] = fsdp_flat.wait_collective(reduce_2, add_accumulated_2)  # wait_reduce 2, MUST_SAVE
rows_2: f32[4, 16] = view(wait_reduce_2, [4, 16])
mean_2: f32[16] = mean.dim(rows_2, [0])  # mean 2, MUST_SAVE
wait_reduce_0: f32[64] = fsdp_flat.wait_collective(reduce_0, add_accumulated_0)  # wait_reduce 0, MUST_SAVE
rows_0: f32[4, 16] = view(wait_reduce_0, [4, 16])
mean_0: f32[16] = mean.dim(rows_0, [0])  # mean 0, MUST_SAVE
return [mean_0, None, None, mean_2, None]""",
    )


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
    """It is gathered once in forward and once in backward, and its gradients' sums are packed and sent once."""
    model = fully_shard(_Repeated(), reshard_after_forward=True)
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
    never_cached = torch._inductor.config.patch(force_disable_caches=True)
    with model.no_sync(), printed_graphs() as printed, kernels_not_built(), never_cached:
        run(torch.ones(4, 3)).sum().backward()
    last = printed[-1]
    assert last.startswith("--- backward") and "defer_reduce" in last and "gather" not in last
