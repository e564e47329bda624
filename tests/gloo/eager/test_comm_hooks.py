"""Communication hooks: the user's function, and torch's own, reduce gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MLP
from tiers import all_strategies
from torch import Tensor
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision

from ..ranks import on_ranks
from ..training import (
    assert_same_gradients,
    backward,
    build,
    follow,
    local,
    mine,
    reference_and_model,
    shard,
    stored_here,
    units,
    whole,
)

COMPRESSING = {fp16_compress_hook: torch.float16, bf16_compress_hook: torch.bfloat16}


class _Seen:
    """The state of `_sum`: what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], torch.dtype, int]] = []
        self.names: list[str] = []

    def of_flat_param(self, flat_param: object, name: str, group: dist.ProcessGroup) -> "_Seen":
        assert group.size() == dist.get_world_size()
        self.names.append(name)
        return self


def _sum(state: _Seen, gradients: Tensor, output: Tensor | None = None) -> None:
    state.calls.append((tuple(gradients.shape), gradients.dtype, -1 if output is None else output.numel()))
    dist.all_reduce(gradients)
    if output is not None:
        output.copy_(gradients.chunk(dist.get_world_size())[dist.get_rank()])


@all_strategies
@on_ranks(2)
def test_a_hook_takes_over(strategy: str) -> None:
    """A hook gets a unit's whole gradient and, if sharded, where to put this rank's slice; nobody else divides. A
    state may tell flat parameters apart.

    E-HOOK-1, E-RED-2.
    """
    reference, model = reference_and_model(MLP, strategy)
    state = _Seen()
    model.register_comm_hook(state, _sum)
    backward(reference, MLP, whole(MLP, 1))
    backward(model, MLP, mine(MLP, 1))
    flats = [flat for unit in reversed(units(model)) for flat in unit.flats]
    outputs = [-1 if strategy == "NO_SHARD" else flat.layout.shard_numel for flat in flats]
    expected = [((flat.layout.numel,), torch.float32, output) for flat, output in zip(flats, outputs, strict=True)]
    assert sorted(state.calls) == sorted(expected), state.calls
    assert sorted(state.names) == sorted(flat.names[0] for flat in flats)
    for param in reference.parameters():
        assert param.grad is not None
        param.grad.mul_(dist.get_world_size())
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(4)
def test_default_hooks(strategy: str) -> None:
    """torch's all-reduce and reduce-scatter hooks average, also what no_sync has summed up (E-HOOK-2, E-HOOK-6)."""
    reference, model = reference_and_model(MLP, strategy)
    hook = allreduce_hook if strategy == "NO_SHARD" else reduce_scatter_hook
    model.register_comm_hook(DefaultState(dist.group.WORLD), hook)
    with model.no_sync():
        backward(model, MLP, mine(MLP, 1))
    backward(model, MLP, mine(MLP, 2))
    for seed in (1, 2):
        backward(reference, MLP, whole(MLP, seed))
    assert_same_gradients(model, reference)
    follow(model, reference, MLP)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("hook", COMPRESSING)
@on_ranks(2)
def test_compressing_hooks(hook: Any, strategy: str, param_dtype: torch.dtype | None) -> None:
    """torch's compressing hooks average, and gradients arrive and add up in the parameters' dtype.

    E-HOOK-6, E-MP-10.
    """
    precision = MixedPrecision(param_dtype=param_dtype)
    reference, model = build(MLP), shard(MLP, strategy, mixed_precision=precision)
    model.register_comm_hook(LowPrecisionState(dist.group.WORLD), hook)
    for seed in (1, 2):
        backward(model, MLP, mine(MLP, seed))
        backward(reference, MLP, whole(MLP, seed))
    coarse = 0.05 if torch.bfloat16 in (COMPRESSING[hook], param_dtype) else 0.01
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert param.grad is not None and other.grad is not None and param.grad.dtype == torch.float32
        here = stored_here(param, other.grad)
        expected = other.grad.new_empty(0) if here is None else here
        assert local(param.grad).shape == expected.shape
        assert (local(param.grad) - expected).norm() <= coarse * expected.norm()


@pytest.mark.parametrize("hook", COMPRESSING)
@on_ranks(2)
def test_compressing_hooks_are_recognised(hook: Any) -> None:
    """The two functions themselves switch the cast before the reduce off (E-HOOK-3, E-MP-9)."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    model = shard(MLP, mixed_precision=precision)
    model.register_comm_hook(LowPrecisionState(dist.group.WORLD), hook)
    with model.no_sync():
        backward(model, MLP, mine(MLP, 1))
        assert {param.grad.dtype for param in model.parameters()} == {torch.bfloat16}
    backward(model, MLP, mine(MLP, 1))


@on_ranks(4)
def test_hybrid() -> None:
    """Under hybrid sharding a hook reduces within a copy, and the mean over copies follows.

    E-HOOK-7, E-LIM-11; torch refuses it (E-HOOK-4).
    """
    mesh = init_device_mesh("cpu", (2, 2))
    reference, model = build(MLP), shard(MLP, "HYBRID_SHARD", mesh=mesh)
    model.register_comm_hook(DefaultState(mesh.get_group(1)), reduce_scatter_hook)
    follow(model, reference, MLP)


@on_ranks(2)
def test_errors() -> None:
    """Registered on the root, once, a callable (E-HOOK-5, E-ERR-68)."""
    reference, model = reference_and_model(MLP)
    with pytest.raises(AssertionError, match=r"register_comm_hook: \w+ is inside another sharded module"):
        model.blocks[0].register_comm_hook(None, _sum)
    with pytest.raises(ValueError, match=r"hook must be callable, not a str"):
        model.register_comm_hook(_sum, "reduce")
    follow(model, reference, MLP)
    model.register_comm_hook(DefaultState(dist.group.WORLD), reduce_scatter_hook)
    with pytest.raises(AssertionError, match=r"reduce_scatter_hook is registered already"):
        model.register_comm_hook(None, _sum)
    follow(model, reference, MLP)
