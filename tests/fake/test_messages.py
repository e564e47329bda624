"""Wires on a fake group: what is refused, and the code that sends messages."""

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cuda_code import as_for_cuda
from generated import Program, programs
from models import mlp, squared_error
from refusing import refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision

from fsdp_compile import Wire, fully_shard
from fsdp_compile.comm.formats import encode
from fsdp_compile.core.unit import unit_of
from fsdp_compile.passes import Pass, backend
from fsdp_compile.passes.graph.analyze import analyze
from fsdp_compile.passes.graph.nodes import tag_of, tagged
from fsdp_compile.passes.inductor import PASSES
from fsdp_compile.passes.pipeline import GraphContext

# --- refusals ---------------------------------------------------------------------------------------------------------


class _Mixed(nn.Module):
    """Parameters that train, and one that does not: whole numbers, or of another dtype."""

    def __init__(self, other: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.other = nn.Parameter(other, requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float64])
def test_dtypes_without_formats(dtype: torch.dtype) -> None:
    """A parameter that no format can send is refused by name, and may be left out."""
    name = str(dtype).removeprefix("torch.")
    refused(_Mixed(torch.ones(8).to(dtype)), ValueError, rf"parameter other is {name}.*leave it out", wire="fp8")
    model = fully_shard(_Mixed(torch.ones(8).to(dtype)), wire=lambda name: None if name == "other" else "fp8")
    unit, index = unit_of(model.other)
    assert unit.in_flat(index)[0].wire is None
    assert unit.in_flat(unit_of(model.linear.weight)[1])[0].wire == Wire("fp8", "fp8")


@pytest.mark.parametrize(
    ("wire", "error", "message", "others"),
    [
        ("fp4", ValueError, "gather must be one of bf16, fp8, int8 or None, not 'fp4'", {}),
        (3, TypeError, "wire: expected a format, a Wire or None, found a int", {}),
        ({"nothing.*": "fp8"}, ValueError, r"'nothing\.\*' names no parameter", {}),
        ({1: "fp8"}, TypeError, "expected patterns of parameter names", {}),
        (lambda name: 2.0, TypeError, "found a float", {}),
        ("fp8", ValueError, "only Wire.gather='bf16'. goes with it", {"reduction_order": "tree"}),
        ("bf16", ValueError, "is float64", {"mixed_precision": MixedPrecision(reduce_dtype=torch.float64)}),
        (Wire("fp8", between_nodes_only=True), ValueError, "sharded over one group", {}),
        (Wire(reduce="fp8", error_feedback=True), ValueError, "reduces over one group", {"reshard_after_forward": 2}),
    ],
)
def test_refused_arguments(wire: Any, error: type[Exception], message: str, others: dict[str, Any]) -> None:
    """Errors name the argument or the parameter and say what to do; the model is as it was. A format has to know the
    dtype in which parameters are gathered and gradients are reduced."""
    refused(mlp(1), error, message, wire=wire, **others)


def test_refused_wires() -> None:
    """A `Wire` that means nothing is refused where it is made."""
    for arguments, error, message in (
        ((), ValueError, "give a format"),
        ((8,), TypeError, "gather must be a str"),
        (("fp8", None, 1), TypeError, "between_nodes_only must be a bool"),
        (("fp8", None, False, True), ValueError, "error_feedback is of a reduce"),
    ):
        with pytest.raises(error, match=message):
            Wire(*arguments)


def test_hooks_do_not_go_with_wires() -> None:
    """A communication hook would send gradients in its own way: refused where the wire has a format for them."""
    model = fully_shard(mlp(1), wire="bf16")
    with pytest.raises(ValueError, match="is sent as Wire"):
        model.register_comm_hook(None, lambda state, grads, output: None)
    fully_shard(mlp(1), wire=Wire(gather="bf16")).register_comm_hook(None, lambda state, grads, output: None)


def test_wires_by_name() -> None:
    """A mapping's first pattern that fits counts; parameters that differ are flat parameters of their own."""
    model = fully_shard(mlp(2), wire={"*bias": None, "*": "int8"})
    for name, param in model.named_parameters():
        unit, index = unit_of(param)
        assert unit.in_flat(index)[0].wire == (None if name.endswith("bias") else Wire("int8", "int8"))


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_hybrid_formats() -> None:
    """Between nodes only, the average over replicas has a format, and what is within a node has none. What a plan
    counts of a reduce is what the graph returns: behind both stages, in the dtype of the shard."""
    found, returned = list[tuple[str, str]](), list[bool]()

    def look(context: GraphContext) -> None:
        found.extend((tag_of(each).kind, tag_of(each).wire) for each in tagged(context.graph, "gather", "reduce"))
        outputs = context.graph.output_node().all_input_nodes
        returned.extend(each.result in outputs for each in analyze(context.graph, joint=True).reduces.values())

    options = {"mesh": init_device_mesh("cpu", (2, 2)), "mixed_precision": MixedPrecision(torch.bfloat16)}
    model = fully_shard(mlp(2), wire=Wire("fp8", "fp8", between_nodes_only=True), **options)
    run = torch.compile(model, fullgraph=True, backend=backend((*PASSES, Pass("look", "joint", look, version="1"))))
    squared_error(run, (torch.rand(8, 7), torch.rand(8, 5))).backward()
    assert {format for kind, format in found if kind == "gather"} == {""}
    reduces = [format for kind, format in found if kind == "reduce"]
    assert reduces.count("fp8") == reduces.count("") == len(reduces) / 2
    assert returned == [True] * 3


@pytest.mark.parametrize("format", ["bf16", "fp8", "int8"])
def test_a_message_for_each_rank(format: str) -> None:
    """A gather sends the message of this rank's part of a unit, and a reduce one of each rank's part."""
    sent: list[tuple[str, int]] = []

    def look(context: GraphContext) -> None:
        for start in tagged(context.graph, "gather", "reduce"):
            sent.append((tag_of(start).kind, start.all_input_nodes[0].meta["val"].numel()))

    at = [each.name for each in PASSES].index("send_messages") + 1
    passes = (*PASSES[:at], Pass("look", "post_grad", look, version="1"), *PASSES[at:])
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = fully_shard(model, auto_wrap_policy={nn.Linear}, wire=format, reshard_after_forward=True)
    torch.compile(model, fullgraph=True, backend=backend(passes))(torch.rand(8, 64)).sum().backward()
    part = encode(torch.zeros(1, unit_of(model[0].weight)[0].flats[0].layout.numel // 4), format).numel()
    assert sent == [("gather", part)] * 2 + [("gather", part), ("reduce", 4 * part), ("reduce", 4 * part)]


def _programs(wire: Any, on_cuda: bool) -> tuple[Program, Program]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)]
    run = torch.compile(fully_shard(nn.Sequential(*blocks), wire=wire), fullgraph=True)
    x = torch.rand(8, 64)
    with as_for_cuda() if on_cuda else nullcontext():
        return programs(lambda: run(x).square().mean())


@pytest.mark.parametrize("on_cuda", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("format", ["fp8", pytest.param("int8", marks=pytest.mark.nightly)])
def test_kernels(format: str, on_cuda: bool) -> None:
    """Each flat parameter is encoded by one kernel and decoded by one, each message summed up by one, and no bytes are
    copied beside these."""
    forward, backward = _programs(format, on_cuda)
    gathers = [step for step in forward.steps if step.function.endswith("all_gather")]
    assert len(gathers) == 2
    for program in (forward, backward):
        assert not [step for step in program.steps if re.search(r"aten\.(cat|view|copy)", step.function)]
        waits = [at for at, step in enumerate(program.steps) if step.function.endswith(".wait")]
        made = set[str]()  # by kernels
        for step in program.steps:
            assert not (step.is_gather or step.is_reduce) or program.memory(step.names[0]) in made, step.text
            made |= {program.memory(name) for name in step.names if step.function in program.kernels}
        for at in waits:
            assert program.steps[at + 1].function in program.kernels or program.steps[at + 1].function.endswith(".run")
    text = forward.code + backward.code
    if on_cuda:
        assert ("tl.float8e4nv" in text) == (format == "fp8")
