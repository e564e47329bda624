"""Graphs of blocks that are compiled by themselves: one for equal blocks, packed gradients, nothing gathered kept."""

import re
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Recorder, printed_graphs
from generated import programs
from models import Residual, mlp, squared_error, vectors
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor import config as inductor_config

from fsdp_compile import compile_step, fully_shard
from fsdp_compile.construct import units as construct_units
from fsdp_compile.passes._torch import saved_for_backward


def compiled_blocks(model: nn.Module, **options: Any) -> Any:
    fully_shard(model)
    for block in model.blocks:
        block.compile(fullgraph=True, **options)
    return model


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


def test_a_block_saves_its_one_input_of_parameters() -> None:
    """All parameters are one input, itself what is saved, as eager frees it and fills it again, and have one gradient,
    packed; of the rest, what unsharded blocks save."""
    saved: list[list[Tensor]] = []
    with printed_graphs() as graphs:
        see = Recorder(lambda graph: saved.append([node.meta["val"] for node in saved_for_backward(graph)]))
        with inductor_config.patch(post_grad_custom_post_pass=see):
            squared_error(compiled_blocks(mlp(2, width=3, hidden=5)), vectors(1, 4)).backward()
    assert [tuple(value.shape) for value in saved[0]] == [(64,), (4, 3), (4, 5), (4, 5)]
    (backward,) = (graph for graph in graphs if graph.startswith("--- backward graph after pack_in_place"))
    assert backward.count("pack_grads(") == 1 and "\nreturn [pack_root, " in backward
    assert not re.search("gather|reduce_scatter", backward)


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
