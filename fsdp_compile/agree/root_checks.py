"""What is checked of a root, by each rank alone and among ranks (comm/comparison.py).

CheckedRoot      settings of units, parameters without a unit or without values, replication around the module
compare_units    before the first forward that communicates: one line for each unit, parameter and replicated flat shard
"""

import operator
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from fsdp_compile.comm.comparison import Subject, checksums, compare, exists, timeout_of_checks
from fsdp_compile.comm.groups import NamedGroup
from fsdp_compile.comm.waits import state_of
from fsdp_compile.core._torch import replicated_params
from fsdp_compile.core.sharding import join_registries, modules_below, original_class, sharding_of, units_gathered_below
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.forward_pass import Listener
from fsdp_compile.edits.writeback import refresh, replaced_objects

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class CheckedRoot:
    """A root of which forwards are right, eager and compiled, while its modules hold the same.

    Raises:
        ValueError: none can be right.
    """

    def __init__(self, root: nn.Module) -> None:
        join_registries(root)
        _check_settings(root)
        self._frozen = _check_all_sharded(root)
        _check_has_values(root)
        _check_not_replicated(root)
        registries = [vars(each).get(name) for each in modules_below(root) for name in ("_modules", "_parameters")]
        self._registries = [each for each in registries if isinstance(each, dict)]  # torch.jit has others
        self._held = self._what_is_held()

    def _what_is_held(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._registries)), *map(_REQUIRES_GRAD, self._frozen)]

    def is_unchanged(self) -> bool:
        """Whether it is as it was checked: asked at every forward, as of units (core/unit.py, ParameterLocations)."""
        held = self._what_is_held()
        return len(held) == len(self._held) and all(map(operator.is_, held, self._held))


def _check_settings(module: nn.Module) -> None:
    limits = {path: of.settings.limit_all_gathers for path, each in module.named_modules() if (of := sharding_of(each))}
    if other := next((path for path, limit in limits.items() if limit != limits[""]), None):  # (E-STRAT-11)
        raise ValueError(
            f"limit_all_gathers is {limits['']} for the root {type(module).__name__} and {limits[other]} for {other}; "
            f"pass one value in every call of fully_shard"
        )


def _check_all_sharded(module: nn.Module) -> list[nn.Parameter]:
    """Refuse parameters that train without a unit; return those that are frozen."""
    shardings = list(filter(None, map(sharding_of, module.modules())))
    ignored = frozenset[Any]().union(*(chain(each.ignored_params, each.ignored_modules) for each in shardings))
    frozen = []
    for path, each in module.named_modules():
        looked_up = {lookup.name for lookup in getattr(type(each), "_fsdp_lookups", ())}  # also if replaced since
        for name, param in each._parameters.items():
            if param is None or name in looked_up or not ignored.isdisjoint((each, param)) or not param.numel():
                continue
            if param.requires_grad:
                raise ValueError(
                    f"parameter {path}{'.' * bool(path)}{name} was added after fully_shard, so its gradients would not "
                    f"be averaged over ranks; add it before, or call fully_shard on its module before the root"
                )
            frozen.append(param)
    return frozen


def _check_has_values(module: nn.Module) -> None:
    for unit in units_gathered_below(module):
        if unit.flats[0].shard.is_meta:
            refresh(unit)  # parameters may have been assigned, by `load_state_dict(assign=True)` too
        assigned = replaced_objects(unit) if unit.flats[0].shard.is_meta else {}
        for index, (name, param) in enumerate(zip(unit.names, unit.params, strict=True)):
            if assigned.get(index, param).is_meta:
                raise ValueError(
                    f"parameter {name} is still on the meta device; before the first forward, call "
                    f"model.to_empty(device=...) and initialize it, load it with assign=True, or pass param_init_fn "
                    f"to fully_shard"
                )


def _check_not_replicated(module: Any) -> None:
    replicated = replicated_params()  # which would be gathered one by one
    for unit in module._fsdp.units_below if replicated else ():
        for name, param in zip(unit.names, unit.params, strict=True):
            if param in replicated:
                raise ValueError(
                    f"parameter {name} is averaged by DistributedDataParallel around {type(module).__name__} too; call "
                    f"fully_shard on the module around it instead, or torch.distributed._composable.replicate, which "
                    f"leaves sharded modules alone"
                )


# --- among ranks, through the store -----------------------------------------------------------------------------------

# Texts hold no ranks and no names of groups, which differ from rank to rank under hybrid sharding. Values are compared
# where ranks replicate and train them: under NO_SHARD, and between the replicas of hybrid sharding, each rank would go
# on with values of its own for ever. What FULL_SHARD cuts is not compared: each rank may initialize its own slice.

_ADVICE = "build and shard the same model with the same arguments on all ranks"


def compare_units(module: Any, settings: str, compiled: bool) -> bool:
    """Compare units and `settings` of the root `module` if its forward communicates; return whether that is settled.

    Raises:
        RuntimeError: on all ranks: they differ, or ranks did not come in `FSDP_COMPILE_CHECK_RANKS_TIMEOUT` seconds.
    """
    timeout = timeout_of_checks()
    groups = groups_of(module._fsdp.units_below)
    trains = torch.is_grad_enabled()
    if groups and not any(
        unit.summoned is None and (unit.is_sharded or (trains and unit.trains and unit.syncs))
        for unit in module._fsdp.units_below
    ):  # such as evaluation on one rank (NO_SHARD)
        return False
    units = _unit_paths(module)
    for unit, path in units.items():
        unit.path = path
        for flat in unit.flats:
            flat.path = path
            state_of(unit.group.find()).units[flat.layout.numel].add(path)
    if timeout is None or not groups:
        return True
    for unit in units:
        if unit.summoned is None:
            refresh(unit)
    subject = Subject(
        f"{'compiled' if compiled else 'eager'} forward", "the same units and settings", "the end of the model", _ADVICE
    )
    first = f"{original_class(module).__name__} with {settings}"
    texts = [(group.find(), "\n".join([first, *_lines_to_compare(units, group)])) for group in groups]
    compare(texts, timeout, subject)
    return True


class RootChecks(Listener):
    """Checks a root before its first forward, by each rank alone and among ranks, and alone where modules changed."""

    def check(self, module: nn.Module) -> None:
        """Raise ValueError where `CheckedRoot` does."""
        sharding: Any = sharding_of(module)
        if sharding.checked is None or not sharding.checked.is_unchanged():
            sharding.checked = CheckedRoot(module)

    compare = staticmethod(compare_units)


def _unit_paths(module: nn.Module) -> dict[Unit, str]:
    """The units gathered below `module`, each with path, class and strategy of the first module that gathers it."""
    paths: dict[Unit, str] = {}
    for path, each in module.named_modules():
        sharding = sharding_of(each)
        for unit in sharding.units if sharding else ():
            strategy = sharding.settings.strategy.name  # type: ignore[union-attr]  # it has units
            paths.setdefault(unit, f"{path or 'root'} ({original_class(each).__name__}, {strategy})")
    return paths


def groups_of(units: Iterable[Unit]) -> list[NamedGroup]:
    """The groups of `units` with other ranks in them; those that they are sharded over come first."""
    replicas = [unit.replicas for unit in units if unit.replicas is not None]
    return [group for group in dict.fromkeys([*(unit.group for unit in units), *replicas]) if exists(group.find())]


def _lines_to_compare(units: dict[Unit, str], group: NamedGroup) -> Iterator[str]:
    for unit, path in units.items():
        if group not in (unit.group, unit.replicas):
            continue
        options = unit.options
        yield (
            f"{path}: over {unit.group.size} ranks and {unit.data_parallel_size // unit.group.size} replicas, "
            f"reshard_after_forward {unit.reshard_after_forward}, offload {unit.settings.offload}, "
            f"communication hook {unit.comm_hook is not None}, divided by {options.divide_factor or 'all ranks'}"
        )
        for flat in unit.flats:
            yield (
                f"{path}: {flat.layout.numel} elements with padding, {flat.shard.dtype} gathered as "
                f"{unit.compute_dtype(flat)}, "
                + (f"reduced as {unit.reduce_dtype(flat)}" if flat.trains else "not trained")
                + (f", sent as {flat.wire}" if flat.wire is not None else "")
            )
            for name, shape in zip(flat.layout.names, flat.full_shapes, strict=True):
                yield f"{path}: {name} {shape}"
        replicates = group == unit.replicas or not unit.is_sharded
        if replicates and unit.summoned is None and unit.trains:
            names = ", ".join(unit.names[:3]) + (", ..." if len(unit.names) > 3 else "")
            stored = [flat.shard.detach() for flat in unit.flats if flat.trains]
            yield f"{path}: replicated values of {names} with checksums {checksums(stored)}"
