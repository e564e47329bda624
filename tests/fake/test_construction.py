"""What `fully_shard` ignores, initialises, moves and refuses; on a fake group, so without communication."""

import inspect
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import RANK, WORLD_SIZE
from models import mlp
from test_api import refused, units
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import distribute_tensor, init_device_mesh

from fsdp_compile import FSDPModule, ShardingStrategy, fully_shard
from fsdp_compile.unit import unit_of


def managed(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if unit_of(param)}


def names_below(model: nn.Module, *paths: str) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(f"{path}." for path in paths))}


# --- ignored ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
def test_ignored_modules(argument: str) -> None:
    """An ignored module keeps its parameters as they are, with all below it; the rest is sharded (E-INIT-8, 9, 11)."""
    model = mlp()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    types = [type(module) for module in model.blocks[1].modules()]
    fully_shard(model, **{argument: {model.blocks[1], model.stem}})  # type: ignore[arg-type]
    ignored = names_below(model, "blocks.1", "stem")
    assert managed(model) == set(before) - ignored
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters() if name in ignored)
    assert [type(module) for module in model.blocks[1].modules()] == types
    assert [isinstance(block, FSDPModule) for block in model.blocks] == [True, False, True]


def test_ignored_parameters() -> None:
    """Ignored parameters stay whole in units whose other parameters are sharded (E-INIT-11)."""
    model = mlp()
    mine = [model.stem.weight, model.blocks[0].up.bias]
    shapes = [param.shape for param in mine]
    fully_shard(model, ignored_states=mine)
    assert [param.shape for param in mine] == shapes
    assert {n for n, p in model.named_parameters() if unit_of(p) is None} == {"stem.weight", "blocks.0.up.bias"}


def test_ignored_parameters_may_be_what_cannot_be_sharded() -> None:
    """What is ignored is not checked: another dtype, meta, or an integer type (E-INIT-11)."""
    model = mlp()
    model.odd = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
    model.absent = nn.Parameter(torch.empty(3, device="meta"))
    fully_shard(model, ignored_states=iter([model.odd, model.absent]))
    assert model.absent.is_meta and unit_of(model.odd) is None


def test_what_nested_calls_ignored_stays_ignored() -> None:
    """An enclosing call does not take what a nested unit's call has left alone (E-INIT-9)."""
    model = mlp()
    fully_shard(model.blocks[1], auto_wrap_policy=None, ignored_modules=[model.blocks[1].up])
    fully_shard(model, ignored_states=[model.stem.bias])
    assert managed(model) == {n for n, _ in model.named_parameters()} - names_below(model, "blocks.1.up") - {
        "stem.bias"
    }


def test_nested_units_in_ignored_modules_are_units_still() -> None:
    """Ignoring a module covers its subtree but for nested units (E-INIT-9)."""
    model = mlp()
    fully_shard(model.blocks[1], auto_wrap_policy=None)
    fully_shard(model, ignored_modules=[model.blocks])
    assert managed(model) == names_below(model, "blocks.1", "stem", "head")
    assert units(model.blocks[1]) and not units(model.blocks[0])


def test_modules_of_another_sharding_api_are_ignored() -> None:
    """A submodule that torch's own `fully_shard` has is left to it (E-INIT-9)."""
    model = mlp()
    torch.distributed.fsdp.fully_shard(model.blocks[1], mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    fully_shard(model)
    assert managed(model) == {n for n, _ in model.named_parameters()} - names_below(model, "blocks.1")
    refused(model.blocks[1], ValueError, "model: expected a module that is not sharded, found FSDPResidual")


def test_ignoring_the_model_itself_warns() -> None:
    """UserWarning; then nothing is sharded (E-INIT-10, E-ERR-54)."""
    model = mlp()
    with pytest.warns(UserWarning, match="ignored modules: found the model itself, Stack; all of it is ignored"):
        fully_shard(model, ignored_modules=[model])
    assert not managed(model) and isinstance(model, FSDPModule)
    model(torch.ones(1, 7)).sum().backward()


def test_wrong_ignored_arguments() -> None:
    """Both, mixtures, other things, units: ValueError with the types in order; no iterable: TypeError (E-INIT-7, 8)."""
    model = mlp()
    refused(model, ValueError, "ignored_modules and ignored_states: expected at most one, found both",
            ignored_modules=[], ignored_states=[])  # fmt: skip
    refused(model, ValueError, "ignored_states: expected modules only or parameters only, found Linear, Parameter",
            ignored_states=[model.stem, model.stem.weight])  # fmt: skip
    refused(model, ValueError, "ignored_states: .*found Tensor, str", ignored_states=["stem", torch.ones(1)])
    refused(model, ValueError, "ignored_modules: expected modules, found Linear, Parameter",
            ignored_modules=[model.stem, model.stem.weight])  # fmt: skip
    refused(model, TypeError, "ignored_modules: expected an iterable, found int", ignored_modules=3)
    refused(model, TypeError, "ignored_states: expected an iterable, found Linear", ignored_states=model.stem)
    fully_shard(model.blocks[0])
    refused(model, ValueError, "found the unit FSDPResidual; ignore it before", ignored_modules=[model.blocks[0]])


# --- deferred initialisation ------------------------------------------------------------------------------------------


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


def test_values_are_those_of_a_model_made_outright() -> None:
    """One unit, one generator: a deferred layer gets the values that it would have had (E-META-3)."""
    torch.manual_seed(3)
    plain = nn.Linear(5, 4)
    deferred = nn.Linear(5, 4, device="meta")
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="over one rank"):
        fully_shard(deferred, process_group=alone())
    assert torch.equal(plain.weight, deferred.weight) and torch.equal(plain.bias, deferred.bias)


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
    with torch.device("meta"):
        model = nn.Sequential(Sevens(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    for shards, policy in ((whole, None), (whole, {Sevens}), (fully_shard, {Sevens})):
        with torch.device("meta"):
            model = nn.Sequential(Sevens(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        shards(model, auto_wrap_policy=policy)  # type: ignore[operator]
        assert model[0].weight is model[1].weight
        assert (model[0].weight == 7).all() and not (model[1].bias == 7).any()


def test_param_init_fn_is_called_breadth_first() -> None:
    """Every module that owns nothing or meta tensors, in order, once; modules of real values are not (E-META-2, 4)."""
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        if isinstance(module, nn.Linear):
            assert module.weight.is_meta
            module.to_empty(device="cpu", recurse=False)
            nn.init.constant_(module.weight, 7.0)

    inner = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Tanh())
    model = nn.Sequential(inner, nn.Linear(2, 2, device="meta"), nn.ReLU(), nn.Linear(2, 2))
    weights = [inner[0].weight, model[1].weight]
    with torch.no_grad():
        model[3].weight.fill_(1.0)
    whole(model, auto_wrap_policy=None, param_init_fn=init)
    assert seen == [model, inner, model[1], model[2], inner[0], inner[1]]
    assert weights == [inner[0].weight, model[1].weight] and all((w == 7).all() for w in weights)
    assert (model[3].weight == 1).all()


def test_param_init_fn_by_units() -> None:
    """Nested units go first, and their modules are not passed again; units without meta tensors are not entered."""
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        module.to_empty(device="cpu", recurse=False)

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2, device="meta")), nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    model.bias = nn.Parameter(torch.empty(2, device="meta"))
    model.scale = nn.Parameter(torch.ones(2))
    fully_shard(model, auto_wrap_policy=CustomPolicy(lambda m: m in (model[0], model[1])), param_init_fn=init)
    assert seen == [model[0], model[0][0], model, model[2]]


def test_attributes_and_requires_grad_survive() -> None:
    """What was set on a meta parameter is there afterwards, whatever makes the new one."""
    for init in (None, lambda module: module.to_empty(device="cpu", recurse=False)):
        model = nn.Linear(2, 2, device="meta")
        model.bias.requires_grad_(False)
        model.weight.is_special = True  # type: ignore[attr-defined]
        whole(model, param_init_fn=init)
        assert model.weight.is_special and not model.bias.requires_grad and model.weight.requires_grad


def test_units_are_materialised_one_by_one() -> None:
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
        (leaves_it, "found it on the meta device; call module.to_empty"),
        (removes, "found nothing"),
        (reshapes, r"expected shape and dtype \(\(2, 2\), torch.float32\) after initialising, found \(\(3,\)"),
    ],
)
def test_what_param_init_fn_leaves_is_checked(init: Callable[[nn.Module], None], message: str) -> None:
    """A tensor that is still on meta, gone or other than before: ValueError with its name."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False, device="meta"))
    with pytest.raises(ValueError, match=f"parameter 0.weight: .*{message}"):
        fully_shard(model, auto_wrap_policy={nn.Linear}, param_init_fn=init)


def test_param_init_fn_must_be_callable() -> None:
    """ValueError with the type (E-META-2, E-ERR-61)."""
    refused(mlp(), ValueError, "param_init_fn: expected a callable .*found int", param_init_fn=3)


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(2, device="meta")) for _ in range(2))


def test_modules_that_cannot_be_initialised_are_refused() -> None:
    """Without `reset_parameters`: ValueError with the module, before anything is changed (E-META-3)."""
    refused(
        nn.Sequential(nn.Linear(2, 2), NoReset()),
        ValueError,
        r"module 1: expected reset_parameters\(\) to initialise weight, bias, found none in NoReset; pass param_init",
    )


def test_weakly_held_meta_parameters_are_refused() -> None:
    """A weak reference cannot follow a parameter to its device: ValueError with the name."""
    model = nn.Linear(2, 2, device="meta")
    held = weakref.ref(model.bias)
    refused(model, ValueError, "parameter bias: expected a meta tensor that nothing refers to weakly")
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


# --- parameters of unusual shapes -------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A linear layer times a 0-d parameter, plus a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.tensor(2.0)), nn.Linear(3, 3)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scale.shape == () and self.empty.shape == (0, 3)
        return self.linear(x) * self.scale + self.empty.sum()


def test_scalars_are_sharded() -> None:
    """A 0-d parameter is laid out like any other and is 0-d again in forward (E-FLAT-11, E-LIM-12)."""
    model = fully_shard(Scaled())
    (unit,) = units(model)
    assert () in unit.shapes and managed(model) == {"scale", "linear.weight", "linear.bias", "empty"}
    model(torch.ones(1, 3)).sum().backward()
    record = unit.records[unit.names.index("scale")]
    assert model.scale.shape == ((1,) if record else (0,))


def test_units_without_elements() -> None:
    """A unit whose parameters have no elements has no data and no collective; it runs and trains (E-FLAT-12)."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 0))
    fully_shard(model, auto_wrap_policy={nn.Linear})
    assert model[1]._fsdp_scope == () and model[1].weight.shape == (0, 3)
    assert len(units(model)) == 1
    model(torch.ones(1, 3)).sum().backward()


# --- settings of units ------------------------------------------------------------------------------------------------


def test_settings_reach_all_units() -> None:
    """Strategy and groups of the call are those of every unit (E-INIT-5, E-PG-9)."""
    model = fully_shard(mlp(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert {unit.reshard_after_forward for unit in units(model)} == {False}
    assert {unit.group for unit in units(model)} == {dist.group.WORLD}


def test_no_strategy_means_full_shard() -> None:
    """None is FULL_SHARD (E-STRAT-8)."""
    assert {unit.reshard_after_forward for unit in units(fully_shard(mlp(), sharding_strategy=None))} == {True}


def test_a_custom_policy_sets_strategies() -> None:
    """A module may have another strategy than the model (E-INIT-5)."""
    model = mlp()
    keep = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    copy = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    own = {model.blocks[0]: keep, model.blocks[1]: copy, model.blocks[2]: True}
    fully_shard(model, auto_wrap_policy=CustomPolicy(lambda module: own.get(module, False)))
    (first,), (second,), (third,) = (units(block) for block in model.blocks)
    assert [u.reshard_after_forward for u in (first, second, third)] == [False, False, True]
    assert [u.flats[0].layout.world_size for u in (first, second, third)] == [WORLD_SIZE, 1, WORLD_SIZE]


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"mixed": 1, "depth": 2}, ValueError, "expected settings among sharding_strategy for module blocks.1, found "
         "depth, mixed"),
        ({"sharding_strategy": "NO_SHARD"}, TypeError, "expected a ShardingStrategy for module blocks.1, found str"),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, ValueError, "hybrid strategies for all units or for none"
         ", found HYBRID_SHARD for module blocks.1 in a model of FULL_SHARD"),
    ],
)  # fmt: skip
def test_settings_that_units_cannot_have(own: dict[str, Any], error: type[Exception], message: str) -> None:
    """Settings that only the call has, or that need other groups: an error with module and setting (E-INIT-5)."""
    model = mlp()
    policy = CustomPolicy(lambda module: own if module is model.blocks[1] else False)
    refused(model, error, f"auto_wrap_policy: {message}" if error is TypeError else message, auto_wrap_policy=policy)


@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
def test_hybrid_strategies_with_one_rank_or_one_replica(strategy: ShardingStrategy) -> None:
    """One rank to shard over: copies over all replicas, with one warning (E-STRAT-6, 9). One replica: sharding."""
    with pytest.warns(UserWarning, match=f"{strategy.name} over one rank is NO_SHARD") as caught:
        model = fully_shard(mlp(), sharding_strategy=strategy, devices_per_node=1)
    assert len(caught) == 1
    assert {(u.flats[0].layout.world_size, u.group.size()) for u in units(model)} == {(1, WORLD_SIZE)}
    model = fully_shard(mlp(), sharding_strategy=strategy, devices_per_node=WORLD_SIZE)
    assert {(u.flats[0].layout.world_size, u.group.size()) for u in units(model)} == {(WORLD_SIZE, WORLD_SIZE)}


def test_containers_warn() -> None:
    """What has no forward that would gather it: UserWarning with its path (E-INIT-2, E-ERR-37)."""
    made = {
        nn.ModuleList: lambda: nn.ModuleList([nn.Linear(2, 2)]),
        nn.ModuleDict: lambda: nn.ModuleDict({"m": nn.Linear(2, 2)}),
        nn.ParameterList: lambda: nn.ParameterList([torch.ones(2)]),
        nn.ParameterDict: lambda: nn.ParameterDict({"p": torch.ones(2)}),
    }
    for kind, make in made.items():
        message = f"expected a module with a forward, found a {kind.__name__}, whose own parameters are never gathered"
        with pytest.warns(UserWarning, match=f"module model: {message}"):
            fully_shard(make())
        with pytest.warns(UserWarning, match=f"module 0: {message}"):
            fully_shard(nn.Sequential(make()), auto_wrap_policy={kind})


def test_warnings_point_at_the_caller() -> None:
    """A warning names the line that called `fully_shard`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]), process_group=alone())
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)] * 2


# --- devices and broadcast --------------------------------------------------------------------------------------------


def test_device_id() -> None:
    """The CPU is a device like others; a device that is not there is refused (E-INIT-12, 14, E-GEN-1)."""
    for given in (None, torch.device("cpu"), torch.device("cpu:0")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert {u.flats[0].shard.device.type for u in units(fully_shard(mlp(), device_id=given))} == {"cpu"}
    refused(mlp(), TypeError, "device_id: expected an int", device_id="cpu")
    refused(mlp(), ValueError, "device_id: .*found meta", device_id=torch.device("meta"))


def test_broadcast_needs_tensors_that_the_group_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU buffer outside of what is moved, in a group for accelerators: ValueError with its name (E-SYNC-4)."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr("fsdp_compile.plan.compute_device", lambda *_: torch.device("cpu"))
    message = (
        r"parameter blocks.0.up.weight: expected .*from \(cuda\) for sync_module_states, found cpu; pass device_id"
    )
    refused(mlp(), ValueError, message, sync_module_states=True)
    monkeypatch.setattr("fsdp_compile.plan.compute_device", lambda *_: torch.device("cuda:0"))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    refused(
        model, ValueError, "buffer 1.running_mean: .*found cpu", sync_module_states=True, ignored_modules=[model[1]]
    )


# --- parameters that cannot be sharded --------------------------------------------------------------------------------


def with_parameter(param: nn.Parameter) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].extra = param
    return model


def test_parameters_of_other_apis_are_refused() -> None:
    """Flat parameters of torch's wrapper and distributed tensors: ValueError with the name (E-FLAT-9, E-ERR-19)."""
    flat = FlatParameter(torch.ones(2))
    flat._is_flat_param = True
    refused(
        with_parameter(flat), ValueError, "parameter 0.extra: expected an original parameter, found a FlatParameter"
    )
    spread = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (WORLD_SIZE,))))
    refused(with_parameter(spread), ValueError, "parameter 0.extra: expected a plain tensor, found a DTensor")


def test_gradients_are_refused() -> None:
    """A gradient in full shape does not fit a shard: ValueError with the name and the remedy."""
    model = mlp()
    model(torch.ones(1, 7)).sum().backward()
    refused(model, ValueError, re.escape("expected no gradient before it is sharded, found one; call zero_grad()"))
