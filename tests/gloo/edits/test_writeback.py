"""Parameters that users replace between steps: taken over, or refused."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import MLP, MODELS, seeded
from tiers import STRATEGIES, all_strategies, compiled_late
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard, summon_full_params

from ..ranks import on_ranks
from ..training import backward, executor, follow, local, mine, reference_and_model, shard, units


def _halve(model: nn.Module, change: str) -> None:
    """Halve all parameters of an unsharded or sharded model."""
    halves = {param: nn.Parameter(param.detach() * 0.5) for param in model.parameters()}
    if change == "data":
        for param, half in halves.items():
            param.data = half.data
        return
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                setattr(module, name, halves[param])


REPEATED = (("mlp", "SHARD_GRAD_OP", "eager"), ("tied", "FULL_SHARD", "eager"), ("mlp", "NO_SHARD", "aot_eager"))


@pytest.mark.parametrize(
    ("name", "strategy", "how", "change"),
    [("mlp", "FULL_SHARD", "eager", "data"), ("mlp", "NO_SHARD", "eager", "objects")]
    + [("tied", "FULL_SHARD", "aot_eager", "data")]
    + [pytest.param(*each, change, marks=pytest.mark.nightly) for each in REPEATED for change in ("data", "objects")],
)
@on_ranks(2)
def test_replaced_parameters(name: str, strategy: str, how: str, change: str) -> None:
    """New data and new parameters of the right size are taken over by the next forward and train on.

    E-WB-1, E-WB-2, E-WB-3, E-WB-4; a shared one that is replaced in all its places stays shared (E-WB-7).
    """
    case = MODELS[name]
    reference, model = reference_and_model(case, strategy)
    run = executor(model, how)
    follow(run, reference, case)
    for each in (reference, model):
        each.zero_grad()
        _halve(each, change)
    replaced = list(model.parameters())
    follow(run, reference, case)
    assert all(a is b for a, b in zip(model.parameters(), replaced, strict=True))
    (unit, *_) = units(model)
    assert not any(flat.binding.unbound() for flat in unit.flats) and unit.is_current()
    for module in model.modules():
        for key, param in module._parameters.items():
            assert param is None or getattr(module, key) is param
    follow(executor(model, "aot_eager"), reference, case)


@pytest.mark.parametrize("change", ["dtype", "object", "local part", "sharded already"])
@on_ranks(2)
def test_what_does_not_fit_is_refused(change: str) -> None:
    """A replacement of another shape or dtype raises and names both; the next right one is taken (E-WB-4, E-ERR-32)."""
    reference, model = reference_and_model(MLP)
    old = model.head.weight
    if change == "dtype":
        old.data = old.data.double()
    elif change == "object":
        model.head.weight = nn.Parameter(torch.zeros(11, 5))
    elif change == "local part":
        model.head.weight = nn.Parameter(old.to_local().detach().clone())
    elif change == "sharded already":
        model.head.weight = model.stem.weight
    with pytest.raises(RuntimeError, match=r"parameter head.weight: expected .* found"):
        model(mine(MLP, 1)[0])
    model.head.weight = old
    reference.head.weight.data.fill_(0.5)
    old.data = torch.full(old.shape, 0.5)
    follow(model, reference, MLP)


@on_ranks(2)
def test_data_of_another_shape_is_refused() -> None:
    """Data of another shape, such as this rank's part, is refused at once and changes nothing (E-WB-4, E-ERR-32)."""
    reference, model = reference_and_model(MLP)
    weight = model.head.weight
    for data in (torch.zeros(11, 5), torch.zeros(55), weight.to_local().detach().clone(), model.stem.weight.data):
        shape = ", ".join(map(str, data.shape))
        with pytest.raises(
            ValueError, match=rf"data: expected a tensor of the full shape \(5, 11\), found \({shape},?\)"
        ):
            weight.data = data
    with summon_full_params(model), pytest.raises(ValueError, match=r"found \(7, 11\); .* before fully_shard"):
        weight.data = torch.zeros(7, 11)  # as resize_token_embeddings of transformers does
    follow(model, reference, MLP)


@compiled_late
@all_strategies
@on_ranks(2)
def test_averages_swapped_in_by_data(strategy: str, how: str) -> None:
    """Averages assigned to `param.data` for an evaluation leave the data that was saved before as it was (E-WB-3)."""
    reference, model = reference_and_model(MLP, strategy)
    run = executor(model, how)
    follow(run, reference, MLP)
    trained = [local(param).detach().clone() for param in model.parameters()]
    saved = {param: param.data for each in (model, reference) for param in each.parameters()}
    averages = {param: param.detach() * 0.5 for param in saved}
    for param, average in averages.items():
        param.data = average
    x = mine(MLP, 7)[0]
    with torch.no_grad():
        torch.testing.assert_close(run(x), reference(x))
    for param, data in saved.items():
        param.data = data
    with torch.no_grad():
        torch.testing.assert_close(run(x), reference(x))
    for param, before in zip(model.parameters(), trained, strict=True):
        assert torch.equal(local(param).detach(), before), "the trained weights were overwritten"
    follow(run, reference, MLP)


@on_ranks(2)
def test_any_shape_without_sharding() -> None:
    """Under NO_SHARD data of any shape with as many elements is taken over (E-WB-4)."""
    reference, model = reference_and_model(MLP, "NO_SHARD")
    for each in (reference, model):
        each.head.weight.data = each.head.weight.data * 0.5
    model.head.weight.data = model.head.weight.data.flatten()
    follow(model, reference, MLP)
    assert model.head.weight.shape == (5, 11)


@on_ranks(2)
def test_a_shared_parameter_replaced_in_one_place() -> None:
    """Sharing must not change: replacing in one of several places is refused (E-WB-7, E-ERR-33, E-LIM-5)."""
    case = MODELS["tied"]
    reference, model = reference_and_model(case)
    shared = model.tokens.weight
    model.head.weight = nn.Parameter(shared.detach().clone())
    with pytest.raises(NotImplementedError, match=r"parameter tokens.weight: expected one object in all 2 places"):
        backward(model, case, mine(case, 1))
    model.head.weight = shared
    follow(model, reference, case)


# --- removed parameters -----------------------------------------------------------------------------------------------


class _Shifted(nn.Linear):
    """Uses `bias` whatever it is: a parameter, a tensor, a module, None or nothing; `edit` runs within forward."""

    edit: Callable[[nn.Module], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.edit is not None:
            self.edit(self)
        bias = getattr(self, "bias", None)
        return F.linear(x, self.weight) + (
            bias(x).sum() if isinstance(bias, nn.Module) else 0 if bias is None else bias
        )


def _shifted() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(_Shifted(5, 5), _Shifted(5, 5), nn.LayerNorm(5))
    model[1].bias = model[0].bias  # tied
    return model


def _delete(model: Any) -> None:
    del model[0].bias, model[2].weight
    model[2].weight = None


def _replace(model: Any, bias: Any) -> None:
    del model[0].bias
    model[0].bias = bias


def _to_none(model: Any) -> Any:
    bias, model[0].bias, model[1].bias = model[0].bias, None, None
    return bias


def _put_back(model: Any) -> None:
    bias = _to_none(model)
    model(torch.ones(1, 5))
    model[0].bias = model[1].bias = bias


def _put_a_new_one(model: Any) -> None:
    _replace(model, nn.Buffer(torch.full((5,), 2.0)))
    del model[1].bias
    model(torch.ones(1, 5))
    del model[0].bias
    model[0].bias = model[1].bias = nn.Parameter(torch.full((5,), 0.3))


def _in_forward(edit: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda model: setattr(model[0], "edit", edit)


REMOVALS: dict[str, Callable[[Any], Any]] = {
    "none": _to_none,
    "none in one place": lambda model: model[1].register_parameter("bias", None),
    "deleted": _delete,
    "popped": lambda model: model[1]._parameters.pop("bias"),
    "a buffer": lambda model: _replace(model, nn.Buffer(torch.full((5,), 2.0))),
    "a module": lambda model: _replace(model, nn.Identity()),
    "a tensor": lambda model: _replace(model, torch.full((5,), 2.0)),
    "put back": _put_back,
    "a new one": _put_a_new_one,
    "none in forward": _in_forward(lambda module: setattr(module, "bias", None)),
    "popped in forward": _in_forward(lambda module: module._parameters.pop("bias", None)),
}


@pytest.mark.parametrize(
    ("strategy", "how", "every"),
    [("FULL_SHARD", "eager", 1), ("NO_SHARD", "eager", 3), ("FULL_SHARD", "aot_eager", 8)]
    + [pytest.param(strategy, "aot_eager", 1, marks=pytest.mark.nightly) for strategy in STRATEGIES],
)
@on_ranks(2)
def test_removed_parameters(strategy: str, how: str, every: int) -> None:
    """Forward finds what a model without sharding would find where a parameter was removed, between steps or within
    forward, in all places of a tied parameter or in one, until one is back (E-WB-2)."""
    x = torch.randn(4, 5, generator=seeded(1))
    for name, remove in list(REMOVALS.items())[::every]:
        torch._dynamo.reset()
        model = fully_shard(_shifted(), auto_wrap_policy={_Shifted}, sharding_strategy=ShardingStrategy[strategy])
        compiled: Any = model if how == "eager" else torch.compile(model, backend=how)  # an edit in forward breaks it
        for each, run in ((reference := _shifted(), reference), (model, compiled)):
            for step in range(3):
                if step == 1:
                    remove(each)
                each.zero_grad()
                run(x.sin()).square().sum().backward()
                with torch.no_grad():
                    for param in each.parameters():
                        param -= 0.01 * param.grad if param.grad is not None else 0
        torch.testing.assert_close(run(x), reference(x), msg=name)
        assert list(dict(model.named_parameters())) == list(dict(reference.named_parameters()))


@all_strategies
@on_ranks(2)
def test_data_replaced_between_forward_and_backward(strategy: str) -> None:
    """That is an error under every strategy, on every rank, that names the parameter (E-WB-5, E-LIM-6, E-ERR-31)."""
    model = shard(MLP, strategy)
    loss = MLP.loss(model, mine(MLP, 1))
    for param in model.parameters():
        param.data = param.data.clone()
    with pytest.raises(RuntimeError, match=r"parameter .* replaced between forward and backward"):
        loss.backward()


@contextmanager
def _debugging() -> Iterator[None]:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        yield
    finally:
        dist.set_debug_level(level)


@on_ranks(2)
def test_writeback_warns_at_debug_level(rank: int) -> None:
    """At debug level INFO each writeback warns with rank, name, shapes and devices (E-WB-8, E-ERR-35)."""
    model = fully_shard(nn.Linear(16, 4, bias=False))
    for level in ("off", "info"):
        model.weight.data = model.weight.data * 0.5
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if level == "info":
                with _debugging():
                    model(torch.randn(2, 16))
            else:
                model(torch.randn(2, 16))
        said = [str(w.message) for w in caught if "was replaced" in str(w.message)]
        assert len(said) == (level == "info")
    assert f"rank {rank}: parameter weight of shape (4, 16)" in said[0] and said[0].count(" on cpu") == 2
    assert "this rank's 32 elements" in said[0]
