"""Parameters that no rank uses, in units that are used: their `.grad` stays None, as without sharding.

A rank sees which parameters its backward pass has used: eagerly by the gradients that autograd computes, compiled by
those in the graph. Slices of a flat gradient have no place to say it, as parameters cross their borders. So at the end
of a backward pass ranks exchange a byte for each parameter, by one all-reduce for the root. Only a rank that has left
something out waits for it: until then it holds back the gradients of that flat parameter.

    backward passes            exchange
    the first two of each      yes
    all others                 if a rank left something out before, or `find_unused_parameters=True`

Gradients that are accumulated under no_sync count as one: a parameter is unused if none of its backward passes used it.
"""

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, count
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from fsdp_compile.comm import collectives
from fsdp_compile.comm.comparison import exists
from fsdp_compile.comm.groups import NamedGroup
from fsdp_compile.core._torch import executes_node
from fsdp_compile.core.backward_pass import BackwardPass, running_backward
from fsdp_compile.core.flat_param import FlatParam, flat_param_at
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.forward_pass import Listener
from fsdp_compile.tensors.sharded_tensor import FlatGradient, ShardedTensor, has_hooks
from fsdp_compile.tensors.unused import NONE, Indices, set_unused

FIRST = 2
"""In how many of a flat parameter's backward passes ranks are asked whether they leave something out."""

Groups = tuple[NamedGroup, NamedGroup | None]
"""The group that a unit is sharded over, and its replicas."""


class _Place:
    """Where a flat parameter is among those of the root.

    Attributes:
        number: of the flat parameter, alike on all ranks.
        flat: refers to it, and `unit` to its unit.
        reduces: how many of its gradients ranks have compared, `FIRST` at most.
    """

    __slots__ = ("flat", "number", "reduces", "unit")

    def __init__(self, number: int, flat: FlatParam, unit: Unit, reduces: int) -> None:
        self.number, self.reduces = number, reduces
        self.flat, self.unit = weakref.ref(flat), weakref.ref(unit)


class _Reduced(NamedTuple):
    """What a backward pass has reduced of a flat parameter."""

    number: int  # of its place
    flat: FlatParam
    unit: Unit
    unused: Indices  # on this rank
    grad: Tensor | None  # of its shard, if this rank has left something out


class _Answer(NamedTuple):
    """An all-reduce under way: for each parameter whether a rank has used it, then whether one left something out."""

    groups: Groups
    used: Tensor  # uint8
    filling: collectives.Filling | None


class Unused(Listener):
    """Leaves out the gradients of parameters that no rank has used."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._finds: bool | None = root.settings.find_unused_parameters
        self._numbers, self._has_warned = count(), False
        self._passes: dict[BackwardPass, list[_Reduced]] = {}
        self._lock = threading.Lock()  # gradients of shards in host memory arrive in another thread
        self._places: weakref.WeakKeyDictionary[FlatParam, _Place] = weakref.WeakKeyDictionary()
        self._at_rest: list[_Place] = []  # whose backward passes ask only if they leave something out
        self._is_on: dict[Groups, bool] = {}
        self._answers: list[_Answer] = []

    def compare(self, module: nn.Module, settings: str, compiled: bool) -> bool:
        """Hear of the gradients of all units."""
        for unit in units_gathered_below(module):
            self._hear_of(unit)
        return True

    def before_backward(self, gathered: Any, backward: BackwardPass, was_prefetched: bool) -> None:
        """Hear of the gradients of a unit whose root has run no forward."""
        if gathered.unit.flats[0].reduction.unused.leave_out is None:
            self._hear_of(gathered.unit)

    def _hear_of(self, unit: Unit) -> None:
        for flat in unit.flats if self._finds is not False else ():
            known = self._places.get(flat)
            place = _Place(next(self._numbers), flat, unit, 0 if known is None else known.reduces)
            self._places[flat] = place
            flat.reduction.unused.leave_out = partial(_leave_out, weakref.ref(self), place)

    def left_out(self, place: _Place, flat: FlatParam, unit: Unit, grad: Tensor, unused: Indices) -> Indices:
        """Which parameters of `flat` get no gradient in this pass: those of `unused` may get theirs at its end.

        Args:
            place: of the flat parameter.
            flat: the flat parameter, of `unit`.
            unit: the unit.
            grad: reduced, 1-D `[shard_numel]`.
            unused: the parameters that this rank has not used.
        """
        backward = running_backward()
        assert backward is not None  # which has reduced it
        if self._answers:
            self._read_answers()
        if unused:
            unused = _may_have_none(flat, unused)
        if place.reduces < FIRST:
            place.reduces += 1
        elif not self._is_on.get((unit.group, unit.replicas), self._finds):
            if flat.reduction.unused.is_asked:
                flat.reduction.unused.is_asked = False
                self._at_rest.append(place)
            if unused:
                self._warn_of_unused(flat.names[min(unused)])
            return NONE
        with self._lock:
            if backward not in self._passes:
                self._passes[backward] = []
                backward.at_end(partial(self._end_pass, backward), if_failed=partial(self._passes.pop, backward))
        self._passes[backward].append(_Reduced(place.number, flat, unit, unused, grad if unused else None))
        return unused

    def _end_pass(self, backward: BackwardPass) -> None:
        """The pass has reduced all: tell the other ranks what this one has used."""
        by_groups: dict[Groups, list[_Reduced]] = {}
        for reduced in sorted(self._passes.pop(backward), key=itemgetter(0)):
            by_groups.setdefault((reduced.unit.group, reduced.unit.replicas), []).append(reduced)
        for groups, of_groups in by_groups.items():
            self._answers.append(answer := _start_asking(groups, _used_flags(of_groups), of_groups[0].unit.device))
            self._ask_of_all()  # and the answer is read before, at the same place on all ranks
            if not any(each.unused for each in of_groups):
                continue
            self._read_answers()
            used_by_any = iter(answer.used.tolist())
            for each in of_groups:
                late = [index for index in range(len(each.flat.params)) if next(used_by_any) and index in each.unused]
                if late:
                    _add_late_gradients(each, late)

    def _ask_of_all(self) -> None:
        while self._at_rest:
            flat = self._at_rest.pop().flat()
            if flat is not None:
                flat.reduction.unused.is_asked = True

    def _read_answers(self) -> None:
        while self._answers:
            groups, used, filling = self._answers.pop(0)
            if filling is not None:
                with collectives.waiting_for("comparison", "parameters in use"):
                    filling.wait()
            if not self._is_on.get(groups, self._finds):
                self._is_on[groups] = bool(used[-1])

    def _warn_of_unused(self, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_caller(
                f"parameter {name} was not used in this backward, for the first time on this rank, and ranks no longer "
                f"compare which ones they use: it gets a gradient of zeros, so that weight decay and momentum change "
                f"it even where no rank has used it; pass find_unused_parameters=True to fully_shard"
            )


def _used_flags(of_groups: Sequence[_Reduced]) -> Tensor:
    """For each parameter 1 if this rank has used it, then 1 if it has left something out; uint8."""
    sizes = [len(each.flat.params) for each in of_groups]
    flags = torch.ones(sum(sizes) + 1, dtype=torch.uint8)
    firsts = accumulate(sizes, initial=0)
    unused = [first + index for each, first in zip(of_groups, firsts, strict=False) for index in each.unused]
    flags[unused or -1] = 0
    return flags


def _start_asking(groups: Groups, flags: Tensor, device: torch.device) -> _Answer:
    filling = None
    if device.type != "cpu":
        flags = flags.pin_memory().to(device, non_blocking=True)  # the host does not wait
    for group in groups:
        if group is not None and exists(group.find()):
            if filling is not None:
                filling.wait()
            filling = collectives.start_all_reduce(flags, group.name, "max")
    return _Answer(groups, flags, filling)


def _add_late_gradients(reduced: _Reduced, late: list[int]) -> None:
    """Give parameters `late` their gradients, behind the backward pass."""
    flat, grad = reduced.flat, reduced.grad
    assert grad is not None  # this rank has left them out
    parts = ShardedTensor.of_each(FlatGradient(grad, flat.specs, flat.binding.splitter.split_stored))
    for param, part in ((flat.params[index], parts[index]) for index in late):
        if param.grad is None:
            param.grad = part
        else:
            param.grad.add_(part)


def _may_have_none(flat: FlatParam, unused: Indices) -> Indices:
    """Those of `unused` that may get their gradient behind the running pass: whose `.grad` it adds to, as `backward`
    does and `torch.autograd.grad` does not, and that have no hooks, which autograd calls even where it has no gradient.
    """
    if not flat.binding.all_are_asked():
        try:
            unused = frozenset(i for i in unused if executes_node(get_gradient_edge(flat.params[i]).node))
        except RuntimeError:  # torch cannot tell of leaves whose gradients are returned
            return NONE
    return frozenset(index for index in unused if not has_hooks(flat.params[index]))


def _leave_out(listener_ref: "weakref.ref[Unused]", place: _Place, grad: Tensor, unused: Indices) -> Indices:
    listener, flat, unit = listener_ref(), place.flat(), place.unit()
    if listener is None or flat is None or unit is None:  # deleted
        return NONE
    return listener.left_out(place, flat, unit, grad, unused)


@torch.library.impl("fsdp_flat::leave_out", "default")
def _note_left_out(grad: Tensor, shard: Tensor | None, params: list[int]) -> Tensor:
    flat, grad = None if shard is None else flat_param_at(shard), grad.clone()
    if flat is None:
        return set_unused(grad, params)
    flat.reduction.unused.note(params, grad)
    return grad
