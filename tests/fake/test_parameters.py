"""What `parameters()`, attributes and `.grad` are at each moment of a model's life, for both entry styles."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from models import GPT, Residual, mlp
from refusing import local, units
from tiers import all_strategies
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._foreach_utils import _has_foreach_support
from torch.utils.checkpoint import checkpoint

from fsdp_compile import FullyShardedDataParallel, fully_shard, summon_full_params, wrapper
from fsdp_compile.core.flat_param import flat_param_at
from fsdp_compile.core.unit import unit_of
from fsdp_compile.tensors.sharded_tensor import ShardedTensor
from fsdp_compile.tensors.unsharded_tensor import UnshardedTensor
from fsdp_compile.wrapper import WRAPPED

styles = pytest.mark.parametrize("style", [fully_shard, FullyShardedDataParallel])


# --- which objects, in which shape ------------------------------------------------------------------------------------


def _moments(model: nn.Module) -> Iterator[str]:
    """The moments of a step outside of its forward, while they last."""
    yield "before"
    loss = model(torch.randn(3, 7)).sum()
    yield "between"
    loss.backward()
    yield "after"
    with summon_full_params(model):
        yield "summoned"
    model.double()
    yield "converted"


@styles
@all_strategies
def test_parameters_are_the_original_objects(style: Callable[..., Any], strategy: str) -> None:
    """At every moment `parameters()` yields the original objects under their names, all of them.

    They always have their full shape, and this rank's part in memory, but inside summon_full_params all elements.
    Within a forward those of units that it has gathered are what attributes are: full views (E-VIEW-10). Torch shows
    other things at some of these moments: views up to backward (E-VIEW-12) or, without original parameters, flat ones
    (E-VIEW-15), memory that is gone (E-VIEW-16), new ones when summoned (E-VIEW-17), none when converted
    (E-VIEW-18). When summoned they are the original ones, with all elements (E-VIEW-14).
    """
    plain = mlp()
    originals = dict(plain.named_parameters())
    shapes = {name: tuple(param.shape) for name, param in originals.items()}
    model = style(plain, sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy={Residual})
    stored = {name: tuple(local(param).shape) for name, param in originals.items()}
    assert all(len(shape) == 1 for shape in stored.values())

    def look(full: bool) -> None:
        found = {name.replace(f"{WRAPPED}.", ""): param for name, param in model.named_parameters()}
        assert list(found) == list(originals) and all(found[name] is originals[name] for name in found)
        assert {name: tuple(param.shape) for name, param in found.items()} == shapes
        kinds = {type(param) for param in found.values()}
        assert kinds == {UnshardedTensor if full else ShardedTensor}
        for name, param in found.items():
            here = local(param)
            assert here.numel() == param.numel() if full else tuple(here.shape) == stored[name]
            assert here.untyped_storage().nbytes() >= here.nbytes and unit_of(param) is not None

    def look_inside(*_: Any) -> None:
        found = dict(model.named_parameters())
        assert [name.replace(f"{WRAPPED}.", "") for name in found] == list(originals)
        for name, param in found.items():
            original = originals[name.replace(f"{WRAPPED}.", "")]
            assert param is model.get_parameter(name) and param.shape == original.shape
            if "blocks." in name and "blocks.1" not in name:  # of a unit that is not gathered
                assert param is original
            else:
                path, _, own = name.rpartition(".")
                assert type(param) is Tensor and param is getattr(model.get_submodule(path), own)

    plain.blocks[1].up.register_forward_pre_hook(look_inside)
    for moment in _moments(model):
        look(full=moment == "summoned")
        assert all(getattr(plain.stem, name) is originals[f"stem.{name}"] for name in ("weight", "bias")), moment
        if moment == "after":
            for param in originals.values():
                assert param.grad.shape == param.shape and local(param.grad).shape == local(param).shape


def test_no_parameter_is_left_over() -> None:
    """Every parameter is in exactly one unit, but for what is ignored: none would go unreduced (E-ERR-66)."""
    for policy in ("auto", None, {nn.Linear}, {Residual, nn.Linear}):
        for make in (mlp, lambda: GPT(tied=True)):
            model = make()
            ignored = next(model.parameters())
            fully_shard(model, auto_wrap_policy=policy, ignored_states=[ignored])
            listed = [param for unit in units(model) for param in unit.params]
            expected = [param for param in model.parameters() if param is not ignored]
            assert len(listed) == len(expected) and set(listed) == set(expected)


class _Special(nn.Parameter):
    """A parameter of a class of its own."""


def test_parameters_know_their_unit() -> None:
    """There is no class of flat parameters: the mark of a managed parameter is its unit, whatever its class (E-FLAT-8).

    Sharded ones are sharded tensors and parameters, and keep their attributes. One that is not managed has no unit.
    """
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].bias = _Special(torch.ones(3))
    model[0].bias.note = "its own"
    fully_shard(model, ignored_states=[model[1].weight])
    kinds = [ShardedTensor, ShardedTensor, nn.Parameter, ShardedTensor]
    assert [type(param) for param in model.parameters()] == kinds
    assert all(isinstance(param, nn.Parameter) for param in model.parameters()) and model[0].bias.note == "its own"
    assert [unit_of(param) is not None for param in model.parameters()] == [True, True, False, True]
    assert unit_of(nn.Parameter(torch.ones(3))) is None


# --- memory -----------------------------------------------------------------------------------------------------------


class _OneStorage(nn.Module):
    """Two parameters that are views of one tensor."""

    def __init__(self, storage: Tensor) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(part) for part in (storage[3:103], storage[110:]))


def test_shards_are_copies() -> None:
    """The full parameters' memory is released by fully_shard; what else lies in it is not touched (E-SHARD-2).

    So parameters may share memory with each other, or lie anywhere in it (E-ERR-23: refused in torch).
    """
    model = nn.Linear(40, 40)
    memory = [StorageWeakRef(param.untyped_storage()) for param in model.parameters()]
    fully_shard(model)
    assert all(weak.expired() for weak in memory)
    storage = torch.arange(300.0)
    model = fully_shard(_OneStorage(storage))
    storage.zero_()
    (unit,) = units(model)
    for param, record, first in zip(unit.params, unit.records, (3, 110), strict=True):
        values = torch.arange(300.0)[first + record.first : first + record.last + 1] if record else torch.empty(0)
        assert torch.equal(local(param.detach()), values)
    with torch.no_grad():
        next(param for param in model.parameters() if local(param).numel()).fill_(1.0)
    assert not storage.any()


def test_padding_can_be_seen() -> None:
    """A unit's description says how many elements are padding, if any: torch logs it (E-FLAT-20)."""
    (unit,) = units(fully_shard(nn.Linear(3, 5)))
    assert repr(unit) == "Unit(2 parameters, 64 elements of torch.float32 (44 of them padding), rank 1 of 4)"
    (unit,) = units(fully_shard(nn.Linear(16, 16, bias=False)))
    assert repr(unit) == "Unit(1 parameters, 256 elements of torch.float32, rank 1 of 4)"


# --- attributes -------------------------------------------------------------------------------------------------------


class _Guarded(nn.Linear):
    """Its own ways to read and set attributes: one more name for the weight, and nothing is set once it is sealed."""

    sealed = False

    def __getattr__(self, name: str) -> Any:
        return self.weight if name == "kernel" else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.sealed:
            raise AssertionError(f"{name} was set")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        assert self.kernel is self.weight and self.kernel.shape == (7, 7)
        return super().forward(x)


@pytest.mark.parametrize("unsafe", ["0", "1"])
def test_attributes_are_read_by_the_module_s_protocol(unsafe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's own `__getattr__` finds full parameters, as its registry does, and its `__setattr__` is never called.

    E-VIEW-4. What is put into the registry within a forward stays. So there is no protocol to bypass, and no switch
    that does (E-ENV-1).
    """
    monkeypatch.setenv("FSDP_USE_UNSAFE_SETATTR", unsafe)
    model = nn.Sequential(_Guarded(7, 7), _Guarded(7, 7))
    fully_shard(model, auto_wrap_policy={_Guarded})
    registry = dict(model[0]._parameters)

    def check(module: nn.Module, _: Any) -> None:
        now = module._parameters
        assert list(now) == list(registry) and all(now[name] is getattr(module, name) for name in now)
        module.register_parameter("more", None)
        module.register_parameter("less", None)
        del module._parameters["less"]

    _Guarded.sealed = True
    try:
        handle = model[0].register_forward_pre_hook(check)
        model(torch.randn(3, 7)).sum().backward()
        handle.remove()
    finally:
        _Guarded.sealed = False
    assert model[0].kernel is model[0].weight is registry["weight"]
    assert dict(model[0]._parameters) == {**registry, "more": None}


class _Removing(nn.Linear):
    """Removes its bias in forward."""

    def forward(self, x: Tensor, remove: Callable[[nn.Module], Any]) -> Tensor:  # type: ignore[override]
        remove(self)
        assert not hasattr(self, "bias")
        return x @ self.weight.t()


@pytest.mark.parametrize(
    "remove",
    [
        lambda module: delattr(module, "bias"),
        lambda module: module._parameters.pop("bias"),
        lambda module: module._parameters.pop("bias", None),
        lambda module: module._parameters.__delitem__("bias"),
    ],
)
def test_a_parameter_that_forward_removes_is_gone(remove: Callable[[nn.Module], Any]) -> None:
    """The module no longer finds it, though it has been gathered."""
    model = fully_shard(_Removing(3, 5))
    model(torch.randn(2, 3), remove)
    assert [name for name, _ in model.named_parameters()] == ["weight"]


def test_all_places_of_a_shared_parameter_see_one_view() -> None:
    """In forward and in backward the same plain tensor; else the same parameter (E-VIEW-5)."""
    model = fully_shard(GPT(tied=True))
    seen: list[type[Tensor]] = []

    def look(*_: Any) -> None:
        assert model.head.weight is model.tokens.weight
        assert model.head.weight.shape == (35, 20)
        seen.append(type(model.head.weight))

    model.norm.register_forward_hook(lambda module, args, out: look())
    model.norm.register_forward_hook(lambda module, args, out: out.register_hook(look) and None)
    model(torch.zeros(2, 9, dtype=torch.int64)).sum().backward()
    look()
    assert seen == [Tensor, Tensor, ShardedTensor]


class _Recomputed(Residual):
    """Notes its full weight in forward and when that is recomputed."""

    def __init__(self) -> None:
        super().__init__(7, 9)
        self.seen: list[Tensor] = []

    def _run(self, x: Tensor) -> Tensor:
        self.seen.append(self.up.weight)
        assert next(self.up.parameters()) is self.up.weight
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False)


@all_strategies
def test_recomputation_reads_the_tensors_of_forward(strategy: str) -> None:
    """What a unit's forward found is what its recomputation in backward finds, the same object, and gradients arrive.

    E-VIEW-11.
    """
    model = fully_shard(nn.Sequential(_Recomputed(), _Recomputed()), sharding_strategy=ShardingStrategy[strategy])
    model(torch.randn(3, 7)).sum().backward()
    for block in model:
        first, again = block.seen
        assert first is again and first.shape == (9, 7)
        assert all(param.grad is not None for param in block.parameters())


def test_a_parameter_deleted_before_backward() -> None:
    """Gradients go to parameters, not to attributes: one that was deleted since forward still gets its own.

    In torch that is an error that names it (E-GRAD-8, E-ERR-30); here reading it is.
    """
    model = fully_shard(mlp())
    loss = model(torch.randn(3, 7)).sum()
    weight = model.stem.weight
    del model.stem.weight
    loss.backward()
    assert local(weight).numel() and local(weight.grad).shape == local(weight).shape
    with pytest.raises(AttributeError, match="weight"):
        _ = model.stem.weight


# --- without original parameters --------------------------------------------------------------------------------------


def test_without_original_parameters_a_wrapper_has_them_too() -> None:
    """`use_orig_params=False` is accepted, and what `parameters()` yields is said once in a process (E-VIEW-15)."""
    wrapper._warn_of_original_parameters.cache_clear()
    model = mlp()
    before = list(model.parameters())
    with pytest.warns(UserWarning, match=r"use_orig_params=False has no effect: parameters\(\)") as warned:
        wrapped = FullyShardedDataParallel(model, use_orig_params=False)
        FullyShardedDataParallel(mlp(), use_orig_params=False)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert list(map(id, wrapped.parameters())) == list(map(id, before))


def test_a_flat_parameter_is_found_where_its_shard_lies() -> None:
    """By the memory of the shard that it has now, and not by that of a former one."""
    (unit,) = units(fully_shard(mlp(), auto_wrap_policy=None))
    flat, former = unit.flats[0], unit.flats[0].shard
    assert flat_param_at(former) is flat and flat_param_at(former.detach()) is flat
    flat.bind(former.clone())
    assert flat_param_at(former) is None and flat_param_at(flat.shard) is flat


# --- names in errors, copies ------------------------------------------------------------------------------------------


def _replace_by_float64(model: Any, x: Tensor) -> None:
    model.blocks[1].up.weight.data = torch.ones(23, 11, dtype=torch.float64)
    model(x)


def _step_without_reduce(model: Any, x: Tensor) -> None:
    with model.no_sync():
        model(x).sum().backward()
    torch.optim.SGD(model.blocks[1].parameters(), 0.1).step()


def _replace_between(model: Any, x: Tensor) -> None:
    loss = model(x).sum()
    model.blocks[1].up.weight.data = torch.ones(23, 11)
    loss.backward()


def _part_to_meta(model: Any, x: Tensor) -> None:
    moved = unit_of(model.blocks[1].up.weight)[0].flats[0].shard  # type: ignore[index]  # it has a unit
    model._apply(lambda tensor: tensor.to("meta") if tensor is moved else tensor)


NAMED = (_replace_by_float64, _step_without_reduce, _replace_between, _part_to_meta)


@all_strategies
@pytest.mark.parametrize("by_hand", [True, False])
def test_errors_name_parameters_as_the_root_does(strategy: str, by_hand: bool) -> None:
    """Whatever is wrong with a parameter of a unit below, the error has its name in the root, of copies as well."""
    for act in NAMED:
        model: Any = mlp()
        options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
        for block in model.blocks if by_hand else ():
            fully_shard(block, **options)
        model = fully_shard(model, **options, auto_wrap_policy=None if by_hand else {Residual})
        if act is _step_without_reduce:
            model = copy.deepcopy(model)
        with pytest.raises(RuntimeError, match=r"parameter blocks\.1\.up\.weight\b"):
            act(model, torch.ones(3, 7))


@all_strategies
def test_parameters_are_pickled_and_copied(strategy: str) -> None:
    """`torch.save`, `pickle`, `copy.copy` and `copy.deepcopy` take parameters, alone and in an optimizer; the copy is
    no unit's parameter, so it may be assigned in its place.
    """
    model: Any = fully_shard(mlp(), sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy={Residual})
    params = list(model.parameters())

    def saved(value: Any, weights_only: bool = False) -> Any:
        torch.save(value, file := io.BytesIO())
        file.seek(0)
        return torch.load(file, weights_only=weights_only)

    optimizer = saved(torch.optim.SGD(params, 0.1))
    copies = [saved(params), saved(params, True), list(saved(dict(model.named_parameters())).values()),
              pickle.loads(pickle.dumps(params)), list(map(copy.copy, params)), copy.deepcopy(params),
              optimizer.param_groups[0]["params"]]  # fmt: skip
    for copied in copies:
        for mine, original in zip(copied, params, strict=True):
            assert isinstance(mine, nn.Parameter) and unit_of(mine) is None and unit_of(original) is not None
            assert mine.shape == original.shape and torch.equal(local(mine.detach()), local(original.detach()))
    index = list(dict(model.named_parameters())).index("blocks.1.up.weight")
    model.blocks[1].up.weight = copies[4][index]
    model(torch.ones(3, 7)).sum().backward()
    assert unit_of(copies[4][index]) is not None and copies[4][index].grad is not None


def test_a_parameter_that_another_process_has_pickled_has_no_unit() -> None:
    """Its number may be that of a unit here, which may have fewer parameters."""
    model = fully_shard(nn.Linear(3, 3))
    number, _ = vars(model.weight)["_fsdp_unit"]
    for index in (0, 1, 100):
        foreign = nn.Parameter(torch.ones(3))
        vars(foreign)["_fsdp_unit"] = (number, index)
        assert unit_of(foreign) is None


def test_many_parameters_are_one_kernel() -> None:
    """On devices that have such kernels, optimizers and clipping take sharded parameters together, as plain ones."""
    params = list(fully_shard(mlp()).parameters())
    with mock.patch("torch.optim.optimizer._get_foreach_kernels_supported_devices", return_value=["cpu"]):
        assert _default_to_fused_or_foreach(params, differentiable=False) == (False, True)
    assert _has_foreach_support(params, torch.device("cuda"))
