"""Conversion of sharded modules: `.to()`, `.half()` and all else that goes through `Module._apply`."""

import copy

import pytest
import torch
from models import MLP
from tiers import all_strategies, both_ways, compiled_late
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from fsdp_compile import fully_shard, summon_full_params

from ..ranks import on_ranks
from ..training import (
    assert_same_gradients,
    assert_same_parameters,
    backward,
    build,
    executor,
    follow,
    mine,
    reference_and_model,
    units,
    whole,
)


@all_strategies
@both_ways
@on_ranks(2)
def test_conversion(how: str, strategy: str) -> None:
    """After `.to()` and its like, values, dtype and gradients follow, objects stay, and training goes on.

    Eagerly, and compiled: replaced memory is not an error then (E-MOD-3, E-MOD-8, E-MP-4, E-VIEW-6).
    """
    reference, model = reference_and_model(MLP, strategy)
    run = executor(model, how)
    follow(run, reference, MLP)
    params, grads = list(model.parameters()), [param.grad for param in model.parameters()]
    assert any(grad is not None for grad in grads)
    assert model.to(torch.float64) is model
    assert all(param.dtype == torch.float64 for param in model.parameters())
    reference.double()
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    for param, grad in zip(params, grads, strict=True):
        assert (param.grad is None) == (grad is None)
        if param.grad is not None:
            assert param.grad.shape == param.shape and param.grad.dtype == param.dtype
    assert all(unit.is_current() for unit in units(model)), "parameters lie in the new shards"
    for seed in range(3):
        for each, inputs in ((reference, whole(MLP, seed)), (run, mine(MLP, seed))):
            loss = MLP.loss(each, tuple(tensor.to(params[0].dtype) for tensor in inputs))
            assert loss.dtype == params[0].dtype
            loss.backward()
        with torch.no_grad():
            for each in (reference, model):
                for param in each.parameters():
                    if param.grad is not None:
                        param.sub_(param.grad, alpha=0.01)
        assert_same_parameters(model, reference)


@pytest.mark.parametrize("conversion", ["to_empty", "another function"])
@pytest.mark.parametrize(("strategy", "offload"), [("FULL_SHARD", False), ("FULL_SHARD", True), ("NO_SHARD", False)])
@on_ranks(2)
def test_padding_is_zero_after_a_conversion(strategy: str, offload: bool, conversion: str) -> None:
    """What a conversion leaves between parameters is zero: ranks compare it, and formats of wires scale by it."""
    with torch.device("meta" if conversion == "to_empty" else "cpu"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model, sharding_strategy=ShardingStrategy[strategy], cpu_offload=CPUOffload(offload))
    if conversion == "to_empty":
        torch.use_deterministic_algorithms(True)  # uninitialized memory is NaN
        try:
            model.to_empty(device="cpu")
        finally:
            torch.use_deterministic_algorithms(False)
        for param in model.parameters():
            nn.init.ones_(param)
    else:
        model._apply(lambda tensor: torch.full_like(tensor, 3.0))
    for unit in units(model):
        for flat in unit.flats:
            rest = flat.shard.detach().clone()
            for part in flat.split(rest):
                part.zero_()
            assert rest.eq(0).all()
    model(torch.ones(2, 5)).sum().backward()


@compiled_late
@on_ranks(2)
def test_conversion_with_mixed_precision(how: str) -> None:
    """A compute dtype that was given stays when the stored dtype changes (E-MP-4, E-MOD-3, E-LAZY-6)."""
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    ours = fully_shard(build(MLP), mixed_precision=precision).double()
    assert all(param.dtype == torch.float64 for param in ours.parameters())
    loss = executor(ours, how)(mine(MLP, 1)[0]).float().square().mean()
    (unit, *_) = units(ours)
    assert unit.compute_dtype(unit.flats[0]) == unit.reduce_dtype(unit.flats[0]) == torch.bfloat16
    loss.backward()
    assert all(param.grad is None or param.grad.dtype == torch.float64 for param in ours.parameters())
    reference = build(MLP).double()
    with summon_full_params(ours):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), reference.parameters(), strict=True))


def _fail(tensor: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("on purpose")


@on_ranks(2)
def test_conversion_that_fails_changes_nothing() -> None:
    """Conversion to other sizes or to the meta device raises, and all is as before; half a unit cannot be converted."""
    reference, model = reference_and_model(MLP)
    backward(model, MLP, mine(MLP, 1))
    backward(reference, MLP, whole(MLP, 1))
    for change in (
        lambda tensor: tensor.repeat(2),
        lambda tensor: tensor.to("meta"),
        _fail,
    ):
        with pytest.raises(RuntimeError, match=r"expected|on purpose"):
            model._apply(change)
        assert_same_parameters(model, reference)
        assert all(param.grad is not None and param.grad.dtype == param.dtype for param in model.parameters())
    model._apply(lambda tensor: tensor.double() if tensor is model.head.weight else tensor)  # it is given shards
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert_same_parameters(model, reference)
    model.zero_grad()
    reference.zero_grad()
    follow(model, reference, MLP)


@on_ranks(2)
def test_conversion_of_one_unit() -> None:
    """A unit may be converted alone (E-MOD-3); not while gradients wait in no_sync, but once they are cleared."""
    reference, model = reference_and_model(MLP)
    model.blocks[0].double()
    assert model.blocks[0].up.weight.dtype == torch.float64 and model.head.weight.dtype == torch.float32
    model.blocks[0].float()
    follow(model, reference, MLP)
    with model.no_sync():
        backward(model, MLP, mine(MLP, 1))
    with pytest.raises(RuntimeError, match=r"_apply: .* has gradients from no_sync that are not reduced"):
        model.double()
    for each in (model, reference):
        each.zero_grad()
    model.double().float()
    follow(model, reference, MLP)


@on_ranks(2)
def test_conversion_that_is_to_make_new_parameters() -> None:
    """Where torch is told to make new parameters on conversion, sharded ones stay the same objects (E-VIEW-6)."""
    reference, model = reference_and_model(MLP)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        before = list(model.parameters())
        model._apply(lambda tensor: tensor.clone())
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    follow(model, reference, MLP)
    follow(executor(model, "aot_eager"), reference, MLP)


class _Router(nn.Module):
    """Converts a part of itself in its forward, to `dtype`, as some routers of experts do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.classifier = dtype, nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(self.dtype)
        return x + self.classifier(x.to(self.dtype)).softmax(-1)


@both_ways
@on_ranks(2)
def test_conversions_in_forward(how: str) -> None:
    """A part of a unit may be converted to the dtype and device that it has, also in a forward; others are refused."""
    torch.manual_seed(0)
    reference = nn.Sequential(_Router(torch.float32), nn.Linear(7, 7))
    model = fully_shard(copy.deepcopy(reference), auto_wrap_policy={_Router})
    run = model if how == "eager" else torch.compile(model, backend=how)  # breaks the graph at the conversion
    for _ in range(2):
        for each, module in ((run, model), (reference, reference)):
            module.zero_grad()
            each(torch.ones(2, 7)).square().mean().backward()
        assert_same_gradients(model, reference)
    assert model[0].classifier.to(torch.float32) is model[0].classifier  # and between steps
    with pytest.raises(RuntimeError, match=r"parameter weight of Linear .* convert what the module computes with"):
        fully_shard(_Router(torch.float64))(torch.ones(2, 7))
