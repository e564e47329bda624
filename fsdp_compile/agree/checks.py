"""What is checked of a root, by each rank alone and among ranks (comm/comparison.py).

check_root       settings of units, parameters without a unit or without values, replication around the module
compare_units    before the first forward that communicates: one line for each unit, parameter and replicated flat shard
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.comm.comparison import Subject, compare_in_groups, exists
from fsdp_compile.comm.waits import state_of
from fsdp_compile.core._torch import replicated_params
from fsdp_compile.core.sharding import join_registries, sharding_of, units_gathered_below
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.forward_pass import Listener
from fsdp_compile.edits.writeback import refresh, replaced_objects

_SETTINGS = {"limit_all_gathers": "limit_all_gathers", "FSDP_COMPILE_FULL_PREC_IN_EVAL": "full_precision_in_eval"}


def check_root(module: nn.Module) -> None:
    """Raise ValueError if no forward of the root `module` can be right, eager or compiled."""
    join_registries(module)
    _check_settings(module)
    _check_all_sharded(module)
    _check_has_values(module)
    _check_not_replicated(module)


def _check_settings(module: nn.Module) -> None:
    shardings = {path: sharding for path, each in module.named_modules() if (sharding := sharding_of(each))}
    for setting, attribute in _SETTINGS.items():
        of_root = getattr(shardings[""].settings, attribute)
        for path, sharding in shardings.items():
            value = getattr(sharding.settings, attribute)
            if value != of_root:  # (E-STRAT-11)
                raise ValueError(
                    f"{setting} is {of_root} for the root {type(module).__name__} and {value} for {path}; pass one "
                    f"value in every call of fully_shard"
                )


def _check_all_sharded(module: nn.Module) -> None:
    shardings = filter(None, map(sharding_of, module.modules()))
    ignored = frozenset[nn.Parameter]().union(*(sharding.ignored_params for sharding in shardings))
    for path, each in module.named_modules():
        looked_up = {lookup.name for lookup in getattr(type(each), "_fsdp_lookups", ())}  # also if replaced since
        for name, param in each._parameters.items():
            if param is None or name in looked_up or param in ignored or not (param.requires_grad and param.numel()):
                continue
            name = f"{path}.{name}" if path else name
            if isinstance(each, torch.jit.ScriptModule):
                raise ValueError(
                    f"parameter {name} is one of a module that torch.jit.script made, whose code finds no gathered "
                    f"parameters: use that module as it was before, or name its parameters in ignored_params"
                )
            raise ValueError(
                f"parameter {name} was added after fully_shard, so its gradients would not be averaged over ranks; add "
                f"it before, or call fully_shard on its module before the root"
            )


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
_CHUNK = 1 << 20  # numbers whose places are counted at a time
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes per element; wider ones as several integers


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
            state_of(unit.group).units[flat.layout.numel].add(path)
    if timeout is None or not groups:
        return True
    for unit in units:
        if unit.summoned is None:
            refresh(unit)
    subject = Subject(
        f"{'compiled' if compiled else 'eager'} forward", "the same units and settings", "the end of the model", _ADVICE
    )
    first = f"{_class_name(module)} with {settings}"
    texts = [(group, "\n".join([first, *_lines_to_compare(units, group)])) for group in groups]
    compare_in_groups(texts, timeout, subject)
    return True


class RootChecks(Listener):
    """Checks a root before its first forward, by each rank alone and among ranks."""

    def check(self, module: nn.Module) -> None:
        """As `check_root`."""
        check_root(module)

    def compare(self, module: nn.Module, settings: str, compiled: bool) -> bool:
        """As `compare_units`."""
        return compare_units(module, settings, compiled)


def _unit_paths(module: nn.Module) -> dict[Unit, str]:
    """The units gathered below `module`, each with path, class and strategy of the first module that gathers it."""
    paths: dict[Unit, str] = {}
    for path, each in module.named_modules():
        sharding = sharding_of(each)
        for unit in sharding.units if sharding else ():
            strategy = sharding.settings.strategy.name  # type: ignore[union-attr]  # it has units
            paths.setdefault(unit, f"{path or 'root'} ({_class_name(each)}, {strategy})")
    return paths


def groups_of(units: Iterable[Unit]) -> list[dist.ProcessGroup]:
    """The groups of `units` with other ranks in them; those that they are sharded over come first."""
    replicas = [unit.replicas for unit in units if unit.replicas is not None]
    return [group for group in dict.fromkeys([*(unit.group for unit in units), *replicas]) if exists(group)]


def _lines_to_compare(units: dict[Unit, str], group: dist.ProcessGroup) -> Iterator[str]:
    for unit, path in units.items():
        if group is not unit.group and group is not unit.replicas:
            continue
        replicas = unit.replicas.size() if unit.replicas is not None else 1
        options = unit.options
        yield (
            f"{path}: over {unit.group_size} ranks and {replicas} replicas, "
            f"reshard_after_forward {unit.reshard_after_forward}, offload {unit.settings.offload}, "
            f"communication hook {unit.comm_hook is not None}, divided by {options.divide_factor or 'all ranks'}"
        )
        for flat in unit.flats:
            yield (
                f"{path}: {flat.layout.numel} elements with padding, {_dtype_name(flat.shard.dtype)} gathered as "
                f"{_dtype_name(unit.compute_dtype(flat))}, "
                + (f"reduced as {_dtype_name(unit.reduce_dtype(flat))}" if flat.trains else "not trained")
                + (f", sent as {flat.wire}" if flat.wire is not None else "")
            )
            for name, shape in zip(flat.layout.names, flat.full_shapes, strict=True):
                yield f"{path}: {name} {shape}"
        replicates = group is unit.replicas or not unit.is_sharded
        if replicates and unit.summoned is None and unit.trains:
            names = ", ".join(unit.names[:3]) + (", ..." if len(unit.names) > 3 else "")
            stored = [flat.shard.detach() for flat in unit.flats if flat.trains]
            yield f"{path}: replicated values of {names} with checksum {checksum(stored)}"


def _class_name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")  # as the class was called before it was sharded


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checksum(tensors: Iterable[Tensor]) -> int:
    """A sum of the bits of `tensors`, each number times its place; waits for the device once."""
    return int(_sum_of_bits(tensors))


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """The checksum of each of `tensors`, which are on one device; waits for it once."""
    sums = [_sum_of_bits([each]) for each in tensors if each.numel()]
    found = iter(torch.stack(sums).tolist() if sums else ())
    return [next(found) if each.numel() else 0 for each in tensors]


def _sum_of_bits(tensors: Iterable[Tensor]) -> Any:
    """An int64, shape `()`; 0 of no elements."""
    flat = (each.detach().contiguous().view(-1) for each in tensors)
    bits = [each.view(_BITS.get(each.element_size(), torch.int64)) for each in flat]
    chunks = [chunk for each in bits for chunk in each.split(_CHUNK) if chunk.numel()]
    sums = [(chunk * torch.arange(1, chunk.numel() + 1, device=chunk.device)).sum() for chunk in chunks]
    return sum(weight * each for weight, each in enumerate(sums, 1))


def timeout_of_checks() -> float | None:
    """Seconds to wait for other ranks, or None if `FSDP_COMPILE_DISABLE` names `check_ranks`."""
    if "check_ranks" in map(str.strip, os.environ.get("FSDP_COMPILE_DISABLE", "").split(",")):
        return None
    given = os.environ.get("FSDP_COMPILE_CHECK_RANKS_TIMEOUT") or "600"
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"FSDP_COMPILE_CHECK_RANKS_TIMEOUT={given} is no number of seconds") from None
