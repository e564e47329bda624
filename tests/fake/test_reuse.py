"""Gradients take the place of parameters: one buffer is gathered into, read, written and reduced."""

import re
from typing import Any

import pytest
import torch
from compiling import CASES, cached, compiled, pairs
from generated import Program, Step, programs
from models import mlp
from overwriting import Mirrored, Scaled, awkward
from torch import fx, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_compile import MixedPrecision, ShardingStrategy, fully_shard
from fsdp_compile.comm.collectives import ALL_GATHER, WAIT
from fsdp_compile.passes.graph.nodes import CAST
from fsdp_compile.passes.inductor import fsdp_compile_backend
from fsdp_compile.passes.post_grad.reuse_gathered import _has_zero_padding, _next_pointwise

Calls = tuple[tuple[Any, Any], ...]
Window = tuple[str, int, int]  # buffer, first element, after the last


def windows(program: Program) -> dict[str, Window]:
    """What each alias names."""
    pattern = r"^\s*(buf\d+) = reinterpret_tensor\((\w+), \(([\d, ]*)\), \(([\d, ]*)\), (\d+)\)  # alias"
    return {name: window(*rest) for name, *rest in re.findall(pattern, program.code, re.M)}


def window(name: str, size: str, stride: str, offset: str) -> Window:
    sizes, strides = ([int(number) for number in text.split(",") if number.strip()] for text in (size, stride))
    last = sum((number - 1) * step for number, step in zip(sizes, strides, strict=True))
    return name, int(offset), int(offset) + last + 1


def read_by(step: Step) -> list[Window]:
    """The windows that a matrix product reads."""
    text = step.text.partition("out=")[0]
    return [
        window(*each) for each in re.findall(r"reinterpret_tensor\((\w+), \(([\d, ]*)\), \(([\d, ]*)\), (\d+)\)", text)
    ]


@pytest.mark.parametrize(
    ("program", "is_zero"),
    [
        ((), True),
        (((CAST, torch.bfloat16),), True),
        (((torch.ops.aten.add.Tensor, 1),), False),
        (((torch.ops.aten.add.Tensor, 1), (CAST, torch.bfloat16)), False),
    ],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_gradients_take_no_padding_that_a_program_has_filled(program: Calls, is_zero: bool, stages: int) -> None:
    """Padding is reduced with the gradients: a buffer is reused if what was gathered are shards, or casts of them."""
    graph = fx.Graph()
    sent = graph.placeholder("shard")
    for target, argument in program:
        sent = graph.call_function(target, (sent, argument))
    for _ in range(stages):
        sent = graph.call_function(WAIT, (graph.call_function(ALL_GATHER, (sent, 2, "0")),))
    assert _has_zero_padding(sent) == is_zero


@pairs()
def test_blocks_need_one_buffer(name: str, backend: str) -> None:
    """Every block's backward has one buffer; the root's was gathered in forward."""
    _, backward = cached(name, backend)
    assert len(backward.reused()) == len(backward.gathered()) > 0


@pairs("mlp", "gpt")
def test_no_parameter_is_overwritten_before_it_was_read(name: str, backend: str) -> None:
    """Products that read a window run before what writes there; all before its reduce."""
    _, backward = cached(name, backend)
    written, seen = windows(backward), 0
    for buffer in backward.reused():
        steps = backward.steps
        (reduce,) = [at for at, step in enumerate(steps) if step.is_reduce and step.names[0] == buffer]
        for at, step in enumerate(steps):
            for _, first, end in [each for each in read_by(step) if each[0] == buffer]:
                writers = [
                    place for place, other in enumerate(steps) for alias in other.names
                    if (there := written.get(alias)) and there[0] == buffer and there[1] < end and first < there[2]
                ]  # fmt: skip
                seen += len(writers)
                assert writers and all(at < place < reduce for place in writers)
    assert seen


@pairs("mlp")
def test_products_stay_where_they_were(name: str, backend: str) -> None:
    """A gradient's product is not put off to the end of its block: what it reads would live as long."""
    _, backward = cached(name, backend)
    kinds = ["into" if step.out in windows(backward) else "from" for step in backward.steps if step.is_product]
    assert "into into into" not in " ".join(kinds)  # two: the first layer's and, after the turn, the next


def test_sums_with_the_residual_stay_fused() -> None:
    """What a block hands on is written once, by the kernel that reads the last parameter: no kernel only adds."""
    _, backward = cached("gpt", "default")
    assert [step.function for step in backward.steps if re.fullmatch(r"cpp_fused_add_\d+", step.function)] == []


def test_what_follows_lies_beyond_the_end() -> None:
    """Loops that read a result through views or directly, and neither what the end computes nor the end itself."""
    graph, aten = fx.Graph(), torch.ops.aten
    first = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    end = graph.call_function(aten.neg.default, (first,))
    view = graph.call_function(aten.view.default, (first, [-1]))
    viewed = graph.call_function(aten.exp.default, (view,))
    added = graph.call_function(aten.add.Tensor, (first, end))
    later = graph.call_function(aten.mul.Tensor, (first, viewed))
    graph.output((added, later))
    assert _next_pointwise([first, end], end) == [view, viewed, added]


@pytest.mark.parametrize(
    "build",
    [
        lambda: _compiled(mlp(2), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        pytest.param(
            lambda: compiled("mlp", fsdp_compile_backend, options={"disable": ("reuse_gathered",)}),
            marks=pytest.mark.nightly,
        ),
        lambda: _compiled(mlp(2), mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)),
    ],
    ids=["unsharded since forward", "disabled", "of another dtype"],
)
def test_not_reused(build) -> None:
    """What forward has gathered, or is of another dtype, is not overwritten."""
    assert build()[1].reused() == set()


def _compiled(model: nn.Module, **options) -> tuple[Program, Program]:
    sharded = torch.compile(fully_shard(model, **options), fullgraph=True)
    return programs(lambda: CASES["mlp"].loss(sharded, CASES["mlp"].batch(1, 4)))


def test_gradients_computed_from_their_own_place() -> None:
    """A gradient that the same loop computes from the parameter has memory elsewhere, the other unit's are in place."""
    torch.manual_seed(0)
    case = awkward(pairs=1)
    model = fully_shard(case.build(), auto_wrap_policy=ModuleWrapPolicy({Scaled, Mirrored}), reshard_after_forward=True)
    run = torch.compile(model, fullgraph=True)
    _, backward = programs(lambda: case.loss(run, case.batch(1, 3)))
    assert len(backward.gathered()) == 2
    assert len(backward.reused()) == 1
