"""Models on the meta device: what is initialised, in which order, and what stays; on a fake group."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RANK, WORLD_SIZE
from models import mlp
from refusing import refused, units
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_compile import ShardingStrategy, fully_shard
from fsdp_compile.core.unit import unit_of
from fsdp_compile.tensors.sharded_tensor import ShardedTensor


def on_meta() -> Any:
    with torch.device("meta"):
        return mlp()


def test_meta_parameters_get_values_and_keep_their_identity() -> None:
    """Everything on meta: initialised by `reset_parameters`, sharded, the same objects as before (E-META-1, 3, 6)."""
    model = on_meta()
    before = list(model.parameters())
    optimizer = torch.optim.SGD(before)
    fully_shard(model)
    after = list(model.parameters())
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert {param.device.type for param in after} == {"cpu"}
    assert optimizer.param_groups[0]["params"][0] is model.stem.weight
    assert all(flat.shard.abs().sum() > 0 for unit in units(model) for flat in unit.flats)


def alone() -> dist.ProcessGroup:
    return [dist.new_group([rank]) for rank in range(WORLD_SIZE)][RANK]


class Sevens(nn.Linear):
    """Counts how often it is initialised, and fills itself with sevens."""

    calls = 0

    def reset_parameters(self) -> None:
        type(self).calls += 1
        for tensor in (*self.parameters(), *self.buffers()):
            with torch.no_grad():
                tensor.fill_(7.0)


def whole(model: nn.Module, **options: Any) -> nn.Module:
    """The model with parameters in full shape."""
    return fully_shard(model, sharding_strategy=ShardingStrategy.NO_SHARD, **options)


def test_real_values_are_never_initialised_again() -> None:
    """Modules with real values are not touched; in one that is half on meta, only that half is (E-META-4)."""
    model = nn.Sequential(Sevens(2, 2), Sevens(2, 2), Sevens(2, 2, device="meta"))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].bias.fill_(2.0)
    model[1].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    model[1].register_buffer("scale", torch.ones(3))
    kept = model[1].scale
    Sevens.calls = 0
    whole(model)
    assert Sevens.calls == 2
    assert (model[0].weight == 1).all()
    assert (model[1].weight == 7).all() and (model[1].bias == 2).all()
    assert model[1].scale is kept and (kept == 1).all()
    assert (model[2].weight == 7).all() and (model[2].bias == 7).all()


def test_meta_buffers() -> None:
    """A buffer on meta is a reason to initialise as well; a shared one stays shared (E-META-1)."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, device="meta"), nn.BatchNorm1d(3, affine=False))
    model[2].running_mean = model[1].running_mean
    whole(model)
    assert model[1].running_mean is model[2].running_mean
    assert (model[1].running_mean == 0).all() and (model[1].running_var == 1).all()
    assert model[1].num_batches_tracked.item() == 0 and (model[1].weight == 1).all()


def test_tied_meta_parameters() -> None:
    """A tie across units holds; the parameter is initialised once, at its first place (E-META-6)."""
    for shards, policy in ((whole, None), (whole, {Sevens}), (fully_shard, {Sevens})):
        with torch.device("meta"):
            model = nn.Sequential(Sevens(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        shards(model, auto_wrap_policy=policy)
        assert model[0].weight is model[1].weight
        assert (model[0].weight == 7).all() and not (model[1].bias == 7).any()


def test_param_init_fn_is_called_breadth_first() -> None:
    """Every module that owns nothing or meta tensors, in order, once; modules of real values are not (E-META-2, 4).

    Nested units go first, and their modules are not passed again; units without meta tensors are not entered.
    """
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        if isinstance(module, nn.Linear):
            assert module.weight.is_meta
            module.to_empty(device="cpu", recurse=False)
            nn.init.constant_(module.weight, 7.0)

    def emptied(module: nn.Module) -> None:
        seen.append(module)
        module.to_empty(device="cpu", recurse=False)

    inner = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Tanh())
    model = nn.Sequential(inner, nn.Linear(2, 2, device="meta"), nn.ReLU(), nn.Linear(2, 2))
    weights = [inner[0].weight, model[1].weight]
    with torch.no_grad():
        model[3].weight.fill_(1.0)
    whole(model, auto_wrap_policy=None, param_init_fn=init)
    assert seen == [model, inner, model[1], model[2], inner[0], inner[1]]
    assert weights == [inner[0].weight, model[1].weight] and all((w == 7).all() for w in weights)
    assert (model[3].weight == 1).all()
    seen.clear()
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2, device="meta")), nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    model.bias = nn.Parameter(torch.empty(2, device="meta"))
    fully_shard(model, auto_wrap_policy=CustomPolicy(lambda m: m in (model[0], model[1])), param_init_fn=emptied)
    assert seen == [model[0], model[0][0], model, model[2]]


def test_attributes_and_requires_grad_survive() -> None:
    """What was set on a meta parameter is there afterwards, whatever makes the new one."""
    for init in (None, lambda module: module.to_empty(device="cpu", recurse=False)):
        model = nn.Linear(2, 2, device="meta")
        model.bias.requires_grad_(False)
        model.weight.is_special = True
        whole(model, param_init_fn=init)
        assert model.weight.is_special and not model.bias.requires_grad and model.weight.requires_grad


def test_units_are_materialized_one_by_one() -> None:
    """When a unit is initialised, those before it are shards already: the whole model never exists (E-META-6)."""
    model = on_meta()
    whole_elements: list[int] = []

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        whole_elements.append(sum(p.numel() for p in model.parameters() if not p.is_meta and unit_of(p) is None))

    total = sum(p.numel() for p in model.parameters())
    fully_shard(model, param_init_fn=init)
    assert max(whole_elements) < total / 2


def leaves_it(module: nn.Module) -> None:
    """Initialises nothing."""


def reshapes(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.ones(3))


def removes(module: nn.Module) -> None:
    del module.weight


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (leaves_it, r"left it on the meta device; call module.to_empty"),
        (removes, "removed it"),
        (reshapes, r"its shape and dtype from \(\(2, 2\), torch.float32\) to \(\(3,\)"),
    ],
)
def test_what_param_init_fn_leaves_is_checked(init: Callable[[nn.Module], None], message: str) -> None:
    """A tensor that is still on meta, gone or other than before: ValueError with its name."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False, device="meta"))
    with pytest.raises(ValueError, match=f"parameter 0.weight: .*{message}"):
        fully_shard(model, auto_wrap_policy={nn.Linear}, param_init_fn=init)


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(2, device="meta")) for _ in range(2))


def test_modules_without_reset_parameters_stay_on_meta() -> None:
    """Without `reset_parameters` parameters wait on the meta device for `to_empty`; forward refuses (E-META-3).

    A unit of which others have values is refused, before anything is changed.
    """
    model = nn.Sequential(NoReset(), NoReset())
    params = list(model.parameters())
    fully_shard(model)
    assert all(param.is_meta and isinstance(param, ShardedTensor) for param in params)
    with pytest.raises(ValueError, match=r"parameter 0.weight is still on the meta device; before the first forward"):
        model(torch.ones(2))
    model.to_empty(device="cpu")
    assert not any(param.is_meta for param in params)
    assert all(one is other and one.requires_grad for one, other in zip(params, model.parameters(), strict=True))
    refused(
        nn.Sequential(nn.Linear(2, 2), NoReset()),
        ValueError,
        r"parameter 1.weight is on the meta device and has no reset_parameters\(\), while 0.weight of the same unit",
    )


@pytest.mark.parametrize("ranks", [1, WORLD_SIZE])
def test_complete_parameters_leave_the_meta_device(ranks: int) -> None:
    """Parameters that every rank stores, as on a mesh of one rank, stay the same objects when `to_empty` gives them
    memory, also one that has been used; they train, and are given memory again after that."""
    model = nn.Sequential(NoReset(), NoReset())
    params, group = list(model.parameters()), alone() if ranks == 1 else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole(model, process_group=group)
    model.to_empty(device="cpu")
    assert all(one is other and one.requires_grad for one, other in zip(params, model.parameters(), strict=True))
    for value in (2.0, 3.0):
        with torch.no_grad():
            for param in params:
                param.fill_(value)
        assert all((flat.shard == value).sum() == 8 for unit in units(model) for flat in unit.flats)
        torch.optim.SGD(params, lr=1.0).step()
        model.to_empty(device="cpu")
    assert params[0].to_local().data_ptr() == units(model)[0].flats[0].shard.data_ptr()


class Table(nn.Module):
    """A module with a buffer and without `reset_parameters`, as that of a rotary embedding."""

    def __init__(self, **where: Any) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, **where), persistent=False)


@pytest.mark.parametrize("others", ["meta", "cpu"])
def test_buffers_alone_wait_on_meta(others: str) -> None:
    """A module that has buffers alone on the meta device, and nothing that initializes them, leaves them there for the
    script; parameters are initialized as without it, in units with and without parameters of their own."""
    for model in (
        nn.Sequential(nn.Linear(8, 8, device=others), Table(device="meta")),
        nn.Sequential(fully_shard(nn.Linear(8, 8, device=others)), Table(device="meta")),
    ):
        fully_shard(model)
        assert model[1].table.is_meta and units(model)[0].flats[0].shard.any()
        model.to_empty(device="cpu")
        assert not model[1].table.is_meta


def test_weakly_held_meta_parameters_are_refused() -> None:
    """A weak reference cannot follow a parameter to its device: ValueError with the name."""
    model = nn.Linear(2, 2, device="meta")
    held = weakref.ref(model.bias)
    refused(model, ValueError, "parameter bias is on the meta device and has a weak reference")
    assert held() is model.bias


class Broken(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            raise ZeroDivisionError("broken")


def test_failures_name_the_module() -> None:
    """What `reset_parameters` raises is raised, after a UserWarning with the module's type (E-META-3, E-ERR-62)."""
    model = nn.Sequential(Broken(2, 2, device="meta"))
    with (
        pytest.warns(UserWarning, match=r"module 0 \(Broken\): initialising it failed: ZeroDivisionError"),
        pytest.raises(ZeroDivisionError, match="broken"),
    ):
        fully_shard(model)


def test_an_initializer_that_descends() -> None:
    """A `param_init_fn` that calls `to_empty()` without `recurse=False` initializes every module once: modules below,
    in units of their own, sharded before or with values keep what they have."""

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu")
        for param in module.parameters(recurse=False):
            param.fill_(3.0)

    def build() -> Any:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential())
        model[2].append(nn.Linear(4, 4))
        nn.init.ones_(model[2][0].weight)
        return model

    for policy in (None, "auto", {nn.Linear}, {nn.Sequential}):
        model = fully_shard(build(), param_init_fn=init, auto_wrap_policy=policy)
        for name, param in model.named_parameters():
            if name != "2.0.bias":
                assert (param.to_local() == (1.0 if name.startswith("2") else 3.0)).all(), (policy, name)
        assert not any("_apply" in vars(module) for module in model.modules())
    model = build()
    fully_shard(model[1], param_init_fn=init, auto_wrap_policy=None)
    with torch.no_grad():
        for param in model[1].parameters():
            param.fill_(5.0)
    fully_shard(model, param_init_fn=init, auto_wrap_policy=None)
    assert all((param.to_local() == 5.0).all() for param in model[1].parameters())
