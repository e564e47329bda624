"""Mixed precision: the dtypes of gathers, computation, reduces, inputs and buffers, in training and in evaluation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MLP, Inputs, Residual, vectors
from tiers import compiled_late
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard

from ..ranks import on_ranks
from ..training import OPTIMIZERS, executor, local, mine, shard, units
from ..wire import wire

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


# --- parameters and gradients -----------------------------------------------------------------------------------------


def _backward(model: nn.Module, inputs: Inputs) -> None:
    *x, y = inputs
    F.mse_loss(model(*x).float(), y).backward()  # torch 2.11 refuses a loss of two dtypes


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(
    ("given", "compute", "reduce"),
    [
        ((None, None), FP32, FP32),
        ((BF16, None), BF16, BF16),
        ((None, BF16), FP32, BF16),
        ((BF16, FP32), BF16, FP32),
        ((BF16, FP64), BF16, FP64),
    ],
)
@compiled_late
@on_ranks(2)
def test_dtypes(how: str, strategy: str, given: tuple, compute: torch.dtype, reduce: torch.dtype) -> None:
    """Gathers and computation have the one dtype, reduces the other; the optimizer sees that of the parameters.

    E-MP-1..3, 5, 6.
    """
    policy = MixedPrecision(param_dtype=given[0], reduce_dtype=given[1])
    model = shard(MLP, strategy, mixed_precision=policy)
    seen = set()
    model.blocks[0].up.register_forward_pre_hook(lambda module, args: seen.add(module.weight.dtype))
    run, optimizer = executor(model, how), OPTIMIZERS["adamw"](model.parameters())
    with wire() as sent:
        _backward(run, mine(MLP, 1))
    assert seen == {compute}, seen
    assert {each.dtype for each in sent if each.kind == "gather"} == ({compute} if strategy != "NO_SHARD" else set())
    assert {each.dtype for each in sent if each.kind != "gather"} - {torch.uint8} == {reduce}  # what ranks use
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert grads and {each.dtype for each in (*model.parameters(), *grads, *states)} == {FP32}


# --- inputs -----------------------------------------------------------------------------------------------------------

Seen = list[tuple[str, Any]]


def _dtypes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dtypes(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_dtypes(each) for each in value]
    return value.dtype if isinstance(value, Tensor) else value


class _Takes(nn.Module):
    """Notes the dtypes of its inputs."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(5)), inner
        self.seen: Seen = []

    def forward(self, x: Any, *, more: Any) -> Tensor:
        self.seen.append((_dtypes(x), _dtypes(more)))
        if self.inner is not None:
            return self.inner(x, more=more)
        return x["x"][0].to(self.weight.dtype) * self.weight


@pytest.mark.parametrize(
    ("own", "root", "expected"),  # dtypes that the root and the unit below it see
    [(False, True, (BF16, BF16)), (False, False, (FP32, FP32)), (True, False, (BF16, BF16))],
)
@on_ranks(2)
def test_inputs(own: bool, root: bool, expected: tuple[torch.dtype, torch.dtype]) -> None:
    """Floating tensors anywhere among the inputs are cast where the settings say; all else passes unchanged.

    E-MP-13, 14.
    """
    policy = MixedPrecision(param_dtype=BF16, cast_forward_inputs=own, cast_root_forward_inputs=root)
    inner = _Takes()
    model = fully_shard(_Takes(inner), auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True,
                        mixed_precision=policy)  # fmt: skip
    x, ids, half = torch.ones(2, 5), torch.ones(2, dtype=torch.int64), torch.ones(1, dtype=FP16)
    out = model({"x": [x, ids]}, more=((half, "text"), None, torch.tensor([True])))
    for seen, dtype in zip((model.seen, inner.seen), expected, strict=True):
        kept = FP16 if dtype is FP32 else dtype
        assert seen == [({"x": [dtype, torch.int64]}, [[kept, "text"], None, torch.bool])], seen
    assert out.dtype is BF16 and x.dtype is FP32, "the output has the compute dtype, the caller's tensor is untouched"


class _Named(nn.Module):
    """Returns its output and its input by name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        inner = self.inner(x)
        return {"inner": inner, "last": self.last(inner.to(self.last.weight.dtype))}


@on_ranks(2)
def test_outputs() -> None:
    """The policy's `output_dtype` is that of outputs, of inner units too, with and without gradients."""
    policy = MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32)
    for how in ("eager", "aot_eager"):
        model = _Named(fully_shard(nn.Linear(4, 4), mp_policy=policy))
        run = executor(fully_shard(model, mp_policy=policy), how)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                found: Any = run(torch.ones(2, 4))
            assert _dtypes(found) == {"inner": FP32, "last": FP32}, (how, grad)
            assert torch.equal(found["last"], found["last"].to(BF16).to(FP32)), "expected it computed in bfloat16"


class _WidensBetween(nn.Module):
    """Hands its blocks inputs in fp32, so that each has to cast its own; a checkpoint lies around each block."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(7, 11), nn.ModuleList([Residual(11, 9) for _ in range(2)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x.float()
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.float()


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_recomputation_computes_in_the_same_dtype(rank: int, reentrant: bool) -> None:
    """A unit whose forward is recomputed gets inputs as in its first forward: the same gradients, bit for bit.

    E-MP-15, E-AC-2.
    """
    policy = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=True)
    grads = []
    for each in (None, reentrant):
        torch.manual_seed(0)
        model = fully_shard(_WidensBetween(each), mixed_precision=policy)
        model(vectors(rank, 4)[0]).square().mean().backward()
        grads.append([local(param.grad) for param in model.parameters()])
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)


# --- classes that keep full precision ---------------------------------------------------------------------------------


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.plain = nn.Linear(7, 7), nn.BatchNorm1d(7), nn.BatchNorm1d(7, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.norm(self.linear(x)))


@compiled_late
@on_ranks(2)
def test_batch_norms_keep_full_precision(rank: int, how: str) -> None:
    """Auto-wrapping makes batch norms units without mixed precision, those without parameters too (E-INIT-6)."""
    policy = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    model = fully_shard(nn.Sequential(_Normed(), _Normed()), mixed_precision=policy)
    seen = set()
    model[0].norm.register_forward_pre_hook(lambda module, args: seen.add((args[0].dtype, module.weight.dtype)))
    model[0].linear.register_forward_pre_hook(lambda module, args: seen.add((args[0].dtype, module.weight.dtype)))
    executor(model, how)(vectors(rank, 4)[0]).square().sum().backward()
    assert seen == {(BF16, FP32), (BF16, BF16)}, seen
    for norm in (model[0].norm, model[0].plain):
        assert norm.running_mean.dtype is FP32 and norm.running_mean.abs().sum() > 0
    assert len(units(model)) == 4, "a block's layer and its norm are units"
    one = fully_shard(_Normed(), auto_wrap_policy=None, mixed_precision=policy)
    assert len(units(one)) == 1 and one.norm.running_mean.dtype is BF16, "without auto-wrapping nothing is exempt"
