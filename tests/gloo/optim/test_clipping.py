"""`clip_grad_norm_` beside torch's function on an unsharded model."""

import math
import warnings
from typing import Any

import pytest
import torch
from models import MLP, MODELS
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile.optim.segments import Segments
from fsdp_compile.tensors.sharded_reductions import gradient_norm

from ..ranks import on_ranks
from ..training import assert_same_gradients, backward, build, mine, reference_and_model, shard, whole
from ..wire import wire

ORDERS = [2.0, 1.0, 3.5, math.inf, "inf"]


def _clip_both(model: Any, reference: nn.Module, max_norm: float, order: Any) -> None:
    expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, order)
    found = model.clip_grad_norm_(max_norm, order)
    assert found.shape == () and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert_same_gradients(model, reference)
    torch.testing.assert_close(model.clip_grad_norm_(math.inf, order), expected.clamp(max=max_norm), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("mlp", "FULL_SHARD"), ("mlp", "NO_SHARD"), ("tied", "FULL_SHARD"), ("frozen", "SHARD_GRAD_OP")],
)
@on_ranks(2)
def test_as_unsharded(name: str, strategy: str) -> None:
    """Norm and gradients of every order are those of the unsharded model; tied parameters count once.

    E-CLIP-1..3.
    """
    case = MODELS[name]
    for order in ORDERS:
        reference, model = reference_and_model(case, strategy)
        backward(reference, case, whole(case, 1))
        backward(model, case, mine(case, 1))
        expected = nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None], order)
        _clip_both(model, reference, expected.item() / 3, order)
        _clip_both(model, reference, expected.item() * 3, order)


@on_ranks(2)
def test_figures() -> None:
    """Six gradients of one have the norm sqrt(6), and 0.1 when clipped to it (E-CLIP-4)."""
    model: Any = fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    torch.testing.assert_close(model.clip_grad_norm_(0.1), torch.tensor(math.sqrt(6)))
    torch.testing.assert_close(model.clip_grad_norm_(0.1), torch.tensor(0.1), rtol=1e-4, atol=0)


@on_ranks(2)
def test_sharded_whole_and_foreign_parameters() -> None:
    """Sharded units are summed over ranks; NO_SHARD units and parameters of no unit count once; one small collective.

    E-CLIP-2.
    """
    reference, model = build(MLP), build(MLP)
    model.head.requires_grad_(False)
    fully_shard(model.blocks[0], sharding_strategy=ShardingStrategy.NO_SHARD)
    fully_shard(model.blocks[1])
    for each in (reference, model):
        each.register_parameter("ignored", nn.Parameter(torch.tensor([3.0, 4.0])))
        each.ignored.grad = torch.tensor([30.0, 40.0])
    fully_shard(model, ignored_states=[model.ignored])
    reference.head.requires_grad_(False)
    backward(reference, MLP, whole(MLP, 1))
    backward(model, MLP, mine(MLP, 1))
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 7.0)
    with wire() as calls:
        found = model.clip_grad_norm_(7.0)
    torch.testing.assert_close(found, expected)
    assert [(call.kind, call.numel) for call in calls] == [("all_reduce", 1)], calls
    torch.testing.assert_close(model.ignored.grad, reference.ignored.grad)
    del reference.ignored, model.ignored
    assert_same_gradients(model, reference)


class _TwoDtypes(nn.Module):
    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.low, self.high = nn.Parameter(torch.ones(40, dtype=low)), nn.Parameter(torch.ones(3))

    def forward(self, scale: float) -> Tensor:
        return (self.low.float() * scale).sum() + self.high.sum()


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@on_ranks(2)
def test_dtypes(low: torch.dtype) -> None:
    """The norm is computed in float32 and returned in the widest gradient dtype, on ranks without parts as well.

    E-CLIP-3, E-ERR-20, E-LIM-14.
    """
    scale = 1000.0  # squares leave float16's range
    model: Any = fully_shard(_TwoDtypes(low))
    model(scale).backward()
    norm = model.clip_grad_norm_(1.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.tensor(math.sqrt(40 * scale**2 + 3)), rtol=1e-6, atol=0)
    assert all(param.grad is None or param.grad.dtype == param.dtype for param in model.parameters())
    alone: Any = fully_shard(nn.Sequential(_TwoDtypes(low).to(low)))
    alone(scale).backward()
    assert alone.clip_grad_norm_(1.0).dtype == low


@on_ranks(2)
def test_kept_low_precision() -> None:
    """Gradients kept in bfloat16 give a norm in bfloat16 (E-CLIP-3)."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model: Any = shard(MLP, mixed_precision=precision)
    backward(model, MLP, mine(MLP, 1))
    assert model.clip_grad_norm_(1.0).dtype == torch.bfloat16


@on_ranks(4)
def test_ranks_without_parts(rank: int) -> None:
    """A rank that stores nothing takes part and hears of NaN; without any gradients the norm is 0, with a warning.

    E-CLIP-3.
    """
    model: Any = fully_shard(nn.Linear(3, 1, bias=False))  # three elements: the last ranks hold none
    model(torch.ones(1, 3)).sum().backward()
    assert (model.weight.grad.to_local().numel() == 0) == (rank > 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(model.clip_grad_norm_(1.0), torch.tensor(math.sqrt(3)))
    model.zero_grad()
    with pytest.warns(UserWarning, match="there are no gradients"):
        assert model.clip_grad_norm_(1.0) == 0
    model.weight.grad = torch.zeros_like(model.weight)
    if rank == 0:
        model.weight.grad.to_local().fill_(torch.nan)
    assert model.clip_grad_norm_(1.0).isnan() and model.clip_grad_norm_(1.0, math.inf).isnan()


@on_ranks(4)
def test_hybrid() -> None:
    """Copies are not summed (E-CLIP-2)."""
    reference, model = build(MLP), shard(MLP, "HYBRID_SHARD", devices_per_node=2)
    backward(reference, MLP, whole(MLP, 1))
    backward(model, MLP, mine(MLP, 1))
    _clip_both(model, reference, 0.05, 2.0)


@on_ranks(2)
def test_errors() -> None:
    """Only the root clips, between steps, reduced gradients (E-CLIP-1, E-ERR-69, E-ERR-9)."""
    model: Any = shard(MLP)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: \w+ is inside another sharded module"):
        model.blocks[0].clip_grad_norm_(1.0)
    model.head.register_forward_hook(lambda module, args, out: model.clip_grad_norm_(1.0) and None)
    with pytest.raises(ValueError, match=r"clip_grad_norm_ needs idle units"):
        MLP.loss(model, mine(MLP, 1))
    model.head._forward_hooks.clear()
    with pytest.raises(ValueError, match=r"norm_type must be a number above 0 or 'inf', not 0"):
        model.clip_grad_norm_(1.0, 0)
    with model.no_sync():
        backward(model, MLP, mine(MLP, 1))
    with pytest.raises(RuntimeError, match=r"parameter stem.weight: its gradient was accumulated under no_sync"):
        model.clip_grad_norm_(1.0)
    backward(model, MLP, mine(MLP, 1))
    model.clip_grad_norm_(1.0)


@on_ranks(2)
def test_of_flat_gradients(rank: int) -> None:
    """The norm of a step on segments is that of torch's function, whichever gradients each rank has in flat shards."""
    model, plain = shard(MLP), nn.Linear(3, 2)
    params = [*model.parameters(), *plain.parameters()]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    for number in range(3):
        backward(model, MLP, mine(MLP, 1))
        plain(torch.ones(4, 3)).sum().backward()
        if number == 2 and rank == 1:  # no longer a part of the flat gradient, here alone
            params[1].grad = params[1].grad.clone()
        ready = Segments.of(optimizer).ready(optimizer)
        assert len(ready) > 0
        expected = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])
        updated = {id(param) for segment, _ in ready for param in segment.params}
        others = [param for param in params if id(param) not in updated]
        found = gradient_norm(others, [(gradient, segment.specs[0]) for segment, gradient in ready])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        optimizer.step()
        optimizer.zero_grad()
