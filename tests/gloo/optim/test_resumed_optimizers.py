"""Optimizers that are saved and resumed at any moment, on any number of ranks, beside a run that nobody interrupted."""

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models import mlp, seeded
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from fsdp_compile import CPUOffload, ShardingStrategy, checkpoint, fully_shard
from fsdp_compile.core.sharding import clean_name
from fsdp_compile.optim import by_owner
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

from ..ranks import Ranks, on_ranks
from ..training import local
from .test_matrix_optimizers import Orthogonal

MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.05, weight_decay=0.1),
    "momentum": partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": partial(optim.Adam, lr=0.01, weight_decay=0.1),
    "adamw": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "adamax": partial(optim.Adamax, lr=0.01),
    "adagrad": partial(optim.Adagrad, lr=0.01, lr_decay=0.1),
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "rmsprop": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "rprop": partial(optim.Rprop, lr=0.01),
    "asgd": partial(optim.ASGD, lr=0.01, t0=1.0),
    "by_owner": partial(optim.AdamW, lr=0.01),  # which shards it in another way
    "muon": partial(optim.Muon, lr=0.02),
    "matrices": lambda params: Orthogonal(params, {"lr": 0.05}),
}
STEPS = 4  # of the run; `Moment.steps` of them before the save


# --- when a run is saved ----------------------------------------------------------------------------------------------


def _freeze(model: nn.Module, frozen: bool) -> None:
    model.blocks[0].requires_grad_(not frozen)


def _all_parameters(model: nn.Module) -> Any:
    return list(model.parameters())


def _with_empty_groups(model: nn.Module) -> Any:
    head = {"params": list(model.head.parameters()), "lr": 0.03}
    rest = {"params": [*model.stem.parameters(), *model.blocks.parameters()]}
    return [{"params": [], "lr": 0.7}, head, {"params": [], "lr": 0.8}, rest]


class Moment(NamedTuple):
    """When a run is saved, and what happens before and after."""

    steps: int  # before the save
    groups: Callable[[nn.Module], Any] = _all_parameters
    before: Callable[[int, nn.Module, Any], None] = lambda step, model, opt: None  # called before each step
    resumed: Callable[[nn.Module, Any], None] = lambda model, opt: None  # called when all has been made anew
    unused: int = 0  # the first steps, in which the head has no gradients


def _add_a_group(step: int, model: nn.Module, optimizer: Any) -> None:
    if step == 1:
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.02})


def _halve_rates(step: int, model: nn.Module, optimizer: Any) -> None:
    for group in optimizer.param_groups if step == 1 else ():
        group["lr"] *= 0.5


MOMENTS = {
    "before the first step": Moment(0),
    "in the middle": Moment(2),
    "frozen": Moment(  # in the second step, before which it has trained, and in the third
        2,
        before=lambda step, model, _: _freeze(model, step in (1, 2)),
        resumed=lambda model, _: _freeze(model, True),
    ),
    "thawed": Moment(2, before=lambda step, model, _: _freeze(model, step < 2)),
    "not used yet": Moment(2, unused=2),
    "a group was added": Moment(
        2,
        groups=lambda model: [*model.stem.parameters(), *model.blocks.parameters()],
        before=_add_a_group,
        resumed=lambda model, optimizer: _add_a_group(1, model, optimizer),
    ),
    "empty groups": Moment(2, groups=_with_empty_groups, before=_halve_rates),
}


# --- runs -------------------------------------------------------------------------------------------------------------


def _build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(2)


def _sharded(seed: int, strategy: str = "FULL_SHARD") -> nn.Module:
    options: dict[str, Any] = {"devices_per_node": 2} if "HYBRID" in strategy else {}
    if strategy == "offload":
        strategy, options = "FULL_SHARD", {"cpu_offload": CPUOffload(offload_params=True)}
    return fully_shard(_build(seed), sharding_strategy=ShardingStrategy[strategy], **options)


def _optimizer(name: str, moment: Moment, model: nn.Module) -> optim.Optimizer:
    params = moment.groups(model)
    if name in OF_MATRICES:
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        params = [{**group, "params": [each for each in group["params"] if each.dim() == 2]} for group in groups]
    is_sharded = any(isinstance(param, ShardedTensor) for param in model.parameters())
    return by_owner(params, MAKERS[name]) if name == "by_owner" and is_sharded else MAKERS[name](params)


def _step(step: int, moment: Moment, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """A step with known gradients."""
    moment.before(step, model, optimizer)
    for index, (name, param) in enumerate(model.named_parameters()):
        full = torch.randn(param.shape, generator=seeded(100 * step + index))
        has_gradient = param.requires_grad and not (step < moment.unused and "head" in name)
        param.grad = _like(param, full) if has_gradient else None
    optimizer.step()
    optimizer.zero_grad()


def _like(param: Tensor, full: Tensor) -> Tensor:
    return ShardedTensor(param.spec.local_of(full).clone(), param.spec) if isinstance(param, ShardedTensor) else full


OF_MATRICES = ("muon", "matrices")
CASES = [(name, moment) for name, moment in itertools.product(MAKERS, MOMENTS) if name not in OF_MATRICES]


def _folder(root: Path, name: str, moment: str) -> Path:
    return root / f"{name} {moment}".replace(" ", "_")


def _refuse_step(*_: Any) -> None:
    raise AssertionError("an optimizer steps in save or load")


def _save(rank: int, root: Path, cases: list[tuple[str, str]], strategy: str = "FULL_SHARD") -> None:
    for name, when in cases:
        moment, model = MOMENTS[when], _sharded(0, strategy)
        optimizer = _optimizer(name, moment, model)
        for step in range(moment.steps):
            _step(step, moment, model, optimizer)
        hook = optimizer.register_step_pre_hook(_refuse_step)
        checkpoint.save({"model": model, "optimizer": optimizer}, _folder(root, name, when), moment.steps)
        hook.remove()
        _go_on(name, when, model, optimizer)


def _resume(rank: int, root: Path, cases: list[tuple[str, str]], strategy: str = "FULL_SHARD") -> None:
    for name, when in cases:
        moment, model = MOMENTS[when], _sharded(1, strategy)
        optimizer = _optimizer(name, moment, model)
        moment.resumed(model, optimizer)
        hook = optimizer.register_step_pre_hook(_refuse_step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint.load({"model": model, "optimizer": optimizer}, _folder(root, name, when))
        said = [str(each.message) for each in caught if "starts anew" in str(each.message)]
        _check_warning(name, when, said)
        hook.remove()
        _go_on(name, when, model, optimizer)


def _check_warning(name: str, when: str, said: list[str]) -> None:
    """One warning, of what trains and has no state in a checkpoint that has some."""
    lacking = {"thawed": "blocks.0.up.weight", "not used yet": "head.weight, head.bias"}.get(when)
    lacking = lacking and lacking.partition(",")[0] if name in OF_MATRICES else lacking
    expected = lacking is not None and name not in ("sgd", "adagrad")  # without state; with state from the beginning
    assert len(said) == expected, (name, when, said)
    assert not expected or f"the checkpoint has no state of {lacking}" in said[0], said


def _go_on(name: str, when: str, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Run to the end, and compare with the unsharded run that nobody interrupted."""
    moment, reference = MOMENTS[when], _build(0)
    expected = _optimizer(name, moment, reference)
    for step in range(STEPS):
        _step(step, moment, reference, expected)
    for step in range(moment.steps, STEPS):
        _step(step, moment, model, optimizer)
    what = f"{name}, {when}"
    params = {clean_name(key): param for key, param in model.named_parameters()}
    for key, plain in reference.named_parameters():
        _assert_same(params[key], plain, f"{what}: {key}")
        found, state = optimizer.state.get(params[key], {}), expected.state.get(plain, {})
        if name == "by_owner":  # others than the owner do not have counts of steps
            state = {key: value for key, value in state.items() if key in found}
        assert found.keys() == state.keys(), (what, key, list(found), list(state))
        for each, value in state.items():
            _assert_same(found[each], value, f"{what}: {key} {each}")
    for group, own in zip(optimizer.param_groups, expected.param_groups, strict=True):
        assert {**group, "params": []} == {**own, "params": []}, (what, group, own)


def _assert_same(found: Any, plain: Any, what: str) -> None:
    if isinstance(found, ShardedTensor):
        found, plain = local(found), found.spec.local_of(plain)
    if isinstance(plain, Tensor):
        torch.testing.assert_close(
            found.detach(), plain.detach(), rtol=1e-6, atol=1e-7, msg=lambda said: f"{what}: {said}"
        )
    else:
        assert found == plain, (what, found, plain)


OTHERS = itertools.cycle(("momentum", "by_owner", "muon", "matrices", "asgd", "adagrad", "nadam"))
SAMPLE = [(name, moment) for moment in MOMENTS for name in ("adamw", next(OTHERS))]


def test_a_sample_resumes_on_more_ranks(two: Ranks, three: Ranks, tmp_path: Path) -> None:
    """Saved on two ranks at any moment, an optimizer goes on there and on three ranks as if nobody had saved.

    Neither `save` nor `load` steps it; what the checkpoint lacks starts anew, with one warning that names it.
    """
    two.run(_save, tmp_path, SAMPLE)
    three.run(_resume, tmp_path, SAMPLE)


@pytest.mark.nightly
@pytest.mark.parametrize("loading", ["one", "two", "three"])
@pytest.mark.parametrize("saving", ["one", "two", "three"])
def test_any_number_of_ranks(request: Any, saving: str, loading: str, tmp_path: Path) -> None:
    """The same of 13 optimizers, from 1, 2 and 3 ranks to 1, 2 and 3."""
    request.getfixturevalue(saving).run(_save, tmp_path, CASES)
    request.getfixturevalue(loading).run(_resume, tmp_path, CASES)


@pytest.mark.nightly
@pytest.mark.parametrize("loading", ["NO_SHARD", "HYBRID_SHARD", "offload"])
@pytest.mark.parametrize("saving", ["NO_SHARD", "HYBRID_SHARD", "offload"])
def test_any_strategy(four: Ranks, two: Ranks, saving: str, loading: str, tmp_path: Path) -> None:
    """The same from each strategy on four ranks to each on two, where hybrid sharding is as full."""
    cases = [case for case in SAMPLE if case in CASES]
    four.run(_save, tmp_path, cases, saving)
    two.run(_resume, tmp_path, cases, loading)


def _twice(model: nn.Module, optimizer: optim.Optimizer) -> Tensor:
    """The head's second moment after one more step of its bias."""
    index = [name for name, _ in model.named_parameters()].index("head.bias")
    full = torch.randn(model.head.bias.shape, generator=seeded(100 + index))
    before = optimizer.state[model.head.bias]["exp_avg_sq"].full_tensor()
    return before * 0.999 + full**2 * 0.001


@on_ranks(2)
def test_other_options(tmp_path: Path) -> None:
    """Options that were switched on since the save are the saved ones again, with a warning, as is state of theirs.

    State of parameters that the optimizer does not have is an error, unless `partial=True`.
    """

    def warnings_of(saved: optim.Optimizer, loaded: optim.Optimizer, stepped: bool, **options: Any) -> list[str]:
        checkpoint.save({"model": model, "optimizer": saved}, tmp_path, 1)
        if stepped:
            _step(0, MOMENTS["in the middle"], model, loaded)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint.load({"model": model, "optimizer": loaded}, tmp_path, **options)
        _step(1, MOMENTS["in the middle"], model, loaded)
        return [str(each.message) for each in caught if "state['optimizer']" in str(each.message)]

    model = _sharded(0)
    adamw, sgd = optim.AdamW(model.parameters()), optim.SGD(model.parameters())
    for saved in (adamw, sgd):
        _step(0, MOMENTS["in the middle"], model, saved)
    for stepped in (False, True):
        (said,) = warnings_of(adamw, optim.AdamW(model.parameters(), amsgrad=True), stepped)
        assert "the saved options replace amsgrad=True by False" in said
        assert ("no state of stem.weight.max_exp_avg_sq, stem.bias.max_exp_avg_sq" in said) == stepped, said
    (said,) = warnings_of(sgd, optim.SGD(model.parameters(), momentum=0.9), False)
    assert said.endswith("state['optimizer']: the saved options replace momentum=0.9 by 0")
    for param in model.head.parameters():
        assert "exp_avg" in adamw.state[param]
    head = optim.AdamW(model.head.parameters())
    with pytest.raises(checkpoint.CheckpointError, match=r"names that state\['optimizer'\] does not have: stem.weight"):
        warnings_of(adamw, head, False)
    assert warnings_of(adamw, head, False, partial=True) == []
    _assert_same(head.state[model.head.bias]["exp_avg_sq"], _twice(model, adamw), "the head alone")


def _in_another_order(rank: int, root: Path, saving: bool) -> None:
    model = _sharded(0 if saving else 1)
    params = list(model.parameters())
    optimizer = optim.AdamW([{"params": params[rank:] + params[:rank]}], lr=0.02 if saving else 0.5)
    if saving:
        _step(0, MOMENTS["in the middle"], model, optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, root, 1)
    else:
        checkpoint.load({"model": model, "optimizer": optimizer}, root)
    reference = _build(0)
    expected = optim.AdamW(reference.parameters(), lr=0.02)
    for step in range(2):
        _step(step, MOMENTS["in the middle"], reference, expected)
    _step(1, MOMENTS["in the middle"], model, optimizer)
    for param, plain in zip(model.parameters(), reference.parameters(), strict=True):
        _assert_same(param, plain, "in another order")


def test_parameters_in_another_order(two: Ranks, three: Ranks, tmp_path: Path) -> None:
    """Ranks whose optimizers have parameters in another order save and load them on any number of ranks."""
    two.run(_in_another_order, tmp_path, True)
    three.run(_in_another_order, tmp_path, False)


@on_ranks(2)
def test_an_empty_group_through_torch() -> None:
    """Options that torch's function loses behind an empty group are not lost without an error."""
    model = _sharded(0)
    optimizer = optim.AdamW(_with_empty_groups(model))
    _step(0, MOMENTS["in the middle"], model, optimizer)
    del optimizer.param_groups[2]  # torch's function takes one empty group
    found = get_optimizer_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=r"a parameter group has no lr; .* fsdp_compile.checkpoint"):
        set_optimizer_state_dict(model, optimizer, found)
