"""`fully_shard`: refusals, identity, classes, nesting, strategies; on a fake group, so without values."""

import copy
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from conftest import RANK, WORLD_SIZE
from models import GPT, mlp, tied_blocks, tied_ends
from refusing import local, refused, units
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from fsdp_compile import (
    DataParallelMeshDims,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    ShardingStrategy,
    fully_shard,
)
from fsdp_compile.api import _warn_of_untested_torch, shard_module
from fsdp_compile.construct.arguments import FSDP1, warn_of_fsdp1
from fsdp_compile.core.sharding import original_class
from fsdp_compile.core.unit import GradientDelivery, unit_of
from fsdp_compile.fsdp_module import _warn_of_symmetric_memory
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

T = TypeVar("T")


def test_reshard_after_forward_is_a_strategy() -> None:
    """True and False are FULL_SHARD and SHARD_GRAD_OP; they may stand beside a strategy that says the same."""
    for choice, strategies in ((True, (None, "FULL_SHARD")), (False, (None, "SHARD_GRAD_OP"))):
        for name in strategies:
            strategy = ShardingStrategy[name] if name else None
            model = fully_shard(mlp(), reshard_after_forward=choice, sharding_strategy=strategy)
            assert [unit.reshard_after_forward for unit in units(model)] == [choice] * 4
    mesh = init_device_mesh("cpu", (2, 2))
    hybrid = fully_shard(
        mlp(), mesh=mesh, reshard_after_forward=False, sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2
    )
    assert not any(unit.reshard_after_forward for unit in units(hybrid))


LOW = torch.bfloat16
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({"reshard_after_forward": choice, "sharding_strategy": ShardingStrategy[name]}, ValueError,
       f"reshard_after_forward={choice} contradicts {name}; pass only one of them")
      for name, choice in (("FULL_SHARD", False), ("SHARD_GRAD_OP", True), ("NO_SHARD", True), ("NO_SHARD", False))),
    *(({"reshard_after_forward": 2, "sharding_strategy": ShardingStrategy[name]}, ValueError,
       f"reshard_after_forward=2 contradicts {name}") for name in ("SHARD_GRAD_OP", "NO_SHARD")),
    ({"reshard_after_forward": "yes"}, ValueError, "expected a bool, a number of ranks or 'auto', found 'yes'"),
    ({"reshard_after_forward": 2.0}, TypeError, "reshard_after_forward: expected"),
    *(({"reshard_after_forward": choice}, ValueError,
       f"reshard_after_forward={choice}, .*does not divide the 4 ranks to shard over") for choice in (3, 8, 0, -2)),
    ({"auto_wrap_policy": 3}, TypeError, "auto_wrap_policy"),
    ({"sharding_strategy": "FULL_SHARD"}, TypeError, "sharding_strategy: expected a ShardingStrategy or None"),
    ({"mixed_precision": LOW}, TypeError, "mixed_precision: expected a MixedPrecision or None, found dtype"),
    ({"cpu_offload": True}, TypeError, "cpu_offload: expected a CPUOffload or None, found bool"),
    ({"sync_module_states": "no"}, TypeError, "sync_module_states: expected a bool, found str"),
    ({"backward_prefetch": False}, TypeError, "backward_prefetch: expected a BackwardPrefetch or None, found bool"),
    ({"forward_prefetch": 1}, TypeError, "forward_prefetch: expected a bool, found int"),
    ({"limit_all_gathers": None}, TypeError, "limit_all_gathers: expected a bool, found NoneType"),
    ({"shard_placement_fn": 3}, TypeError, "shard_placement_fn: expected a Callable or None, found int"),
    ({"param_init_fn": 3}, ValueError, "param_init_fn must be a callable .*not a int"),
    *(({"mixed_precision": MixedPrecision(**{name: "bf16"})}, TypeError,  # type: ignore[arg-type]  # that is the point
       f"{name}: expected a dtype or None, found str") for name in ("param_dtype", "reduce_dtype", "buffer_dtype")),
    *(({"mp_policy": MixedPrecisionPolicy(**{name: "bf16"})}, TypeError,  # type: ignore[arg-type]  # likewise
       f"{name}: expected a dtype or None, found str") for name in ("param_dtype", "reduce_dtype")),
    *(({"mixed_precision": MixedPrecision(reduce_dtype=dtype)}, ValueError,
       f"reduce_dtype: expected a dtype of floating-point numbers or None, found {dtype}")
      for dtype in (torch.int8, torch.bool, torch.int64)),
    *(({"mixed_precision": MixedPrecision(**{name: "yes"})}, TypeError, f"{name}: expected a bool, found str")
      for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs")),
    *(({"device_id": name}, ValueError, "device_id: expected the name of a device") for name in ("gpu", "cuda:x", "")),
    ({"device_id": 1.0}, TypeError, "device_id: expected an int"),
    ({"device_id": torch.device("meta")}, ValueError, "device_id: the meta device"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Types, values and contradictions: the error names the argument and what was found, and nothing is sharded.

    E-META-2, E-ERR-61.
    """
    refused(mlp(), error, message, **options)


def _with(param: Tensor) -> nn.Module:
    model = mlp()
    model.blocks[1].down.extra = param if isinstance(param, nn.Parameter) else nn.Parameter(param, requires_grad=False)
    return model


def _of_another_api() -> nn.Module:
    flat = FlatParameter(torch.ones(2))
    flat._is_flat_param = True
    return _with(flat)


def _of_a_mesh() -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    return _with(nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])))


def _with_gradients() -> nn.Module:
    model = mlp()
    model(torch.ones(1, 7)).sum().backward()
    return model


CANNOT_BE_SHARDED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no module": (lambda: "model", TypeError, "module: expected a torch.nn.Module or a list of them, found str"),
    "twice": (lambda: fully_shard(mlp()), ValueError, "module: FSDPStack is sharded already"),
    "complex": (lambda: _with(torch.ones(2, dtype=torch.complex64)), ValueError,
                r"blocks.1.down.extra is complex \(torch.complex64\); .*view_as_real"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(2)), ValueError, "parameter 0.weight is lazy .*; run a forward"),
    "of torch's wrapper": (_of_another_api, ValueError, "parameter blocks.1.down.extra is a FlatParameter"),
    "over the same ranks": (_of_a_mesh, ValueError, "parameter blocks.1.down.extra is distributed over ranks"),
    "with gradients": (_with_gradients, ValueError, re.escape("has a gradient; call zero_grad()")),
}  # fmt: skip


@pytest.mark.parametrize("why", CANNOT_BE_SHARDED)
def test_models_that_cannot_be_sharded_are_refused(why: str) -> None:
    """The error has the parameter's full name, what was found, and the remedy; nothing is sharded.

    E-FLAT-9, E-GEN-5, E-ERR-19, E-ERR-67.
    """
    build, error, message = CANNOT_BE_SHARDED[why]
    refused(build(), error, message)


def test_where_nothing_can_be_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under inference_mode, as what is made must train, and without a process group, with the remedy."""
    with torch.inference_mode():
        refused(mlp(), RuntimeError, "outside inference_mode")
    for wrong in (3, None, [mlp()]):
        with pytest.raises(TypeError, match="module: expected a torch"):
            FullyShardedDataParallel(wrong)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    refused(mlp(), RuntimeError, "process_group: there is no default group yet; call .*init_process_group")


def test_numbers_of_ranks_that_say_true_or_false() -> None:
    """As in torch, all ranks mean True, and 1 means False, with a warning: True may have been meant."""
    model = fully_shard(mlp(), reshard_after_forward=WORLD_SIZE)
    assert all(unit.reshard_after_forward and len(unit.stages) == 1 for unit in units(model))
    with pytest.warns(UserWarning, match="reshard_after_forward: 1, a number of ranks, means False"):
        model = fully_shard(mlp(), reshard_after_forward=1)
    assert not any(unit.reshard_after_forward for unit in units(model))


def test_which_error_wins() -> None:
    """Types come first, then what is ignored, devices, groups, the policy, and parameters in the end (E-INIT-1).

    That is the order of torch's wrapper; unlike there, nothing was changed whichever it is.
    """
    complex_one = _with(torch.ones(2, dtype=torch.complex64))
    wrong = {
        "mixed_precision: expected": dict(mixed_precision="bf16"),
        "ignored_modules": dict(ignored_modules=[3]),
        "device_id: expected": dict(device_id=0.5),
        "mesh must be": dict(mesh=(2, 2)),
        "auto_wrap_policy": dict(auto_wrap_policy="blocks"),
        "extra is complex": {},
    }
    while wrong:
        arguments = {name: value for given in wrong.values() for name, value in given.items()}
        first = next(iter(wrong))
        refused(complex_one, (TypeError, ValueError), first, **arguments)
        del wrong[first]


def test_names_of_fsdp1_are_announced() -> None:
    """Each warns once, with what to write in its place, and does what it did; the wrapper has them as before."""
    warn_of_fsdp1.cache_clear()
    options = inspect.signature(shard_module).parameters
    assert options.keys() - inspect.signature(fully_shard).parameters.keys() == FSDP1.keys()
    for name, instead in FSDP1.items():
        with pytest.warns(
            UserWarning, match=f"fully_shard: {name}, which FSDP2 does not have, goes .*; write {re.escape(instead)}"
        ):
            fully_shard(mlp(), **{name: options[name].default})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fully_shard(mlp(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, forward_prefetch=True)
        FullyShardedDataParallel(mlp(), forward_prefetch=True)
    assert model._fsdp.settings.strategy is ShardingStrategy.SHARD_GRAD_OP and model._fsdp.settings.forward_prefetch
    with pytest.raises(TypeError, match=r"fully_shard\(\) got an unexpected keyword argument 'strategy'"):
        fully_shard(mlp(), strategy="FULL_SHARD")


def test_models_without_parameters() -> None:
    """A module without any parameter is accepted: nothing is communicated (E-ERR-17)."""
    model = fully_shard(nn.Sequential(nn.ReLU()))
    assert isinstance(model, FSDPModule) and torch.equal(model(torch.ones(2)), torch.ones(2))


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum(expert(x) * gate for expert, gate in zip(self.experts, self.gate(x).split(1, -1), strict=True))


def test_divided_blocks_become_one_unit() -> None:
    """Blocks that were sharded by calls of their own are one unit each, as in FSDP2, also where "auto" divided them."""
    alone: Any = fully_shard(_Experts())
    assert len(units(alone)) == 4
    model: Any = nn.Sequential(_Experts(), _Experts(), nn.Linear(4, 4))
    params, classes = list(model.parameters()), type(model[0].experts[0])
    for block in model[:2]:
        fully_shard(block)
    fully_shard(model)
    assert [len(unit.params) for unit in units(model)] == [8, 8, 2]
    assert [id(param) for param in model.parameters()] == [id(param) for param in params]
    assert [type(m) for m in FSDPModule.fsdp_modules(model)] == [type(model), type(model[0]), type(model[1])]
    assert type(model[0].experts[0]).__mro__[2] is classes
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_parameters_keep_identity_and_lie_in_one_shard() -> None:
    """The same parameter objects under the same names and of the same shapes, sharded tensors whose local parts, 1-D,
    lie in one storage per unit; slices as the layout says.

    I1, E-VIEW-6, E-VIEW-7, E-LIM-18.
    """
    model = mlp()
    before = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    assert fully_shard(model) is model
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    names = {p: name for name, p in after.items()}
    for unit in units(model):
        assert unit.rank == RANK
        for param, record in zip(unit.params, unit.records, strict=True):
            full = values[names[param]]
            expected = full.flatten()[record.first : record.last + 1] if record else torch.empty(0)
            assert isinstance(param, ShardedTensor) and isinstance(param, nn.Parameter)
            assert param.shape == full.shape and torch.equal(param.to_local().detach(), expected)
            assert (
                not record
                or param.to_local().untyped_storage().data_ptr() == unit.flats[0].shard.untyped_storage().data_ptr()
            )


def test_classes_stay_what_they_were() -> None:
    """isinstance, class names of layers, repr, attributes and forward's signature as before; units are FSDPModules."""
    model, plain = fully_shard(GPT()), GPT()
    assert isinstance(model, GPT) and isinstance(model, FSDPModule)
    assert isinstance(model.head, nn.Linear) and not isinstance(model.head, FSDPModule)
    assert all(isinstance(block, FSDPModule) for block in model.blocks)
    without_units = re.sub(r"\n *unit: .*", "", repr(model))
    assert without_units == re.sub(r"\b(GPT|Block)\(", r"FSDP\1(", repr(plain)).replace("x Block", "x FSDPBlock")
    assert [original_class(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert list(inspect.signature(model.forward).parameters) == ["tokens"]
    with pytest.raises(AttributeError, match="nothing"):
        model.head.nothing  # noqa: B018  (looking it up raises)


def test_classes_are_shared_by_equal_blocks_only() -> None:
    """Equal modules of equal blocks have one class, so that they share compiled code; other settings, another class."""
    full, kept = fully_shard(mlp()), fully_shard(mlp(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert type(full.blocks[0]) is type(full.blocks[1]) is not type(kept.blocks[0])
    assert type(full.blocks[0].up) is type(kept.blocks[2].up) is not type(full.blocks[0].down)
    assert {u.reshard_after_forward for u in units(full)} == {None}
    assert {u.reshard_after_forward for u in units(kept)} == {False}


def test_deepcopy_is_independent() -> None:
    """A copy has parameters, shard and units of its own with equal values, and ties parameters as the original does."""
    model = fully_shard(GPT(tied=True), process_group=dist.group.WORLD)  # a group cannot be copied
    other = copy.deepcopy(model)
    assert other.head.weight is other.tokens.weight is not model.tokens.weight
    assert not set(units(model)) & set(units(other))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(mine), local(theirs))
        with torch.no_grad():
            theirs.fill_(7.0)
    assert not any((local(p) == 7.0).any() for p in model.parameters())
    assert all((u.flats[0].shard == 7.0).any() for u in units(other))


def test_a_copy_made_inside_no_sync_synchronises() -> None:
    """Nothing would ever switch the copy's reduces on again; the original's come back at the end of no_sync."""
    model = fully_shard(mlp())
    with model.no_sync():
        other = copy.deepcopy(model)
        assert {unit.syncs for unit in units(model)} == {False}
        assert {unit.syncs for unit in units(other)} == {True}
        assert {unit.delivery for unit in units(other)} == {GradientDelivery.REDUCE_WITH_ACCUMULATED}
        other(torch.ones(1, 7)).sum().backward()
    assert all(local(param.grad).shape == local(param).shape for param in other.parameters())
    assert {unit.syncs for unit in units(model)} == {True}


def test_nested_calls_keep_inner_units() -> None:
    """Submodules that are sharded already keep their units; "auto" takes the rest as one unit (E-FLAT-7)."""
    model = mlp()
    inner = fully_shard(model.blocks[1], auto_wrap_policy=None)
    kept = units(inner)
    fully_shard(model)
    assert units(model.blocks[1]) == kept and len(units(model)) == 2
    assert units(model.stem) == units(model.blocks[0])
    assert model.is_root() and not inner.is_root()


def test_a_policy_and_a_unit_without_parameters_of_its_own() -> None:
    """Where inner units take all parameters, the enclosing unit is empty: legal, no collective (E-GEN-6)."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert isinstance(model, FSDPModule) and model._fsdp.units == ()
    assert len(units(model)) == 2


def test_tied_parameters_have_one_place() -> None:
    """A parameter used in several units belongs to one, which one module gathers around all its users.

    E-FLAT-2, E-GEN-7.
    """
    for model, scope in ((tied_blocks(), ""), (tied_ends(), ""), (GPT(tied=True), "")):
        count = len(list(model.parameters()))
        fully_shard(model)
        assert sum(len(u.params) for u in units(model)) == count
        shared = model.get_submodule(scope)
        scopes = [id(u) for m in model.modules() if "_fsdp" in m.__dict__ for u in m._fsdp.units]
        assert len(scopes) == len(set(scopes)) == len(units(model)), "a unit is gathered by one module"
        assert shared._fsdp.units


def test_tied_parameters_across_nested_calls() -> None:
    """Two submodules sharded one by one share a parameter: once their parent is sharded it is gathered around both."""
    model = tied_ends()
    for child in model:
        fully_shard(child, auto_wrap_policy=None)
    fully_shard(model)
    first = unit_of(model[0].weight)
    assert first is not None and first == unit_of(model[3].weight)
    assert first[0] in model._fsdp.units and first[0] not in model[0]._fsdp.units


def test_one_rank_means_no_shard() -> None:
    """A group of one rank: a UserWarning that names the strategy asked for, and all elements here.

    E-STRAT-6, E-STRAT-8, E-VIEW-8, E-INIT-17, E-ERR-57.
    """
    alone = [dist.new_group([rank]) for rank in range(WORLD_SIZE)][RANK]
    model = mlp()
    shapes = [p.shape for p in model.parameters()]
    with pytest.warns(UserWarning, match="FULL_SHARD over one rank is NO_SHARD"):
        fully_shard(model, process_group=alone)
    assert [p.shape for p in model.parameters()] == shapes
    assert all(p.to_local().numel() == p.numel() for p in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard_module(mlp(), process_group=alone, sharding_strategy=ShardingStrategy.NO_SHARD)
        shard_module(mlp(), sharding_strategy=ShardingStrategy.NO_SHARD)  # over several: here to stay (E-STRAT-7)


class _Scaled(Tensor):
    """An int8 tensor and its scale, seen as one float32 tensor."""

    stored: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor, scale: Tensor) -> "_Scaled":
        return Tensor._make_wrapper_subclass(cls, stored.shape, dtype=scale.dtype)  # type: ignore[attr-defined]  # torch

    def __init__(self, stored: Tensor, scale: Tensor) -> None:
        self.stored, self.scale = stored, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default
        return cls(args[0].stored, args[0].scale)


class _Joinable(_Scaled):
    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> "_Joinable":
        return cls(inner["stored"], inner["scale"])


@pytest.mark.parametrize(
    ("kind", "trains", "found"),
    [
        (_Scaled, False, "_Scaled has __tensor_flatten__ but no __tensor_unflatten__"),
        (_Joinable, True, "trains and is a _Joinable, a subclass around other tensors"),
        (_Joinable, False, r"a _Joinable must be around contiguous plain tensors with values, found a Tensor of shape"),
    ],
)
def test_tensor_subclasses_are_refused(kind: type[_Scaled], trains: bool, found: str) -> None:
    """A subclass around two tensors that trains, or cannot be put together: ValueError with its name."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    scaled = kind(torch.ones(2, 3, dtype=torch.int8).t(), torch.ones(()))
    model[0].weight = weight = nn.Parameter(scaled, requires_grad=trains)
    with pytest.raises(ValueError, match=f"parameter 0.weight.* {found}"):
        fully_shard(model)
    assert model[0].weight is weight and not isinstance(model, FSDPModule)


def test_repr_names_units() -> None:
    """`repr` adds parameters, strategy, precision and shard bytes of each unit to what the module's own class says."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), mixed_precision=MixedPrecision(torch.bfloat16))
    assert "unit: 2 parameters, FULL_SHARD over 4 ranks, float32, computed in bfloat16, shard of " in repr(model)
    assert "in_features=4, out_features=4, bias=True" in repr(model)


def test_a_newer_torch_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fully_shard under a torch that no test has seen warns, with the command that checks it."""
    _warn_of_untested_torch.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.warns(UserWarning, match=r"torch 2.99.0 is newer than .*`fsdp-compile selfcheck`") as caught:
        fully_shard(nn.Linear(2, 2))
        fully_shard(nn.Linear(2, 2))
    assert len(caught) == 1 and caught[0].filename == __file__


class _Loose(nn.Module, Generic[T]):
    """A module whose class has a `__new__`, a `__slots__` and a base of its own behind `nn.Module`."""

    __slots__ = ("more",)

    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.more, self.weight = width, nn.Parameter(torch.ones(width, width))


@pytest.mark.parametrize("kind", [_Loose, nn.LSTM])
def test_torch_finds_its_class(kind: Any) -> None:
    """A sharded module is an instance of torch's FSDPModule and of this package's; one that torch has sharded is not
    of the latter. Slices and copies are what they were, whatever the original class has of its own."""
    model = fully_shard(kind(4, *([4] if kind is nn.LSTM else [])))
    assert isinstance(model, fsdp2.FSDPModule) and isinstance(model, FSDPModule) and isinstance(model, kind)
    copied = copy.deepcopy(model)
    assert type(copied) is type(model) and isinstance(copied, fsdp2.FSDPModule)
    sliced = fully_shard(nn.Sequential(kind(4, *([4] if kind is nn.LSTM else [])), nn.Tanh()))[:1]
    assert type(sliced) is nn.Sequential and isinstance(sliced[0], kind)
    other = fsdp2.fully_shard(nn.Linear(4, 4))
    assert isinstance(other, fsdp2.FSDPModule) and not isinstance(other, FSDPModule)
    with pytest.raises(ValueError, match="torch has sharded this FSDPLinear already"):
        fully_shard(other)
    with pytest.raises(AssertionError, match="only be applied to a module once"):
        fsdp2.fully_shard(model)
    with pytest.raises(TypeError, match="FSDPModule cannot be called"):
        FSDPModule()
    assert fsdp2.fully_shard.state(model)._mp_policy == MixedPrecisionPolicy(cast_forward_inputs=False)
    with pytest.raises(AttributeError, match="_comm_ctx: the state of a module of fsdp_compile has no such attribute"):
        _ = fsdp2.fully_shard.state(model)._comm_ctx


def test_hints_warn_once() -> None:
    """`set_symm_mem_for_comm` changes no value: the first call warns, and later ones say nothing."""
    _warn_of_symmetric_memory.cache_clear()
    model = fully_shard(mlp())
    with pytest.warns(UserWarning, match="set_symm_mem_for_comm has no effect"):
        model.set_symm_mem_for_comm()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_symm_mem_for_comm("NCCL")


def test_plain_parameters_beside_other_dimensions() -> None:
    """Where `dp_mesh_dims` leaves a dimension above one, a plain parameter may be a part or all of a tensor: it is
    refused by name, unless it is ignored. One rank beside changes nothing."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dims, model = DataParallelMeshDims(shard="dp"), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[1], mesh=mesh["dp"])
    refused(model, ValueError, "parameter 0.weight is no DTensor.*tp of 2 ranks", mesh=mesh, dp_mesh_dims=dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims, ignored_params=set(model[0].parameters()))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    assert units(fully_shard(nn.Linear(8, 8), mesh=alone, dp_mesh_dims=dims))
