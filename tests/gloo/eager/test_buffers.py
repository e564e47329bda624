"""Mixed precision: dtypes of buffers, and evaluation in full precision."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from models import vectors
from tiers import all_strategies, compiled_late
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_compile import fully_shard

from ..ranks import on_ranks
from ..training import executor

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


# --- buffers ----------------------------------------------------------------------------------------------------------


class _Scaled(nn.Module):
    """A linear layer between buffers; notes the dtypes that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.register_buffer("scale", torch.full((7,), 1.0 + 2.0**-9))  # not a bf16 number
        self.register_buffer("wide", torch.ones(7, dtype=FP64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("same", self.scale)
        self.dtypes: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes = (x.dtype, self.linear.weight.dtype, self.scale.dtype, self.wide.dtype, self.count.dtype)
        return self.linear(x * self.scale * self.wide.to(x.dtype))


LOW, FULL = (BF16, BF16, BF16, BF16, torch.int64), (FP32, FP32, FP32, FP64, torch.int64)


@on_ranks(2)
def test_buffers() -> None:
    """Floating buffers get the dtype of the nearest enclosing unit's settings; ignored modules keep theirs.

    E-MP-16, E-LIM-23.
    """
    inner, left = _Scaled(), _Scaled()
    fully_shard(inner, mixed_precision=MixedPrecision(buffer_dtype=FP16))
    model = nn.Sequential(_Scaled(), inner, left)
    fully_shard(model, mixed_precision=MixedPrecision(buffer_dtype=BF16), ignored_modules=[left])
    for module, dtype in zip(model, (BF16, FP16, FP32), strict=True):
        assert module.scale.dtype is dtype and module.count.dtype is torch.int64
        assert module.wide.dtype is (FP64 if module is left else dtype)
    assert model[0].scale is model[0].same, "a buffer with two names became two"


# --- evaluation in full precision -------------------------------------------------------------------------------------


@contextmanager
def _switch(value: str = "1") -> Iterator[None]:
    with mock.patch.dict(os.environ, {"FSDP_COMPILE_FULL_PREC_IN_EVAL": value}):
        yield


@pytest.mark.parametrize("value", ["1", "true"])
@all_strategies
@compiled_late
@on_ranks(2)
def test_evaluation_in_full_precision(rank: int, how: str, strategy: str, value: str) -> None:
    """With the switch at exactly 1, inputs, weights and buffers have their own dtypes in eval mode; train changes back.

    What was gathered by hand in the other mode is not read. E-MP-7, 8, 17, 18, E-ENV-3, E-ERR-25.
    """
    torch.manual_seed(0)
    reference = nn.Sequential(_Scaled(), _Scaled()).eval()
    torch.manual_seed(0)
    policy = MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    with _switch(value):
        model = fully_shard(nn.Sequential(_Scaled(), _Scaled()), mixed_precision=policy,
                            sharding_strategy=ShardingStrategy[strategy])  # fmt: skip
    run, x = executor(model, how), vectors(rank, 4)[0]
    for training in (True, False, True, False):
        if how == "eager":
            model[1].unshard()
        model.train(training)
        model[1].scale = model[1].scale.clone()  # the next cast finds it by its name
        out = run(x)  # after the training one no backward follows: its buffers must not be taken for these
        full = value == "1" and not training
        for block in model:
            assert block.dtypes == (FULL if full else LOW), (training, block.dtypes)
        assert out.dtype is (FP32 if full else BF16)
        if full:
            scale = model[0].scale.clone()
            reference[0].scale, reference[1].scale = scale, model[1].scale  # rounded once: buffers keep no second copy
            torch.testing.assert_close(out, reference(x))


@on_ranks(2)
def test_units_share_the_switch() -> None:
    """Units under one root that read the switch differently are refused (E-STRAT-11, E-ERR-5)."""
    with _switch():
        model = nn.Sequential(fully_shard(nn.Linear(3, 3)), nn.Linear(3, 3))
    before = list(model[1].parameters())
    with pytest.raises(ValueError, match=r"module 0: FSDP_COMPILE_FULL_PREC_IN_EVAL was 1 .* and is 0 now"):
        fully_shard(model)
    assert list(model[1].parameters()) == before and type(model[1]) is nn.Linear, "something was changed"
