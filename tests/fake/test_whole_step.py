"""A whole step waits for the device nowhere: read from the code that Inductor generates for CUDA, seen in a step."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from cuda_code import as_for_cuda
from generated import Program, programs, readers_of
from models import MODELS, mlp
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed.fsdp import MixedPrecision
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_compile import compile_step, fully_shard
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

CASE = MODELS["mlp"]
WAITS = re.compile(r"synchronize|\.item\(|\.tolist\(|_local_scalar_dense|\.cpu\(|empty_strided_cpu|nonzero|\.to\(")
aten = torch.ops.aten


def _sharded(blocks: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(mlp(blocks), mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))


@cache
def _for_cuda(cuda_graphs: bool = False) -> tuple[Program, Program]:
    model, inputs = _sharded(blocks=2), CASE.batch(1, 4)
    with as_for_cuda(), inductor_config.patch({"triton.cudagraphs": cuda_graphs}):
        return programs(lambda: CASE.loss(torch.compile(model, fullgraph=True), inputs))


def test_the_edge_as_cuda_code() -> None:
    """Each gather is given the stored shard, which no kernel casts; forward and backward call nothing that waits for
    the device."""
    for program, units in zip(_for_cuda(), (3, 1), strict=True):  # backward gathers neither the root nor the last block
        gathers = [step for step in program.steps if step.is_gather]
        assert len(gathers) == units and all(step.function.endswith("all_gather") for step in gathers)
        for step in gathers:
            (shard,) = step.names[:1]
            assert shard.startswith("primals_")
            assert readers_of(program, shard) == []
        call = program.code[program.code.index("def call(") : program.code.index("runner = ")]
        assert "triton" in call and WAITS.findall(call) == []


def test_cuda_graphs_are_refused() -> None:
    """A CUDA graph would replay collectives without Python: it is refused, and the error says which modes are not."""
    with pytest.raises(
        Exception, match=r'cudagraphs: expected False .*, found True.* mode="max-autotune-no-cudagraphs"'
    ):
        _for_cuda(cuda_graphs=True)


class Waits(TorchDispatchMode):
    """Notes operators that ask for a value of a tensor that was computed from the given ones."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.on_device = set(map(_storage, given))
        self.kept: list[Any] = []  # so that no storage takes the address of another one
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = {_storage(each) for each in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        if given & self.on_device:
            if func in (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default):
                self.found.append(func)
            made = list(_tensors((args, kwargs, result)))
            self.on_device.update(map(_storage, made))
            self.kept += made
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf.local if isinstance(leaf, ShardedTensor) else leaf


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _loss_of(output: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.mse_loss(output.float(), target)  # torch 2.11 refuses a loss of two dtypes


@pytest.mark.parametrize("fuses", [True, False])
def test_a_step_asks_for_no_value(fuses: bool) -> None:
    """Forward, backward, norm, clipping, update and the edge read no number of a parameter, a gradient or the batch."""
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = compile_step(model, optimizer, _loss_of, clip_norm=0.1, backend="eager")
    step._run = model
    step._update.fuses = fuses
    inputs, target = CASE.batch(1, 4)
    for _ in range(2):  # they make the state, and are looked at for writes of forwards (edits/own_writes.py)
        step(inputs, target=target)
    shards = [flat.shard for unit in step._units for flat in unit.flats]
    with Waits(inputs, target, *shards) as waits:
        loss = step(inputs, target=target)
        assert waits.found == []
        loss.item()
        assert waits.found == [aten._local_scalar_dense.default]  # it can see one
