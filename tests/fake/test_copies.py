"""No copy on either side of any collective (I5), read from the generated code."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import CASES, cached, pairs
from generated import programs, readers_of
from models import MODELS, Case, mlp, squared_error, vectors
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compile import MixedPrecision, ShardingStrategy, fully_shard
from fsdp_compile.comm.collectives import ALL_REDUCE, REDUCE_SCATTER
from fsdp_compile.core.ops import ADD_ACCUMULATED, DEFER_REDUCE, PACK_GRADS
from fsdp_compile.passes.graph.nodes import add_call
from fsdp_compile.passes.inductor import fsdp_compile_backend
from fsdp_compile.passes.post_grad.in_place_grads import pack_in_place

TWO_BLOCKS = Case(partial(mlp, blocks=2), vectors, squared_error)


@pairs(*[name for name in CASES if name not in ("conv", "recomputed")])
def test_no_kernel_moves_parameters_or_gradients(name: str, backend: str) -> None:
    """No kernel, fused or not, and no library call stores bytes of a parameter or gradient that it did not make."""
    forward, backward = cached(name, backend)
    assert forward.gathered() and backward.gathered() and backward.packed()
    assert forward.parameter_moves() == []
    assert backward.parameter_moves() == []


@pairs("gpt", "mlp", "tied", "frozen", "mha")
def test_every_product_that_makes_a_gradient_writes_it_in_place(name: str, backend: str) -> None:
    """As many matrix products write into a slice of a pack as there are trained weights of linear layers."""
    _, backward = cached(name, backend)
    torch.manual_seed(0)
    weights = {m.weight for m in CASES[name].build().modules() if isinstance(m, nn.Linear) and m.weight.requires_grad}
    attention = sum(isinstance(m, nn.MultiheadAttention) for m in CASES[name].build().modules())  # its in_proj_weight
    assert len(backward.products_into_packs()) == len(weights) + attention


def test_products_write_in_place_with_max_autotune() -> None:
    """`max_autotune` fixes the layout of products early; they are written into the pack all the same."""
    torch.manual_seed(0)
    model = torch.compile(fully_shard(mlp(1)), fullgraph=True, options={"max_autotune": True})
    forward, backward = programs(lambda: squared_error(model, vectors(1, 4)))
    assert len(backward.products_into_packs()) == 4
    assert forward.parameter_moves() == backward.parameter_moves() == []


@pairs("conv")
def test_convolutions_copy_their_own_gradients_and_nothing_else(name: str, backend: str) -> None:
    """aten has no convolution_backward that writes into given memory at full speed: what it computes moves once.

    Gradients of norms are computed in place, and nothing is copied on the gathering side.
    """
    forward, backward = cached(name, backend)
    assert forward.parameter_moves() == []
    convolutions = sum(isinstance(m, nn.Conv2d) for m in CASES[name].build().modules())
    calls = [step for step in backward.steps if step.function.startswith("torch.ops.aten.convolution_backward")]
    assert len(calls) == convolutions and len(backward.parameter_moves()) == 2 * convolutions  # weight and bias


@pytest.mark.parametrize(
    ("compute", "reduce"),
    [
        (torch.bfloat16, torch.float32),
        pytest.param(torch.bfloat16, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(torch.float16, torch.float16, marks=pytest.mark.nightly),
    ],
)
def test_mixed_precision_casts_as_it_writes(compute: torch.dtype, reduce: torch.dtype) -> None:
    """Casts and divisions cost no kernel of their own: the start of each gather is given the stored shard to cast.

    A gradient is cast and divided by the kernel that writes it into the pack, before one call fills the padding. A
    library call takes the mean; the rest of the division and the cast to the shard's dtype are one kernel, if any.
    """
    case = TWO_BLOCKS
    sharded = fully_shard(case.build(), mixed_precision=MixedPrecision(compute, reduce))
    inputs = case.batch(1, 4)
    both = programs(lambda: case.loss(torch.compile(sharded, fullgraph=True), inputs))
    for program in both:
        for gather in [step for step in program.steps if step.is_gather]:
            sent = gather.names[0]
            assert sent.startswith("primals_")
            assert readers_of(program, sent) == []
            allocated = re.search(rf"{program.memory(gather.out)} = empty_strided_cpu\(.*(torch\.\w+)\)", program.code)
            assert allocated is not None and allocated[1] == str(compute)
    backward = both[1]
    packed = {step.names[0] for step in backward.steps if step.is_reduce}
    touching = [step for step in backward.steps if packed & set(step.names) and not step.is_reduce]
    fills = [backward.steps[at - 1] for at, step in enumerate(backward.steps) if step.is_reduce]
    assert [each for each in touching if not (each.is_gather or each.is_wait or each.is_product)] == fills
    assert [each.function for each in fills] == ["torch.ops.aten._foreach_zero_.default"] * 3
    assert backward.steps[-2 if reduce == compute else -1].function.endswith("reduce_rows.default")  # the last mean


@pytest.mark.nightly
def test_the_count_sees_copies() -> None:
    """Without the pass that makes gradients placeable, the same count finds copies: it can fail."""
    torch.manual_seed(0)
    case = MODELS["mlp"]
    options = {"disable": ("pack_in_place",)}
    model = torch.compile(fully_shard(case.build()), backend=fsdp_compile_backend, options=options)
    inputs = case.batch(1, 4)
    assert programs(lambda: case.loss(model, inputs))[1].parameter_moves()


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", pytest.param("NO_SHARD", marks=pytest.mark.nightly)])
def test_other_strategies_copy_nothing(strategy: str) -> None:
    """Parameters that stay unsharded are not copied; gradients are reduced in the buffer that they are written into."""
    torch.manual_seed(0)
    case = TWO_BLOCKS
    model = torch.compile(fully_shard(case.build(), sharding_strategy=ShardingStrategy[strategy]), fullgraph=True)
    inputs = case.batch(1, 4)
    forward, backward = programs(lambda: case.loss(model, inputs))
    assert backward.packed() and len(backward.products_into_packs()) == 6
    assert forward.parameter_moves() == backward.parameter_moves() == []


@pytest.mark.parametrize(
    ("target", "args", "is_copied"),
    [
        (ADD_ACCUMULATED, ("0",), True),
        (DEFER_REDUCE, ("0", "layout"), True),
        (ALL_REDUCE, ("sum", "0"), True),
        (REDUCE_SCATTER, ("sum", 2, "0"), False),
    ],
)
def test_what_overwrites_a_pack_leaves_other_readers_their_values(target: Any, args: Any, is_copied: bool) -> None:
    """A batch norm subtracts its bias's gradient from that of its input, perhaps behind a sum into the packed buffer:
    so that gradient is packed as a copy, one that nothing else reads is not, and none is for a reduce that only reads.
    A transposed product that others read as it is stays one product.
    """
    graph, mode = fx.Graph(), FakeTensorMode()
    grad_out = graph.placeholder("grad_out")
    grad_out.meta["val"] = mode.from_tensor(torch.ones(3, 3))
    total = add_call(graph, torch.ops.aten.sum.dim_IntList, (grad_out, [0]), mode=mode)
    own = add_call(graph, torch.ops.aten.amax.default, (grad_out, [0]), mode=mode)
    product = add_call(graph, torch.ops.aten.mm.default, (grad_out, grad_out), mode=mode)
    turned = add_call(graph, torch.ops.aten.permute.default, (product, [1, 0]), mode=mode)
    pack = graph.call_function(PACK_GRADS, ([total, own, turned], "layout"))
    sent = graph.call_function(target, (pack, *args))
    centered = add_call(graph, torch.ops.aten.sub.Tensor, (grad_out, total), mode=mode)
    graph.output((sent, centered, product))
    pack_in_place(SimpleNamespace(graph=graph))  # type: ignore[arg-type]
    packed = [grad.target for grad in pack.args[0]]  # type: ignore[union-attr]
    first = torch.ops.aten.clone.default if is_copied else torch.ops.aten.sum.dim_IntList
    assert packed == [first, torch.ops.aten.amax.default, torch.ops.aten.permute.default]
    assert centered.args == (grad_out, total)
