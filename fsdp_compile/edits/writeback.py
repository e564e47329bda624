"""What users do to parameters between steps, noticed before the next gather.

    in place                     the parameter lies in the shard: nothing to do
    param.data = values          this rank's part of the values goes into a new shard
    module.weight = Parameter    the new object replaces the old one in the unit, its values go into a new shard; on the
                                 meta device, when all parameters of the unit have values
    param.requires_grad_(...)    the parameters are bound to the shard again if one was thawed

Every eager forward asks `Unit.is_current` of each unit, which takes 0.35 us per parameter on one CPU core, and so does
`forward.CheckParams` before a compiled one. All else here runs only after a change.
"""

# Note [Why replaced data goes into a new shard]
# Code that swaps weights for their moving averages keeps `saved = param.data`, assigns `param.data = average`,
# evaluates, and assigns `saved` again. `saved` is memory of the shard: copying the averages there would lose the
# trained weights. So the old shard stays as it is, and lives as long as something refers to it.

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.sharding import record_locations
from fsdp_compile.core.unit import Unit, unit_of
from fsdp_compile.eager.forward_pass import Listener
from fsdp_compile.tensors.sharded_tensor import ShardedTensor, set_grad
from fsdp_compile.tensors.tensor_parallel import is_dtensor


class UserEdits(Listener):
    """Takes over what users did to parameters before their values are gathered."""

    def before_values(self, unit: Unit) -> None:
        """Apply edits to the shards. Raises as `refresh` does."""
        if refresh(unit):
            self.root.streams_for(unit.device).begin_iteration()


def refresh(unit: Unit) -> bool:
    """Before an all-gather, apply to the shards what users did to the unit's parameters since the last one.

    Returns whether values were written into a shard, for which an all-gather in another stream waits (E-WB-9). Raises
    AssertionError if the parameters are summoned, RuntimeError if a replacement does not fit this rank's part (E-WB-4),
    NotImplementedError if a shared parameter was replaced in some of its places only (E-WB-7).
    """
    unit.check_not_summoned("forward")
    if unit.is_current():
        return False
    new = replaced_objects(unit)
    now = [new.get(index, param) for index, param in enumerate(unit.params)]
    on_meta = unit.flats[0].shard.is_meta
    if on_meta and any(param.is_meta for param in now):
        return False  # shards get memory when all parameters have values
    changed = [
        _changed_values(flat, params) for flat, params in unit.by_flat(now)
    ]  # checks all before anything changes
    _warn_of_copies(unit, changed)
    adopt_objects(unit, new)
    if on_meta:
        restore_objects(unit)  # in all places
    for flat, values in zip(unit.flats, changed, strict=True):
        if values:
            with torch.no_grad():
                if on_meta:  # `values` has all but padding, which is finite
                    shard = torch.zeros_like(flat.shard, device="cpu" if unit.settings.offload else unit.device)
                else:
                    shard = torch.empty_like(flat.shard, pin_memory=flat.shard.is_pinned()).copy_(flat.shard)
            write_to_shard(flat, values, shard)
            flat.bind(shard)
        elif any(param.requires_grad for param in flat.frozen_when_bound):
            flat.bind(flat.shard)
        flat.note_trained()
        # What was gathered before is out of date.
        torch.autograd.graph.increment_version([flat.params[index] for index in values])
    record_locations(unit)
    return any(changed)


def replaced_objects(unit: Unit) -> dict[int, nn.Parameter]:
    """The parameters, by index, that modules hold in place of those of the unit. Raises as `refresh` does.

    Places that were deleted or set to None, or that have another tensor (`functional_call`), do not count: module code
    finds there what it would find without sharding.
    """
    new: dict[int, nn.Parameter] = {}
    for index, (param, locations) in enumerate(zip(unit.params, unit.locations.of, strict=True)):
        held = [each for parameters, name in locations if isinstance(each := parameters.get(name), nn.Parameter)]
        if param.is_meta:  # one place with values is enough, and the others get them
            held = [each for each in held if each is not param] or held
        if all(each is param for each in held):
            continue
        if any(each is not held[0] for each in held):  # nobody can tell which of them is meant
            raise NotImplementedError(
                f"parameter {unit.names[index]}: expected one object in all {len(locations)} places that share it, "
                f"found it replaced in some of them; assign the same nn.Parameter to each"
            )
        is_distributed = is_dtensor(held[0])
        if is_distributed or unit_of(held[0]) is not None:
            what = "a DTensor" if is_distributed else "one that is sharded already"
            raise RuntimeError(f"parameter {unit.names[index]}: expected a plain nn.Parameter in its place, found "
                               f"{what}; copy the values into the parameter, or assign them in full")  # fmt: skip
        new[index] = held[0]
    return new


def adopt_objects(unit: Unit, new: dict[int, nn.Parameter]) -> None:
    """Make new objects the unit's parameters; the old ones keep their values, in memory of their own."""
    for index in new:
        old = unit.params[index]
        old.data = old.detach().clone()
    unit.replace(new)


def restore_objects(unit: Unit) -> None:
    """Put the unit's parameters back into modules, instead of others that were assigned since."""
    for param, locations in zip(unit.params, unit.locations.of, strict=True):
        for parameters, name in locations:
            if parameters.get(name) is not None:
                parameters[name] = param


def set_grads(params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    """Set gradients, whose shapes may differ from those that were there."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = None
        if grad is not None:
            set_grad(param, grad)


def _changed_values(flat: FlatParam, params: Sequence[nn.Parameter]) -> dict[int, Tensor]:
    """The values to write into the shard, by index in `flat`; RuntimeError if they do not fit."""
    unbound = flat.binding.unbound()
    changed = {i: p.detach() for i, p in enumerate(params) if i in unbound or p is not flat.params[i]}
    return {i: _checked_local(flat, i, values) for i, values in changed.items()}


def _checked_local(flat: FlatParam, index: int, values: Tensor) -> Tensor:
    """What this rank stores, 1-D, of values that a user put in the place of a parameter."""
    shape = flat.full_shapes[index]
    if values.shape != shape or values.dtype != flat.shard.dtype or values.is_meta:
        raise RuntimeError(
            f"parameter {flat.names[index]}: expected {flat.shard.dtype} of its full shape {shape}, with values "
            f"for {flat.shard.device}, found {values.dtype} of shape {tuple(values.shape)} on {values.device}; copy "
            f"into the parameter, or into its to_local()"
        )
    spec = flat.specs[index]
    if not isinstance(values, ShardedTensor):
        return spec.local_of(values)
    if values.spec != spec:
        raise RuntimeError(
            f"parameter {flat.names[index]}: expected a plain tensor, or one that is sharded as the parameter "
            f"is, {spec}, found {values.spec}; call full_tensor() on it"
        )
    return values.local


@torch.no_grad()
def write_to_shard(flat: FlatParam, values: Mapping[int, Tensor], shard: Tensor) -> None:
    """Copy this rank's part of parameters, 1-D by their index in `flat`, into `shard`."""
    stored = flat.split(shard)
    for index, local in values.items():
        stored[index].copy_(local)


def _warn_of_copies(unit: Unit, changed: Sequence[Mapping[int, Tensor]]) -> None:
    """Warn of what is written into shards, at TORCH_DISTRIBUTED_DEBUG=INFO (E-WB-8)."""
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        return
    for flat, values in zip(unit.flats, changed, strict=True):
        for index, local in values.items():
            warnings.warn(
                f"rank {unit.rank}: parameter {flat.names[index]} of shape {flat.layout.shapes[index]} was "
                f"replaced between steps: expected it to lie in the shard on {flat.shard.device}, found other memory "
                f"on {local.device}; this rank's {local.numel()} elements are copied into a new shard",
                UserWarning,
                stacklevel=2,
            )
