"""Graphs of blocks that are compiled by themselves: one for equal blocks, packed gradients, nothing gathered kept."""

import re
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Recorder, printed_graphs
from expecttest import assert_expected_inline
from generated import kernels_not_built, programs
from models import MODELS, Residual, mlp, squared_error, vectors
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config

from fsdp_compile import compile_step, fully_shard
from fsdp_compile.construct import units as construct_units
from fsdp_compile.passes._torch import saved_for_backward


def compiled_blocks(model: nn.Module, **options: Any) -> Any:
    fully_shard(model)
    for block in model.blocks:
        block.compile(fullgraph=True, **options)
    return model


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.nightly), "mlp"])
def test_equal_blocks_share_one_graph(name: str) -> None:
    """Six blocks need as many graphs as two."""
    counts = []
    case = MODELS[name]
    for blocks in (2, 6):
        torch._dynamo.reset()
        backend = CompileCounterWithBackend("aot_eager")
        model = type(case.build())(layers=blocks) if name == "gpt" else mlp(blocks)
        compiled_blocks(model, backend=backend)
        for seed in range(2):
            case.loss(model, case.batch(seed, 4)).backward()
        counts.append(backend.frame_count)
    assert counts == [1, 1]


def test_flat_shards_of_other_sizes_have_no_symbols() -> None:
    """One piece of code that runs units of several sizes: Dynamo takes those of activations alone for variables."""
    torch._dynamo.reset()
    sizes, seen = [(4, 8), (8, 16), (16, 4)], list[list[torch.Size]]()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(*each)) for each in sizes))
    fully_shard(model, auto_wrap_policy={nn.Sequential})

    def run(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        seen.append([each.shape for each in values if isinstance(each, Tensor) and each.dim() == 1])
        return aot_eager(graph, inputs)

    def call(block: nn.Module, x: Tensor) -> Tensor:
        return block(x)  # type: ignore[no-any-return]  # modules return anything

    x, call = torch.ones(3, 4), torch.compile(call, backend=run)
    for block in model:
        x = call(block, x)
    assert (
        len(seen) == 3 and all(seen) and all(type(size) is int for shapes in seen for shape in shapes for size in shape)
    )


def test_a_block_in_the_place_of_the_root_is_one_graph() -> None:
    """A single sharded block is a root: `torch.compile` and `compile()` trace its gather and its reduce."""
    for compile_it in (lambda block: torch.compile(block, fullgraph=True), lambda block: block.compile() or block):
        torch._dynamo.reset()
        block = fully_shard(Residual(7, 5), auto_wrap_policy=None)
        with printed_graphs() as graphs:
            squared_error(compile_it(block), (torch.ones(3, 7), torch.ones(3, 7))).backward()
        joint = next(graph for graph in graphs if "after insert_collectives" in graph.split("\n")[0])
        assert joint.count("= all_gather") == joint.count("= reduce_scatter") == 1


@pytest.fixture(scope="module")
def graphs() -> dict[str, str]:
    """The last graph of forward and of backward of a block."""
    torch._dynamo.reset()
    with printed_graphs() as printed, inductor_config.patch(force_disable_caches=True), kernels_not_built():
        squared_error(compiled_blocks(mlp(2, width=3, hidden=5)), vectors(1, 4)).backward()
    last = [graph.split("\n", 1)[1] for graph in printed if "after pack_in_place" in graph]
    return dict(zip(("forward", "backward"), last, strict=True))


def test_forward(graphs: dict[str, str]) -> None:
    """One input for all parameters, itself what is saved: eager frees it and fills it again."""
    assert_expected_inline(
        graphs["forward"],
        """\
primals_1: f32[64]
primals_2: f32[4, 3]
view_root: f32[15] = slice.Tensor(primals_1, 0, 0, 15)  # view root, MUST_RECOMPUTE
view_root_1: f32[5] = slice.Tensor(primals_1, 0, 16, 21)  # view root, MUST_RECOMPUTE
view_root_2: f32[15] = slice.Tensor(primals_1, 0, 32, 47)  # view root, MUST_RECOMPUTE
view_root_3: f32[3] = slice.Tensor(primals_1, 0, 48, 51)  # view root, MUST_RECOMPUTE
view: f32[5, 3] = reshape(view_root, [5, 3])  # MUST_RECOMPUTE
view_1: f32[3, 5] = reshape(view_root_2, [3, 5])  # MUST_RECOMPUTE
permute: f32[3, 5] = permute(view, [1, 0])  # MUST_RECOMPUTE
addmm: f32[4, 5] = addmm(view_root_1, primals_2, permute)
mul: f32[4, 5] = mul.Tensor(addmm, 0.5)
mul_1: f32[4, 5] = mul.Tensor(addmm, 0.7071067811865476)
erf: f32[4, 5] = erf(mul_1)
add: f32[4, 5] = add.Tensor(erf, 1)
mul_2: f32[4, 5] = mul.Tensor(mul, add)
permute_1: f32[5, 3] = permute(view_1, [1, 0])  # MUST_RECOMPUTE
addmm_1: f32[4, 3] = addmm(view_root_3, mul_2, permute_1)
add_1: f32[4, 3] = add.Tensor(primals_2, addmm_1)
return [add_1, primals_1, primals_2, addmm, mul_2]""",
    )


def test_backward(graphs: dict[str, str]) -> None:
    """One gradient for all parameters, packed."""
    assert_expected_inline(
        graphs["backward"],
        """\
primals_1: f32[64]
primals_2: f32[4, 3]
addmm: f32[4, 5]
mul_2: f32[4, 5]
tangents_1: f32[4, 3]
view_root_2: f32[15] = slice.Tensor(primals_1, 0, 32, 47)  # view root, MUST_RECOMPUTE
view_1: f32[3, 5] = reshape(view_root_2, [3, 5])  # MUST_RECOMPUTE
permute_1: f32[5, 3] = permute(view_1, [1, 0])  # MUST_RECOMPUTE
permute_2: f32[3, 5] = permute(permute_1, [1, 0])  # MUST_RECOMPUTE
mm: f32[4, 5] = mm(tangents_1, permute_2)
permute_3: f32[3, 4] = permute(tangents_1, [1, 0])
mm_1: f32[3, 5] = mm(permute_3, mul_2)
sum_1: f32[1, 3] = sum.dim_IntList(tangents_1, [0], True)
mul_1: f32[4, 5] = mul.Tensor(addmm, 0.7071067811865476)
erf: f32[4, 5] = erf(mul_1)
add: f32[4, 5] = add.Tensor(erf, 1)
mul_4: f32[4, 5] = mul.Tensor(add, 0.5)
mul_5: f32[4, 5] = mul.Tensor(addmm, addmm)
mul_6: f32[4, 5] = mul.Tensor(mul_5, -0.5)
exp: f32[4, 5] = exp(mul_6)
mul_7: f32[4, 5] = mul.Tensor(exp, 0.3989422804014327)
mul_8: f32[4, 5] = mul.Tensor(addmm, mul_7)
add_3: f32[4, 5] = add.Tensor(mul_4, mul_8)
mul_9: f32[4, 5] = mul.Tensor(mm, add_3)
view_root: f32[15] = slice.Tensor(primals_1, 0, 0, 15)  # view root, MUST_RECOMPUTE
view: f32[5, 3] = reshape(view_root, [5, 3])  # MUST_RECOMPUTE
permute: f32[3, 5] = permute(view, [1, 0])  # MUST_RECOMPUTE
permute_6: f32[5, 3] = permute(permute, [1, 0])  # MUST_RECOMPUTE
permute_7: f32[5, 4] = permute(mul_9, [1, 0])
mm_3: f32[5, 3] = mm(permute_7, primals_2)
sum_2: f32[1, 5] = sum.dim_IntList(mul_9, [0], True)
addmm_default: f32[4, 3] = addmm(tangents_1, mul_9, permute_6)
pack_root: f32[64] = fsdp_flat.pack_grads([mm_3, sum_2, mm_1, sum_1], '5x3@0,5@16,3x5@32,3@48|64/1%16')  # pack root
return [pack_root, addmm_default]""",
    )


def test_products_write_into_the_packed_gradient() -> None:
    """In the generated code both weights' gradients are computed in place, in one buffer that the graph returns; those
    of biases in the one kernel that also computes the loop before.
    """
    model = compiled_blocks(mlp(blocks=2))
    _, backward = programs(lambda: squared_error(model, vectors(1, 4)))
    targets = [backward.memory(s.out) for s in backward.steps if s.is_product and s.out in backward.alias_of]
    assert len(targets) == 2 and len(set(targets)) == 1
    assert f"return ({targets[0]}," in backward.code
    assert len(re.findall(r"^ +cpp_fused\w+\(", backward.code, re.MULTILINE)) == 1


class _Sum(nn.Module):
    """The gradient of `weight` is what backward is given first, and what depends on `y` reads `weight` there too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(4, 3)), nn.Linear(3, 3)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = pair
        return x + self.weight, self.other(y) * self.weight.detach()


def test_a_gradient_that_is_given_to_backward_is_reduced_there() -> None:
    """The pack of an input of the graph stays behind all inputs."""
    model = nn.Sequential(_Sum(), _Sum())
    with mock.patch.object(construct_units, "_worth_a_collective", return_value=1):
        fully_shard(model, auto_wrap_policy={_Sum})
    for block in model:
        block.compile(fullgraph=True)
    with printed_graphs() as graphs:
        sum(model((torch.ones(4, 3), torch.ones(4, 3, requires_grad=True)))).sum().backward()
    last = next(graph for graph in graphs if "backward graph after start_reduces" in graph)
    assert last.count("fsdp_flat.start_reduce_") >= 1
    calls = [" = " in line for line in last.splitlines()[1:] if "return" not in line]
    assert calls == sorted(calls) and "pack_grads([tangents_1]" in last and "tangents_2: " in last


def test_autocast_keeps_no_cast_of_parameters() -> None:
    """What autocast makes of full parameters is made again in backward: only the freed buffer is saved (I4)."""
    saved: list[Any] = []
    with (
        inductor_config.patch(
            post_grad_custom_post_pass=Recorder(lambda graph: saved.extend(saved_for_backward(graph)))
        ),
        torch.autocast("cpu", torch.bfloat16),
    ):
        squared_error(compiled_blocks(mlp(blocks=2)), vectors(1, 4)).backward()
    values = [node.meta["val"] for node in saved]
    assert values and not [v for v in values if v.dtype == torch.bfloat16 and v.numel() == 11 * 23]


class _TwoNorms(nn.Module):
    """The gradients of both norms read `x`: loops over one input, which Inductor fuses where it may."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.up = nn.LayerNorm(width), nn.Linear(width, width)
        self.second, self.down = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(self.first(x))
        return x + self.down(self.second(x))


def test_no_reduce_waits_for_the_gradients_of_another_flat_parameter() -> None:
    """In generated code each reduce starts before backward waits for the next parameters, whatever loops are alike."""
    model = nn.Sequential(*(_TwoNorms() for _ in range(2)))
    with mock.patch.object(construct_units, "_worth_a_collective", return_value=40):
        fully_shard(model, auto_wrap_policy={_TwoNorms})
    for block in model:
        block.compile(fullgraph=True)
    _, backward = programs(lambda: model(torch.ones(8, 16, requires_grad=True)).sum())
    calls = re.findall(r"fsdp_flat\.(await_gather|start_reduce_)", backward.code)
    assert calls == ["await_gather", "start_reduce_"] * 2


def test_what_compile_step_cannot_compile_by_block() -> None:
    """A model that is compiled as a whole, and one without sharded blocks, are refused before anything is compiled."""
    whole, called = fully_shard(mlp(2)), fully_shard(mlp(2))
    called.compile(backend="aot_eager")
    alone = fully_shard(mlp(2), auto_wrap_policy=None)
    cases = [(torch.compile(whole), "compiled"), (called, "compiled"), (alone, "no repeated blocks that are units")]
    for model, text in cases:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=f"regional: the model .*{text}"):
            compile_step(model, optimizer, regional=True)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    compile_step(whole, optimizer, regional=True, backend="aot_eager")
    before = [block._compiled_call_impl for block in whole.blocks]
    compile_step(whole, optimizer, regional=True, backend="aot_eager")
    assert [block._compiled_call_impl for block in whole.blocks] == before and None not in before
    assert whole._compiled_call_impl is None
