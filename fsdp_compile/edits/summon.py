"""`summon_full_params`: parameters with all elements on the rank, outside of forward and backward.

    enter    all-gather -> each parameter becomes an `UnshardedTensor` over its full view; the same object
    inside   read, edit, save: parameters act as plain tensors
    leave    this rank's part of the edits goes back into the shard -> each parameter is sharded again

Full tensors are fresh buffers, so dropped edits leave no trace. They have the dtype in which parameters are stored,
whatever the unit computes in. All ranks of a unit's group take part in each all-gather, in the same order.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile.comm import collectives
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.ops import equal_bits
from fsdp_compile.core.sharding import ModuleSharding, own_units, record_locations, units_used_below
from fsdp_compile.core.unit import Phase, Unit, check_idle
from fsdp_compile.eager.runtime import free_for_next_forward
from fsdp_compile.edits.writeback import (
    adopt_objects,
    refresh,
    replaced_objects,
    restore_objects,
    set_grads,
    write_to_shard,
)
from fsdp_compile.tensors.shard_spec import ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

APPLY = "apply"


@dataclass(frozen=True)
class Options:
    """The arguments of `summon_full_params`."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    def check(self) -> None:
        """Raise NotImplementedError for combinations that torch refuses too (E-SUM-2); warn of wasteful ones."""
        for one, other in (("rank0_only", "writeback"), ("with_grads", "offload_to_cpu")):
            if getattr(self, one) and getattr(self, other):
                raise NotImplementedError(
                    f"summon_full_params: {one} and {other} cannot both be True; pass {other}=False"
                )
        if self.offload_to_cpu and not self.rank0_only:
            warnings.warn(
                "summon_full_params: offload_to_cpu without rank0_only stores a full copy of the parameters in host "
                "memory for each rank; pass rank0_only=True, writeback=False if one rank needs them",
                UserWarning,
                stacklevel=4,
            )


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Context in which parameters are complete on this rank, e.g. to inspect, edit or save them as plain tensors.

    They stay the same objects, in their stored dtype, on the device that they are computed on. All ranks of the process
    group must enter and leave together. Inside, no backward may run, and a forward only eagerly under
    `torch.no_grad()`, as for `generate`; it sees edits. Between a forward and its backward the context may be entered,
    but parameters must not change.

    Args:
        module: any module. Every unit that has a parameter in it is gathered, whole.
        recurse: False gathers only the units of `module` itself, and nothing if it is not sharded as a unit.
        writeback: on leaving, also by an exception, each rank keeps its own part of its edits; ranks should make the
            same edits. False drops them, except in-place edits under NO_SHARD.
        rank0_only: only rank 0 of each group that shards parameters sees full ones, the others their shards; all take
            part in the gather. Under NO_SHARD every rank has full parameters. Needs writeback=False.
        offload_to_cpu: put the full parameters in host memory.
        with_grads: complete gradients too, with zeros for those that a rank lacks; None stays where no rank has one.
            Edits are kept on ranks that have a gradient. Gradients accumulated under `no_sync` stay local.

    Raises:
        NotImplementedError: `rank0_only` with `writeback`, or `with_grads` with `offload_to_cpu`.
        AssertionError: a forward or backward is under way, or parameters are summoned already.
        RuntimeError: on leaving, if a parameter or gradient was replaced by one of another shape or dtype. Its unit is
            as it was on entering, the others keep their edits.
        NotImplementedError: on leaving, if a shared parameter was replaced in some of its places only. As above.
    """
    options = Options(writeback, rank0_only, offload_to_cpu, with_grads)
    options.check()
    sharding: ModuleSharding | None = getattr(module, "_fsdp", None)  # of a wrapper: that of the module inside
    units = units_used_below(module) if recurse else list(sharding.units if sharding else ())
    check_idle(units, "summon_full_params", AssertionError)
    with summoned(units, options, "summon_full_params"):
        yield


@contextmanager
def summoned_for_apply(module: Any) -> Iterator[None]:
    """Full parameters of `module`, without sharded modules below, for `Module.apply` (E-MOD-1).

    Leaves units alone that an `apply` further up holds. ValueError if another is not idle.
    """
    units = [unit for unit in units_used_below(module) if unit.summoned is None or unit.summoned.by != APPLY]
    check_idle(units, APPLY)
    own = own_units(module)
    with summoned([unit for unit in units if unit in own], Options(), APPLY):
        yield


@contextmanager
def summoned(units: Sequence[Unit], options: Options, by: str) -> Iterator[None]:
    """Full parameters of idle `units`, in the name of `by`."""
    with ExitStack() as stack:
        for unit in units:
            unit_summoned = Summoned(unit, options, by)
            stack.callback(unit_summoned.restore)  # also if what follows is interrupted, `close` too
            unit_summoned.show()
            stack.callback(unit_summoned.close)
        yield


class Summoned:
    """Full parameters of an idle unit, and the way back; `by` is who asks, for messages."""

    def __init__(self, unit: Unit, options: Options, by: str) -> None:
        self.unit, self.options, self.by = unit, options, by
        self.may_compute = not (options.rank0_only or options.offload_to_cpu)
        free_for_next_forward(unit)
        refresh(unit)
        self._full = [flat.full_views(_all_gather(unit, flat.shard)) for flat in unit.flats]
        self.shows_grads = options.with_grads and all(f.accumulated is None for f in unit.flats)
        self._grads = full_gradients(unit) if self.shows_grads else []
        self.saved = [param.grad for param in unit.params]
        self._is_shown = False

    def show(self) -> None:
        """Let the unit's parameters be the full ones, until `close`."""
        unit, options, full, grads = self.unit, self.options, self._full, self._grads
        self._full, self._grads, self._is_shown = [], [], True
        unit.enter(Phase.SUMMONED)
        unit.summoned = self
        if options.rank0_only and unit.rank != 0:
            self.shows_grads = False
            for flat in unit.flats:
                flat.hide()
        else:
            for flat, tensors in zip(unit.flats, full, strict=True):
                flat.use_unsharded([tensor.cpu() for tensor in tensors] if options.offload_to_cpu else tensors)
            for param in unit.params:
                vars(param)["is_alone"] = options.rank0_only and unit.is_sharded
        if self.shows_grads:
            set_grads(unit.params, grads)

    def close(self) -> None:
        """Keep this rank's part of the edits, if asked to, and shard the parameters again."""
        try:
            if self.options.writeback:
                self._write_back()
            else:
                restore_objects(self.unit)
        except BaseException:
            restore_objects(self.unit)
            raise
        finally:
            self.restore()

    def _write_back(self) -> None:
        unit = self.unit
        new = replaced_objects(unit)
        params = [new.get(index, param) for index, param in enumerate(unit.params)]
        for flat, values in unit.by_flat(params):
            _check_full(flat, values, self.shows_grads)
        local = [_local_part(param, spec) for param, spec in zip(params, unit.specs, strict=True)]
        if self.shows_grads:
            self._write_back_grads(params)
        adopt_objects(unit, new)
        for flat, of_flat in unit.by_flat(local):
            _write_changed(flat, of_flat)

    @torch.no_grad()
    def _write_back_grads(self, params: Sequence[nn.Parameter]) -> None:
        """Copy this rank's part of the gradients into those that it has; one that was set to None is None."""
        for index, (param, spec) in enumerate(zip(params, self.unit.specs, strict=True)):
            saved = self.saved[index]
            if param.grad is None:
                self.saved[index] = None
            elif saved is not None:
                into = _stored_gradient(saved)
                into.copy_(_local_part(param.grad, spec).view_as(into))

    def restore(self) -> None:
        """Shard the parameters again, unless that is done: what was interrupted begins anew."""
        if not self._is_shown:
            return
        unit = self.unit
        for param in unit.params if self.shows_grads else ():
            param.grad = None
        for flat in unit.flats:
            flat.use_sharded()
        if self.shows_grads:
            set_grads(unit.params, self.saved)
        record_locations(unit)
        unit.enter(Phase.SHARDED)
        unit.summoned, self._is_shown = None, False


def _check_full(flat: FlatParam, params: Sequence[nn.Parameter], with_grads: bool) -> None:
    for name, shape, param in zip(flat.names, flat.full_shapes, params, strict=True):
        if tuple(param.shape) != shape or param.dtype != flat.shard.dtype:
            raise RuntimeError(
                f"parameter {name} became {param.dtype} of shape {tuple(param.shape)} inside summon_full_params; keep "
                f"{flat.shard.dtype} of shape {shape} (the edits are dropped)"
            )
        if with_grads and param.grad is not None and tuple(param.grad.shape) != shape:
            raise RuntimeError(
                f"parameter {name} got a gradient of shape {tuple(param.grad.shape)} inside summon_full_params; keep "
                f"its full shape {shape} (the edits are dropped)"
            )


def _local_part(full: Tensor, spec: ShardSpec) -> Tensor:
    """The part of a full tensor that this rank stores, 1-D."""
    plain = full.elements() if isinstance(full, ShardedTensor) else full  # an UnshardedTensor: nothing is gathered
    return spec.local_of(plain.detach())


def _write_changed(flat: FlatParam, values: Sequence[Tensor]) -> None:
    """Write those of `values` that differ into the shard; what was gathered before is out of date then."""
    pairs = enumerate(zip(flat.split(flat.shard), values, strict=True))
    changed = {index: value for index, (stored, value) in pairs if not equal_bits(stored, value.to(stored.device))}
    write_to_shard(flat, changed, flat.shard)
    torch.autograd.graph.increment_version([flat.params[index] for index in changed])


def _all_gather(unit: Unit, local: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad(), collectives.waiting_for("all-gather", unit.path):
        return unit.gather(local)


def full_gradients(unit: Unit) -> list[Tensor | None]:
    """The gradients in full shape and stored dtype; None for a parameter that has one on no rank.

    A rank that lacks one that others have takes part with zeros (E-SUM-9, E-SUM-10), and warns at
    TORCH_DISTRIBUTED_DEBUG=INFO.
    """
    anywhere = _has_gradient_anywhere(unit)
    grads: list[Tensor | None] = []
    for flat, exist in unit.by_flat(anywhere):
        if any(exist):
            packed = torch.zeros_like(flat.shard)
            with torch.no_grad():
                for param, part in zip(flat.params, flat.split(packed), strict=True):
                    if param.grad is not None:
                        part.copy_(_stored_gradient(param.grad))
            views = flat.full_views(_all_gather(unit, packed))
            grads += [view if exists else None for view, exists in zip(views, exist, strict=True)]
        else:
            grads += [None] * len(flat.params)
    return grads


def _has_gradient_anywhere(unit: Unit) -> list[bool]:
    """For each parameter whether any rank has a gradient of it: one all-reduce of as many numbers."""
    here = [param.grad is not None for param in unit.params]
    if not unit.is_sharded:
        return here
    counts = torch.tensor(here, dtype=torch.float32, device=unit.device)
    collectives.start_all_reduce(counts, unit.group.name, "sum").wait()
    anywhere = [count > 0 for count in counts.tolist()]
    if dist.get_debug_level() != dist.DebugLevel.OFF:
        for index, (mine, wanted, record) in enumerate(zip(here, anywhere, unit.records, strict=True)):
            if wanted and record and not mine:
                warnings.warn(
                    f"rank {unit.rank}: parameter {unit.names[index]} has a gradient on other ranks and none here; "
                    f"zeros stand for this rank's part",
                    UserWarning,
                    stacklevel=2,
                )
    return anywhere


def _stored_gradient(grad: Tensor) -> Tensor:
    """What this rank stores of a gradient: all of a plain one."""
    return grad.local if isinstance(grad, ShardedTensor) else grad
