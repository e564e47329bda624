"""What users do to parameters between steps, noticed before the next gather.

    in place                     the parameter lies in the shard: nothing to do
    param.data = values          the values are copied into the shard
    module.weight = Parameter    the new object takes the old one's place, its values are copied
    param.requires_grad_(...)    a thawed parameter joins

Every eager forward asks `Unit.is_current` of each unit, and so does what precedes a compiled one (prologue.py).
Measured on one CPU core that takes 0.35 us per parameter. All else here runs only after a change.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.unit import Unit, check_not_summoned, unit_of


def refresh(unit: Unit) -> bool:
    """Notice, before a gather, what was done to the unit's parameters since the last one.

    Returns:
        Whether values were written into a shard: a gather in another stream has to wait for that (E-WB-9).

    Raises:
        AssertionError: the parameters are summoned.
        RuntimeError: replaced data or a replaced parameter does not fit this rank's part (E-WB-4).
        NotImplementedError: a shared parameter was replaced in some of its places only (E-WB-7).
    """
    check_not_summoned(unit, "forward")
    if unit.is_current():
        return False
    new = replaced_objects(unit)
    now = [new.get(index, param) for index, param in enumerate(unit.params)]
    changed = [_changed(flat, params) for flat, params in unit.by_flat(now)]  # checks all before anything changes
    _warn(unit, changed)
    give_way(unit, new)
    for flat, found in zip(unit.flats, changed, strict=True):
        write_parts(flat, found)
        if found or any(param.requires_grad for param in flat.frozen_when_bound):
            flat.bind(flat.shard)
        flat.note_trained()
        torch.autograd.graph.increment_version([flat.params[index] for index in found])  # for who gathered before
    unit.locations.note()
    return any(changed)


def replaced_objects(unit: Unit) -> dict[int, nn.Parameter]:
    """The parameters, by index, that modules hold now in place of those that the unit knows.

    Places that were set to None or deleted are passed over.

    Raises:
        NotImplementedError: a shared parameter is no longer the same object in all its places.
        RuntimeError: what stands there is no parameter, or one that is sharded already.
    """
    new: dict[int, nn.Parameter] = {}
    for index, (known, places) in enumerate(zip(unit.params, unit.locations.of, strict=True)):
        found = [param for registry, name in places if (param := registry.get(name)) is not None]
        if all(param is known for param in found):
            continue
        if any(param is not found[0] for param in found):  # which of them is meant, nobody can tell
            raise NotImplementedError(
                f"parameter {unit.names[index]}: expected one object in all {len(places)} places that share it, found "
                f"it replaced in some of them; assign the same nn.Parameter to each"
            )
        new[index] = _check_object(unit.names[index], found[0])
    return new


def _check_object(name: str, found: object) -> nn.Parameter:
    if isinstance(found, nn.Parameter) and unit_of(found) is None:
        return found
    what = "one that is sharded already" if isinstance(found, nn.Parameter) else f"a {type(found).__name__}"
    raise RuntimeError(f"parameter {name}: expected an nn.Parameter with this rank's part in its place, found {what}; "
                       f"copy the values into the parameter instead")  # fmt: skip


def give_way(unit: Unit, new: dict[int, nn.Parameter]) -> None:
    """Let the new objects be the unit's parameters; the old ones keep their values, in memory of their own."""
    for index in new:
        old = unit.params[index]
        old.data = old.detach().clone()
    unit.replace(new)


def put_back(unit: Unit) -> None:
    """Let modules hold the parameters that the unit knows, instead of others put in their places since."""
    for known, places in zip(unit.params, unit.locations.of, strict=True):
        for registry, name in places:
            if registry.get(name) is not None:
                registry[name] = known


def _changed(flat: FlatParam, params: Sequence[nn.Parameter]) -> dict[int, Tensor]:
    """What is to be written into the shard, by the parameter's index in `flat`; RuntimeError if it does not fit."""
    detached = flat.unbound()
    changed = {i: p.detach() for i, p in enumerate(params) if i in detached or p is not flat.params[i]}
    parts = flat.split(flat.shard)
    for index, found in changed.items():
        expected = _part_shape(flat, parts[index])
        fits = found.numel() == expected.numel() if flat.layout.world_size == 1 else found.shape == expected
        if not fits or found.dtype != flat.shard.dtype or found.is_meta:
            raise RuntimeError(
                f"parameter {flat.layout.names[index]}: expected {flat.shard.dtype} of shape {tuple(expected)}, this "
                f"rank's part, with values for {flat.shard.device}, found {found.dtype} of shape {tuple(found.shape)} "
                f"on {found.device}; copy into the parameter, or replace it inside summon_full_params"
            )
    return changed


def _part_shape(flat: FlatParam, part: Tensor | None) -> torch.Size:
    return torch.Size([0]) if part is None else part.shape


@torch.no_grad()
def write_parts(flat: FlatParam, values: Mapping[int, Tensor]) -> None:
    """Copy this rank's parts, by the parameter's index in `flat`, into the shard."""
    parts = flat.split(flat.shard)
    for index, found in values.items():
        part = parts[index]
        if part is not None:
            part.copy_(found.view(part.shape))


def _warn(unit: Unit, changed: Sequence[Mapping[int, Tensor]]) -> None:
    """Say what is written, at TORCH_DISTRIBUTED_DEBUG=INFO (E-WB-8)."""
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        return
    for flat, values in zip(unit.flats, changed, strict=True):
        parts = flat.split(flat.shard)
        for index, found in values.items():
            warnings.warn(
                f"rank {unit.rank}: parameter {flat.layout.names[index]} was replaced between steps: expected shape "
                f"{tuple(_part_shape(flat, parts[index]))} on {flat.shard.device}, found {tuple(found.shape)} on "
                f"{found.device}; its values are copied into the shard",
                UserWarning,
                stacklevel=2,
            )
