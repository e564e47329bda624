"""What `fully_shard` refuses of a model, before anything is changed, and what it warns of."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter, ShardingStrategy
from torch.distributed.tensor import Shard
from torch.nn.parameter import UninitializedParameter

from fsdp_compile.comm.collectives import backends
from fsdp_compile.config import check_type
from fsdp_compile.construct.blocks import Ignored
from fsdp_compile.construct.prepare import (
    NamedParams,
    PreparedUnit,
    data_parallel_peers,
    divide_modules,
    join,
    unsent_buffers,
)
from fsdp_compile.construct.units import divide
from fsdp_compile.core._torch import FakeTensor
from fsdp_compile.core.flat_param import group_by_dtype
from fsdp_compile.core.inner_params import has_attributes, is_subclass_around_others, plain_tensors, recipe_of
from fsdp_compile.core.layout import MORE, FlatParamLayout, lay_out
from fsdp_compile.core.settings import PlacementFn, Settings, warn_caller
from fsdp_compile.core.sharding import sharding_of
from fsdp_compile.tensors.tensor_parallel import check_distribution, is_dtensor

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def check_model(model: nn.Module, of_units: Mapping[nn.Module, Settings], ignored: Ignored) -> None:
    """Raise ValueError if parameters cannot be sharded with the settings of their units, or a part was with others."""
    paths = {module: path for path, module in model.named_modules()}
    now = of_units[model].full_precision_in_eval
    for module, path in paths.items():
        sharding = sharding_of(module)
        if sharding is not None and sharding.settings.full_precision_in_eval != now:  # (E-STRAT-11)
            raise ValueError(
                f"module {path}: FSDP_COMPILE_FULL_PREC_IN_EVAL was {1 - now} when it was sharded and is {int(now)} "
                f"now; set the variable once, before the first fully_shard"
            )
    divided = list(divide_modules(of_units, ignored, paths))
    _check_memory((join(paths[module], name), param) for module, params, _ in divided for name, param in params)
    for module, params, modules in divided:
        path, own = paths[module], of_units[module]
        for place, each in modules:
            is_compiled = isinstance(each, torch.jit.ScriptModule)  # by script or trace
            if is_compiled and (each is module or not ignored.params.issuperset(each.parameters())):
                raise ValueError(f"module {place or 'model'} is what torch.jit made, whose code finds no gathered "
                                 f"parameters; use it as it was before, or list it in ignored_modules")  # fmt: skip
        if isinstance(module, _WITHOUT_FORWARD):
            warn_caller(
                f"module {path or 'model'}: a {type(module).__name__} has no forward, so its own parameters are never "
                f"gathered; shard its elements, or the module around it"
            )
        for name, param in params:
            _check_param(join(path, name), param)
        check_placements(path, params, own.shard_placement_fn)
        _check_distributions(params, path, own)


def check_prepared(model: nn.Module, prepared_units: list[PreparedUnit], beside: Mapping[str, int]) -> None:
    """Raise ValueError if units cannot be sent, or are on a mesh with dimensions `beside` that nothing explains."""
    copied = (each.settings.strategy for each in prepared_units if not each.settings.placement.is_sharded)
    for strategy in dict.fromkeys(copied):
        if strategy is not ShardingStrategy.NO_SHARD:  # (E-STRAT-6)
            warn_caller(f"sharding_strategy: {strategy.name} over one rank is NO_SHARD")
    if any(each.settings.sync_module_states for each in prepared_units):
        _check_sendable(model, prepared_units)
    _check_other_dimensions(prepared_units, beside)
    for each in prepared_units:
        if each.settings.rows:
            _check_rows(each)


def _check_rows(prepared: PreparedUnit) -> None:
    """Raise ValueError if ranks would store a part of a row of a parameter (`shards="rows"`)."""
    world_size, same_bits = prepared.settings.placement.shards, prepared.settings.same_bits
    for kind in group_by_dtype(prepared.params):
        for part in divide(kind, prepared.module, prepared.device):
            named = [(join(prepared.path, n), (p.to_local() if is_dtensor(p) else p).shape) for n, p in part]
            if without := [name for name, shape in named if not shape]:
                raise ValueError(f'shards="rows": parameter {without[0]} is a number; make it 1-D, with one element')
            if (cut := _cut(lay_out(named, world_size, same_bits, 1 / MORE))) is None:
                continue
            wider = (lay_out(named, world_size, same_bits, part) for part in (0.05, 0.1, 0.2, 0.5, 1, 2, 4))
            least = next((each.padding_numel / sum(each.numels) for each in wider if _cut(each) is None), None)
            padding = "no padding" if least is None else f"{100 * least:.1f} % of padding"
            raise ValueError(
                f'shards="rows": parameter {named[cut][0]}, shape {tuple(named[cut][1])}: on {world_size} ranks a '
                f"shard ends within a row; {padding} changes that, and {100 / MORE:.0f} % are allowed: shard over "
                f"fewer ranks, as with replicas, or leave out shards"
            )


def _cut(layout: FlatParamLayout) -> int | None:
    """The first parameter of a row of which two ranks store a part; None if there is none."""
    for index, shape in enumerate(layout.shapes):
        row = math.prod(shape[1:])
        for record in (layout.record(index, rank) for rank in range(layout.world_size)):
            if record is not None and (record.first % row or (record.last + 1) % row):
                return index
    return None


# Note [Which elements a rank stores]
# FSDP2 cuts each parameter along a dimension, so its collectives copy every parameter in and out. Here the flat
# parameter is cut, at any element, and nothing is copied. The dimension that `shard_placement_fn` chooses would say
# which elements a rank stores; no value that a script computes depends on that, so it is checked and has no effect.


def check_placements(path: str, params: Iterable[tuple[str, nn.Parameter]], placement_fn: PlacementFn | None) -> None:
    """Check what `shard_placement_fn` says of each parameter (Note [Which elements a rank stores])."""
    check_type("shard_placement_fn", placement_fn, Callable | None)
    if placement_fn is None:
        return
    for name, param in params:
        full_name = f"{path}.{name}" if path else name
        placement: Any = placement_fn(param)
        if placement is None:
            continue
        if not isinstance(placement, Shard):
            raise ValueError(
                f"parameter {full_name}: shard_placement_fn must return a Shard or None, not a "
                f"{type(placement).__name__}; to shard a module over another mesh, call fully_shard on it with that one"
            )
        if not -param.dim() <= placement.dim < max(param.dim(), 1):
            raise ValueError(
                f"parameter {full_name}: shard_placement_fn chose dimension {placement.dim} of {param.dim()}"
            )


def _check_param(name: str, param: nn.Parameter) -> None:
    if isinstance(param, UninitializedParameter):
        raise ValueError(f"parameter {name} is lazy and has no shape yet; run a forward first")
    if isinstance(param, FlatParameter):
        raise ValueError(f"parameter {name} is a FlatParameter of torch's wrapper; shard the model once")
    if is_subclass_around_others(param):
        _check_subclass(name, param)
    if has_attributes(param):
        kind, tensors = type(param).__name__, {n: t for n, t in vars(param).items() if isinstance(t, torch.Tensor)}
        for attribute, value in {"data": param, **tensors}.items():
            if value.is_meta:
                raise ValueError(
                    f"parameter {name}: {attribute} of its {kind} is on the meta device, where nothing gives it "
                    f"values; give them before fully_shard, or list the parameter in ignored_params"
                )
            if value is not param and value.numel() >= max(param.numel(), 1):
                raise ValueError(
                    f"parameter {name}: {attribute} of its {kind} has shape {tuple(value.shape)}, as large as the "
                    f"data, and every rank would store it; list the parameter in ignored_params"
                )
    if param.is_complex():
        raise ValueError(f"parameter {name} is complex ({param.dtype}); store torch.view_as_real of it")
    if param.grad is not None:
        raise ValueError(f"parameter {name} has a gradient; call zero_grad() before fully_shard")


def _check_memory(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that share elements: each would get a copy, and they would go apart in training."""
    by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        if type(param) is nn.Parameter and param.numel() and not (param.is_meta or isinstance(param.data, FakeTensor)):
            before = by_storage.setdefault(param.untyped_storage().data_ptr(), [])
            for other, earlier in before:
                if (param.requires_grad or earlier.requires_grad) and _share_elements(param, earlier):
                    raise ValueError(
                        f"parameters {other} and {name} share memory, and would no longer do so when they are sharded; "
                        f"make them one nn.Parameter, or give one a clone of its data"
                    )
            before.append((name, param))


def _share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    spans = [sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) + 1 for t in (one, other)]
    begins = one.data_ptr(), other.data_ptr()
    ends = begins[0] + spans[0] * one.element_size(), begins[1] + spans[1] * other.element_size()
    if begins[0] >= ends[1] or begins[1] >= ends[0] or one.dtype != other.dtype:
        return begins[0] < ends[1] and begins[1] < ends[0]
    marks = torch.zeros((max(ends) - min(begins)) // one.element_size(), dtype=torch.bool, device="cpu")
    first, second = (
        marks.as_strided(t.shape, t.stride(), (t.data_ptr() - min(begins)) // t.element_size()) for t in (one, other)
    )
    first.fill_(True)
    return bool(second.any())


def _check_subclass(name: str, param: nn.Parameter) -> None:
    """Refuse a subclass around other tensors that cannot be put together of sharded ones (Note [Inner tensors])."""
    kind = type(param).__name__
    if param.requires_grad:
        raise ValueError(
            f"parameter {name} trains and is a {kind}, a subclass around other tensors; freeze it, or list it in "
            f"ignored_params"
        )
    if not hasattr(param, "__tensor_unflatten__"):
        raise ValueError(
            f"parameter {name}: {kind} has __tensor_flatten__ but no __tensor_unflatten__; define it, or list the "
            f"parameter in ignored_params"
        )
    for inner in plain_tensors(param):
        if type(inner) not in (torch.Tensor, nn.Parameter) or inner.is_meta or not inner.is_contiguous():
            what = "on meta" if inner.is_meta else f"with strides {inner.stride()}"
            raise ValueError(
                f"parameter {name}: a {kind} must be around contiguous plain tensors with values, found a "
                f"{type(inner).__name__} of shape {tuple(inner.shape)} {what}; list it in ignored_params"
            )
    # As they will lie in a flat parameter: one behind the other.
    views = (each.new_empty(at + each.numel())[at:].view(each.shape) for at, each in enumerate(plain_tensors(param)))
    try:
        recipe_of(param).put_together(views)
    except Exception as error:
        raise ValueError(
            f"parameter {name}: a {kind} is to be put together of views of a flat parameter, which it refuses: "
            f"{error}; list it in ignored_params"
        ) from error


def _check_distributions(params: NamedParams, path: str, settings: Settings) -> None:
    for name, param in params:
        if is_dtensor(param):
            peers = data_parallel_peers(settings)
            check_distribution(join(path, name), param, peers, settings.groups.data_parallel_size)


def _check_other_dimensions(prepared_units: Iterable[PreparedUnit], beside: Mapping[str, int]) -> None:
    """Raise ValueError if a parameter is plain, and the mesh has dimensions `beside` the data-parallel ones.

    It may be a part of a tensor or all of it: nothing says which, and norms and checkpoints would have this rank's own.
    """
    for prepared in prepared_units if beside else ():
        for name, param in prepared.params:
            if not is_dtensor(param):
                sizes = ", ".join(f"{dim} of {size} ranks" for dim, size in beside.items())
                raise ValueError(
                    f"parameter {join(prepared.path, name)} is no DTensor, and dp_mesh_dims leaves {sizes} of the "
                    f"mesh: whether ranks have parts or copies of it is unknown; make it a DTensor on these dimensions "
                    f"(parallelize_module, distribute_tensor), or pass the data-parallel part of the mesh if they have "
                    f"copies, or list it in ignored_params"
                )


def _check_sendable(model: nn.Module, prepared: list[PreparedUnit]) -> None:
    """Refuse to broadcast what the group's backend cannot take (E-SYNC-4)."""
    carried = frozenset(backends(prepared[-1].settings.groups.shard.find()))  # device types
    moved = {module for unit in prepared for _, module in unit.modules}
    devices = [("parameter " + join(unit.path, name), unit.device) for unit in prepared for name, _ in unit.params]
    devices += [
        ("buffer " + name, buffer.device)
        for name, buffer in unsent_buffers(model).items()
        if model.get_submodule(name.rpartition(".")[0]) not in moved
    ]
    for name, device in devices:
        if device.type not in carried:
            raise ValueError(
                f"{name} is on {device}, which the process group cannot send from ({', '.join(sorted(carried))}), as "
                f"sync_module_states needs; pass device_id, or move it there"
            )
