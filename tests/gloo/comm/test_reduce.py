"""Means over ranks: float16 without overflow, hybrid sharding, dtypes of reduced gradients."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from models import MLP, seeded
from tiers import LATE, both_ways
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.comm.groups import Groups
from fsdp_compile.core.flat_collectives import averaging
from fsdp_compile.core.settings import Settings
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.reduce import reduce_gradients

from ..ranks import on_ranks
from ..training import assert_same_gradients, backward, build, executor, local, mine, shard, whole
from ..wire import wire

HYBRID = ShardingStrategy.HYBRID_SHARD
all_ways = pytest.mark.parametrize("how", ["eager", "aot_eager", pytest.param("inductor", marks=LATE)])


class _Scaled(nn.Module):
    """Its gradients are the input's elements."""

    def __init__(self, weight: int = 5, bias: int = 3) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(weight)), nn.Parameter(torch.zeros(bias))

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        return (self.weight * large).sum() + (self.bias * small).sum()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@all_ways
@on_ranks(4)
def test_float16_does_not_overflow(rank: int, how: str, strategy: str) -> None:
    """A mean is right where the sum of the addends is beyond the range of float16, eager and compiled.

    E-PG-11..12, E-RED-3.
    """
    assert averaging(torch.float16, 4) == ("sum", 2.0, 2.0)
    precision = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model = fully_shard(_Scaled(), sharding_strategy=ShardingStrategy[strategy], mixed_precision=precision)
    large, small = 24000.0 + 3000.0 * rank, 3e-7 * (rank + 1)
    run = executor(model, how)
    run(torch.full((5,), large).half(), torch.full((3,), small).half()).backward()
    world = dist.get_world_size()
    expected = 24000.0 + 3000.0 * (world - 1) / 2
    for param, mean in ((model.weight, expected), (model.bias, 3e-7 * (world + 1) / 2)):
        found = local(param.grad)
        torch.testing.assert_close(found, torch.full_like(found, mean), rtol=1e-2, atol=6e-8)


def test_other_dtypes_keep_the_mean() -> None:
    """Only float16 is divided in two steps."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert averaging(dtype, 8) == ("avg", 1.0, 1.0)


HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = [(SINGLE, SINGLE), (BRAIN, BRAIN), (BRAIN, SINGLE), (HALF, HALF)]


@pytest.mark.nightly  # rows of the feature table have low precision, and replicas, every day
@pytest.mark.parametrize(("compute", "dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("hybrid", [False, True])
@on_ranks(4)
def test_compiled_means_equal_eager_ones(rank: int, compute: torch.dtype, dtype: torch.dtype, hybrid: bool) -> None:
    """Exchange and mean of rows give the bits of an eager reduce: by mean or by sum, hybrid too.

    Compiled, a mean that goes into wider gradients is not rounded to the reduce dtype before; eager, it is.
    """
    grads = torch.randn(2, 64, generator=seeded(rank))
    precision = MixedPrecision(param_dtype=compute, reduce_dtype=dtype)
    chosen = {"mesh": init_device_mesh("cpu", (2, 2)), "sharding_strategy": HYBRID} if hybrid else {}
    means = []
    for how in ("eager", "inductor"):
        model = fully_shard(_Scaled(64, 64), mixed_precision=precision, **chosen)
        executor(model, how)(*grads.to(compute)).backward()
        means.append([local(p.grad).to(dtype) for p in model.parameters()])
    for eager, compiled in zip(*means, strict=True):
        assert torch.equal(eager, compiled)


# --- hybrid -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@on_ranks(4)
def test_hybrid_reduces_shards_over_replicas(rank: int, dtype: torch.dtype) -> None:
    """Hybrid: a reduce-scatter among the ranks of a copy, then only the shard is averaged over copies (E-PG-13)."""
    mesh, weight = init_device_mesh("cpu", (2, 2)), nn.Parameter(torch.zeros(37))
    groups = Groups.of(mesh.get_group(1), mesh.get_group(0))
    settings = Settings(HYBRID, groups, precision=MixedPrecision(reduce_dtype=dtype))
    unit = Unit([[("weight", weight)]], settings, device=weight.device)
    (flat,) = unit.flats
    expected = torch.arange(37.0) + 25000.0 * (dtype == torch.float16)
    with wire() as calls, torch.no_grad():
        (shard_grad,) = reduce_gradients(unit, unit.flats, [expected + rank])
        assert shard_grad is not None
        flat.reduction.wait()
    assert [(call.kind, call.numel) for call in calls] == [
        ("reduce", flat.layout.numel),
        ("all_reduce", flat.layout.shard_numel),
    ]
    (part,) = flat.split(shard_grad)
    record = unit.records[0]
    assert part is not None and record is not None and shard_grad.dtype == torch.float32
    here = (expected + 1.5)[record.first : record.last + 1]
    torch.testing.assert_close(part, here, rtol=1e-3 if dtype == torch.float16 else 1e-6, atol=0)


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@both_ways
@on_ranks(2)
def test_keep_low_precision_gradients(how: str, strategy: str) -> None:
    """After backward gradients have the reduce dtype, under every strategy; they add up in the parameters' dtype.

    E-MP-11..12, E-GRAD-2.
    """
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16, keep_low_precision_grads=True)
    model = shard(MLP, strategy, mixed_precision=precision)
    plain = shard(MLP, strategy, mixed_precision=MixedPrecision(torch.bfloat16, torch.float16))
    run = executor(model, how)
    for seed in (1, 2):
        with model.no_sync() if strategy == "FULL_SHARD" else nullcontext():  # its graph leaves reduces to the runtime
            loss = MLP.loss(run, mine(MLP, seed))
        loss.backward()
        backward(executor(plain, how), MLP, mine(MLP, seed))
        for narrow, wide in zip(model.parameters(), plain.parameters(), strict=True):
            assert (narrow.grad is None) == (wide.grad is None)
            if narrow.grad is not None and wide.grad is not None:
                assert narrow.grad.dtype == torch.float16 and wide.grad.dtype == torch.float32
                torch.testing.assert_close(local(narrow.grad).float(), local(wide.grad), rtol=2e-3, atol=1e-5)


@on_ranks(2)
def test_full_precision_in_eval() -> None:
    """In eval mode without mixed precision, gradients are neither reduced nor kept in a low one (E-MP-9)."""
    precision = MixedPrecision(torch.bfloat16, torch.float16, keep_low_precision_grads=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_COMPILE_FULL_PREC_IN_EVAL", "1")
        reference, model = build(MLP), shard(MLP, mixed_precision=precision)
        for dtype in (torch.float16, torch.float32):
            with wire() as calls:
                backward(model, MLP, mine(MLP, 1))
            assert {call.dtype for call in calls if call.kind == "reduce"} == {dtype}
            assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {dtype}
            model.zero_grad()
            model.eval()
        backward(reference, MLP, whole(MLP, 1))
        backward(model, MLP, mine(MLP, 1))
        assert_same_gradients(model, reference)
