"""Gradient accumulation without communication: `no_sync`.

Gradients add up unsharded on each rank, in the reduce dtype, in one buffer per flat parameter. Meanwhile the `.grad` of
each parameter is an unsharded view of that buffer, so that `zero_grad`, inspection and scaling work on it. Gradients
that an earlier backward has reduced are hidden, and return with the next reduce (E-ACC-3, E-GRAD-6). Where sums have an
order that any number of ranks has, there are several buffers (partial_sums.py).
"""

import functools
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compile.comm import collectives
from fsdp_compile.comm.comparison import checksums, exists, timeout_of_checks
from fsdp_compile.comm.waits import MessageBoard
from fsdp_compile.core._torch import executes_node
from fsdp_compile.core.autograd import ReduceQueue
from fsdp_compile.core.backward_pass import BackwardPass, running_backward
from fsdp_compile.core.flat_param import FlatParam
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.core.unit import IGNORED, Unit, unit_of
from fsdp_compile.eager.forward_pass import Listener
from fsdp_compile.eager.partial_sums import Microbatches, PartialSums
from fsdp_compile.tensors.sharded_tensor import ShardedTensor, set_grad
from fsdp_compile.tensors.unsharded_tensor import UnreducedGradient
from fsdp_compile.tensors.unused import set_unused

_with_accumulated: weakref.WeakSet[FlatParam] = weakref.WeakSet()
"""Flat parameters of all models with accumulated gradients. Hooks on optimizers are process-wide, and so is this:
without it every step of every optimizer would look at each of its parameters."""


class AccumulatedGradient:
    """The accumulated gradients of one flat parameter, and the reduced ones that they hide.

    Attributes:
        total: the sum of this rank's gradients, 1-D `[layout.numel]`.
        views: its unsharded views, one per parameter.
        shown: those of them that are the parameters' `.grad`.
        hidden: the reduced gradients that were there before.
        unused: indices of parameters that nothing has used so far, whose `.grad` is left as it is.
        sums: what adds up to `total`, in the order of a tree; None: `total` alone, in order of arrival.
    """

    def __init__(self, flat: FlatParam, total: Tensor, sums: PartialSums | None = None) -> None:
        self.total, self.sums = total, sums
        self.views = flat.views(total)
        self.hidden = [param.grad for param in flat.params]
        self.shown: list[Tensor | None] = [None] * len(flat.params)
        self.versions = [0] * len(flat.params)
        self.unused = flat.reduction.unused.take_noted()
        self.show(flat)

    def show(self, flat: FlatParam) -> None:
        """Set `.grad` of parameters that were used to the views."""
        for index, (param, view) in enumerate(zip(flat.params, self.views, strict=True)):
            if index in self.unused:
                continue
            if param.requires_grad and (param.grad is None or param.grad is not self.shown[index]):
                shown = UnreducedGradient(view.view(-1), flat.specs[index])
                if (managed := unit_of(param)) is not None and (divisor := managed[0].divisor) is not None:
                    shown.divided_by = divisor / managed[0].data_parallel_size
                self.shown[index] = set_grad(param, shown)
        self.versions = [0 if shown is None else shown._version for shown in self.shown]  # plain ones share `total`'s

    def add(self, flat: FlatParam, packed: Tensor, leaf: int) -> None:
        """Add `packed`, 1-D `[layout.numel]`, which is of microbatch `leaf` where the order matters, and show it."""
        self.collect(flat)
        unused = self.unused & flat.reduction.unused.take_noted()
        for index in self.unused - unused:
            self.hidden[index] = flat.params[index].grad
        self.unused = unused
        if self.sums is None:
            self.total.add_(packed)
        else:
            self.sums.add(leaf, packed)
            before, self.total = self.total, self.sums.so_far(self.total)
            if self.total is not before:
                self.views = flat.views(self.total)
                self.shown = [None] * len(flat.params)
        self.show(flat)

    def collect(self, flat: FlatParam) -> None:
        """Apply to the sum what the user did to the shown gradients; RuntimeError if one now has another size.

        A gradient that was cleared, to None or to zeros, counts as zero, and drops the reduced one that it hid.
        """
        for index, (param, view) in enumerate(zip(flat.params, self.views, strict=True)):
            grad, shown = param.grad, self.shown[index]
            is_new = index in self.unused and grad is not None and grad is not self.hidden[index]
            if is_new and param.requires_grad and type(grad) is not ShardedTensor:
                self.unused, self.shown[index] = self.unused - {index}, view  # which is to have another value
            elif shown is None or not param.requires_grad:
                continue
            if grad is None:
                self._clear_parameter(flat, index)
                self.shown[index], self.unused = None, self.unused | {index}
            elif grad is not shown:
                if type(grad) is ShardedTensor:
                    raise RuntimeError(
                        f"parameter {flat.names[index]}: inside no_sync its gradient is that of this rank, but "
                        f"a sharded one was assigned; clear it, or reduce before you assign it"
                    )
                self._check_assignable(flat, index)
                view.copy_(grad.full_tensor() if isinstance(grad, UnreducedGradient) else grad)
                self.hidden[index] = None
            elif grad._version != self.versions[index]:
                self.versions[index] = grad._version
                if (self.hidden[index] is not None or self.sums is not None) and not grad.any():
                    self._clear_parameter(flat, index)
                else:
                    self._check_assignable(flat, index)

    def _clear_parameter(self, flat: FlatParam, index: int) -> None:
        for part in [self.total] if self.sums is None else self.sums.parts():
            flat.views(part)[index].zero_()
        self.hidden[index] = None

    def _check_assignable(self, flat: FlatParam, index: int) -> None:
        if self.sums is not None:
            raise RuntimeError(
                f"parameter {flat.names[index]}: its gradient was changed inside no_sync, which "
                f"reduction_order='tree' cannot add up; clear it, or change it when it is reduced"
            )

    def restore(self, flat: FlatParam) -> None:
        """Put back the reduced gradients."""
        for param, shown, hidden in zip(flat.params, self.shown, self.hidden, strict=True):
            if shown is not None and (param.requires_grad or param.grad is shown):
                param.grad = None  # first: the shapes of a gradient and of the one after it may differ
                if hidden is not None:
                    set_grad(param, hidden)


def accumulate(unit: Unit, flat: FlatParam, packed: Tensor) -> None:
    """Add `packed`, 1-D `[layout.numel]`, to the flat parameter's accumulated gradients and show them as `.grad`.

    RuntimeError in `torch.autograd.grad` of a parameter.
    """
    _leave_out_unasked(flat, packed)
    leaf = _microbatch_index(unit) if unit.settings.same_bits else 0
    if flat.accumulated is not None:
        flat.accumulated.add(flat, packed, leaf)
        return
    sums = PartialSums() if unit.settings.same_bits else None
    if sums is not None:
        sums.add(leaf, packed)
    flat.accumulated = AccumulatedGradient(flat, packed, sums)
    _with_accumulated.add(flat)


def note_unused(flat: FlatParam, unused: Iterable[int] | None) -> None:
    """Note which parameters nothing has used of what is accumulated or reduced next; None: none of those that train."""
    flat.reduction.unused.note(_trained(flat) if unused is None else unused)


def _trained(flat: FlatParam) -> list[int]:
    return [index for index, param in enumerate(flat.params) if param.requires_grad]


def returns_gradients(flat: FlatParam) -> bool:
    """Whether the running backward pass returns gradients of the flat parameter: `torch.autograd.grad` was called."""
    return _asked(flat) is None


def _asked(flat: FlatParam) -> list[bool] | None:
    """For each parameter whether the running backward pass gives it a gradient; [] for all, None if it returns some."""
    if running_backward() is None or flat.binding.all_are_asked():
        return []
    try:
        return [param.requires_grad and executes_node(get_gradient_edge(param).node) for param in flat.params]
    except RuntimeError:  # torch cannot tell of leaves whose gradients are returned
        return None


def _leave_out_unasked(flat: FlatParam, packed: Tensor) -> None:
    """Set gradients to zero in `packed` for which the running backward pass was not asked, as by `inputs`."""
    if (asked := _asked(flat)) is None:
        raise RuntimeError(
            f"parameter {flat.names[0]} or another one of its unit: torch.autograd.grad under no_sync, or without "
            f"gradient synchronization, has no gradient of a shard to return; use backward(), or synchronize"
        )
    for segment in flat.layout.segments if asked else ():
        if segment.parameter is not None and not asked[segment.parameter]:
            packed[segment.offset : segment.offset + segment.numel].zero_()


def join_accumulated(unit: Unit, flat: FlatParam, packed: Tensor) -> Tensor:
    """The sum of `packed`, which may be overwritten, and the accumulated gradients, 1-D, to be reduced now."""
    leaf = _microbatch_index(unit) if unit.settings.same_bits else 0
    if unit.settings.same_bits:
        _check_tree(leaf + 1)
    accumulated = take_accumulated(flat)
    if accumulated is not None:
        note_unused(flat, accumulated.unused)
    if not unit.settings.same_bits:
        return packed if accumulated is None else packed.add_(accumulated.total)
    sums = PartialSums() if accumulated is None or accumulated.sums is None else accumulated.sums
    sums.add(leaf, packed)
    return sums.finish(leaf + 1)


def accumulated_alone(unit: Unit, flat: FlatParam) -> Tensor | None:
    """The accumulated gradients, 1-D, to be reduced now because the last backward pass had none to add."""
    accumulated = take_accumulated(flat)
    if accumulated is None or accumulated.sums is None:
        return None if accumulated is None else accumulated.total
    leaves = unit.reduces_in_flight.microbatches.index + 1
    _check_tree(leaves)
    return accumulated.sums.finish(leaves)


def take_accumulated(flat: FlatParam) -> AccumulatedGradient | None:
    """The accumulated gradients, no longer the flat parameter's; `.grad` is the reduced gradient again."""
    accumulated: AccumulatedGradient | None = flat.accumulated
    if accumulated is None:
        return None
    accumulated.collect(flat)
    accumulated.restore(flat)
    flat.accumulated = None
    _with_accumulated.discard(flat)
    return accumulated


def _microbatch_index(unit: Unit) -> int:
    """Which microbatch of its step the running backward pass is. A step begins where nothing is accumulated."""
    queue = unit.reduces_in_flight
    queue.microbatches = queue.microbatches or Microbatches()
    if not queue.microbatches.has_begun:
        flats = [flat for other in queue.awaiting_reduce if (under := other()) is not None for flat in under.flats]
        for flat in flats:
            drop_cleared(flat)
        queue.microbatches.begin(is_first=all(flat.accumulated is None for flat in flats))
    index: int = queue.microbatches.index
    return index


def _check_tree(leaves: int) -> None:
    if leaves & (leaves - 1):
        raise RuntimeError(
            f"reduction_order='tree': a step of {leaves} microbatches on each rank, of which {leaves - 1} ran under "
            f"no_sync; accumulate a power of two (1, 2, 4, ...), or clear all gradients to begin a step anew"
        )


def drop_cleared(flat: FlatParam) -> None:
    """Forget accumulated gradients all of which the user has set to None."""
    if flat.accumulated is not None and all(param.grad is None for param in flat.params):
        flat.accumulated = None
        _with_accumulated.discard(flat)


# --- units that the last backward leaves out --------------------------------------------------------------------------

# Note [Units that take no part in the last backward]
# A unit may have accumulated gradients under no_sync and then be left out of the backward pass that reduces, because
# forward or the loss did not use it. Its gradients are reduced when that pass has ended. A rank may have skipped the
# backward under no_sync and have accumulated nothing, so ranks first ask each other; whether they ask follows from what
# all of them did: from `set_sync`, and from reduces.


def wait_for_reduce(unit: Unit) -> None:
    """Note that `unit` may have accumulated gradients, if no_sync was in force since its last reduce."""
    if _awaits_reduce(unit):
        unit.reduces_in_flight.awaiting_reduce[weakref.ref(unit)] = None


def settle_after_backward(unit: Unit) -> None:
    """Reduce what is still accumulated when this backward pass of a forward of the unit's root has ended.

    See Note [Units that take no part in the last backward].
    """
    queue, backward = unit.reduces_in_flight, running_backward()
    if queue.awaiting_reduce and backward is not None:
        backward.at_end_once(queue, functools.partial(settle, queue))


class Accumulation(Listener):
    """Reduces at the end of a backward pass what units have accumulated that took no part in it."""

    def before_backward(self, gathered: Any, backward: BackwardPass, was_prefetched: bool) -> None:
        """Not of a module outside of its root: a reentrant checkpoint runs such a pass within that of the root."""
        if gathered.forward.of_root:
            settle_after_backward(gathered.unit)


def settle(queue: ReduceQueue) -> None:
    """Reduce what units accumulated that synchronize gradients again; all ranks must call it."""
    for unit in filter(None, [each() for each in queue.awaiting_reduce]):
        flats = [flat for flat in unit.flats if flat.reduction.awaits_reduce and flat.trains]
        if not unit.syncs or not flats:
            continue
        for flat in flats:
            drop_cleared(flat)
        has_none = all(flat.accumulated is None for flat in flats)
        for group in filter(None, (unit.group, unit.replicas)):
            has_none = collectives.holds_on_all_ranks(has_none, group.name, unit.device)
        for flat in flats:
            flat.reduction.awaits_reduce = False
        if not has_none:  # the backward of the flat shard adds the accumulated gradients, reduced, to what it is given
            shown = [flat for flat in flats if flat.autograd_shard is not None]
            zeros = [torch.zeros_like(flat.shard) for flat in shown]
            for flat, grad in zip(shown, zeros, strict=True):
                if flat.accumulated is not None:
                    flat.accumulated.collect(flat)
                set_unused(grad, _trained(flat) if flat.accumulated is None else sorted(flat.accumulated.unused))
            shards: list[Any] = [flat.autograd_shard for flat in shown]
            torch.autograd.backward(shards, zeros)
    queue.awaiting_reduce = {
        each: None for each in queue.awaiting_reduce if (left := each()) is not None and _awaits_reduce(left)
    }


def _awaits_reduce(unit: Unit) -> bool:
    return any(flat.reduction.awaits_reduce for flat in unit.flats)


# --- optimizers -------------------------------------------------------------------------------------------------------


@functools.cache
def check_optimizers() -> None:
    """From now on check every optimizer before it steps; registered once per process."""
    register_optimizer_step_pre_hook(_check_step)
    register_optimizer_step_pre_hook(_find_unaveraged)


def _check_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse gradients that were not reduced (E-GRAD-9), unless a closure runs a backward pass that may reduce them."""
    if not _with_accumulated or any(callable(each) for each in (*args, *kwargs.values()) if each is not optimizer):
        return
    for group in optimizer.param_groups:
        check_reduced(
            group["params"],
            "run the last backward before optimizer.step() outside no_sync; a trainer that lets each rank step alone, "
            "as LocalSGD of accelerate, needs a model that is not sharded",
        )


def check_reduced(params: Iterable[nn.Parameter], advice: str) -> None:
    """Raise RuntimeError, with `advice`, if one of `params` shows a gradient that was accumulated and not reduced."""
    for param in params if _with_accumulated else ():
        unit, index = unit_of(param) or (None, 0)
        accumulated = None if unit is None or param.grad is None else unit.in_flat(index)[0].accumulated
        if unit is not None and accumulated is not None and any(param.grad is shown for shown in accumulated.shown):
            raise RuntimeError(
                f"parameter {unit.names[index]}: its gradient was accumulated under no_sync and not reduced; {advice}"
            )


_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_mixed = itertools.count()  # optimizers of sharded parameters and others, numbered alike on all ranks


def _find_unaveraged(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the first step of an optimizer, warn of gradients beside sharded ones that differ between ranks.

    Their parameters drift apart, as where blocks are sharded and the module around them is not. No rank waits: whoever
    comes later finds what the first one has written. DistributedDataParallel, `replicate` and users may have averaged.
    """
    if torch.compiler.is_compiling() or optimizer in _stepped:
        return
    _stepped.add(optimizer)
    others, names, unit = [], [], None
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            managed = unit_of(param)
            if managed is not None:
                unit = managed[0]
            elif type(param) is nn.Parameter and type(param.grad) is Tensor and IGNORED not in vars(param):
                others.append(param.grad)
                names.append(
                    group["param_names"][index] if "param_names" in group else f"of shape {tuple(param.shape)}"
                )
    if unit is None or not others or not exists(unit.group.find()) or timeout_of_checks() is None:
        return
    mine = f"{len(others)} with checksums {[checksums([each]) for each in others if each.layout is torch.strided]}"
    if MessageBoard.of_group(unit.group.find(), "fsdp_flat/unaveraged").decide(str(next(_mixed)), mine) != mine:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        warn_caller(
            f"optimizer: beside parameters of fully_shard it has {len(names)} others ({some}), whose gradients differ "
            f"between ranks, as nothing averages them: the ranks drift apart; call fully_shard on the module around "
            f"the sharded ones as well, or name the parameters in ignored_params if that is meant"
        )
