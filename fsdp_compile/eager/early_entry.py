"""Where backward comes to a unit's forward before it comes to any tensor that has a hook.

    x = self.inner(x)
    losses.append(self.gate(x).mean())    # leaves the forward where nobody sees it
    return x, x.norm()                    # nobody uses the norm

The unit is gathered again where a gradient reaches its outputs. What leaves its forward otherwise has no hook. It needs
none while an output that was made later has a gradient, as backward comes to that first. Here none has. So where the
tensor that was made last gets no gradient, the unit is gathered when the backward of the one behind it ends: the next
node that autograd runs may be one of its own.

A pass that keeps its graph and leaves out the parameters, as torch.autograd.grad(loss, input, retain_graph=True), is
often followed by one that begins inside the unit: pipelines without bubbles compute the gradients of parameters later,
from where their products were. So such a pass leaves hooks on what reads the parameters.
"""

import weakref
from collections.abc import Iterator
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from fsdp_compile.comm._torch import current_node
from fsdp_compile.core._torch import backward_keeps_graph, executes_node
from fsdp_compile.core.backward_pass import BackwardPass, running_backward
from fsdp_compile.eager.forward_pass import Listener
from fsdp_compile.eager.unsharded import State, UnshardedUnit


class EarlyEntry(Listener):
    """Gathers a unit again before its first node, if no hook will."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._unreduced: weakref.WeakSet[UnshardedUnit] = weakref.WeakSet()  # entered by backward
        self._watched: weakref.WeakSet[UnshardedUnit] = weakref.WeakSet()  # with hooks inside

    def in_backward(self, gathered: UnshardedUnit, backward: BackwardPass) -> None:
        """Gather what ran within `gathered`, or before a frozen one: their nodes follow each other without a sign."""
        if gathered.unit.trains:
            self._unreduced.add(gathered)
            way = gathered.opened.way
            if way and backward_keeps_graph() and gathered not in self._watched and not _comes_to(way):
                self._watched.add(gathered)
                for node in _readers(current_node(), way):
                    node.register_prehook(partial(_enter_inside, gathered))
        before = gathered.previous() if gathered.previous is not None else None
        if before is not None:
            is_within = before.opened.first_node > gathered.opened.first_node
            if is_within or not gathered.unit.trains:
                self._enter_before(gathered, backward)

    def after_reduce(self, gathered: UnshardedUnit) -> None:
        """Gather what ran before `gathered`: after its reduce, as on ranks on which a hook gathers it."""
        self._unreduced.discard(gathered)
        backward = running_backward()
        if backward is not None:
            self._enter_before(gathered, backward)

    def _enter_before(self, gathered: UnshardedUnit, backward: BackwardPass) -> None:
        target = _entered_by_no_hook(gathered, backward)
        if target is None or target.unit.is_unsharded or not target.is_current():
            return
        first, last = target.opened.first_node, gathered.opened.first_node
        if any(each.backward is backward and first < each.opened.first_node < last for each in self._unreduced):
            return  # one around `gathered`, whose reduce comes first
        is_there = not any(buffer.is_free or buffer.filling for buffer in target.buffers)
        if not is_there and target.state in (State.WAITING, State.PREFETCHED):
            if torch.is_grad_enabled():
                target.hold()
            target.pre_backward(backward)


def _enter_inside(gathered: UnshardedUnit, _grads: Any) -> None:
    if gathered.backward is not running_backward():
        gathered.previous = None  # where this pass ends: it comes to none before, which need not be prefetched
    gathered.before_backward(_grads)


def _readers(last: Any, way: Any) -> Iterator[Any]:
    """The nodes from `last` down that read what `way` returns, as it is or after operations on nothing else."""
    found, left = {last}, [last]
    while left:
        new = {node for node, _ in left.pop().next_functions if node and node._sequence_nr() > way._sequence_nr()}
        left += new - found
        found |= new
    of_parameters = {way}
    for node in sorted(found, key=methodcaller("_sequence_nr")):  # what is read before what reads it
        inputs = {each for each, _ in node.next_functions if each}
        if inputs & of_parameters:
            yield node
            if inputs <= of_parameters:
                of_parameters.add(node)


def _entered_by_no_hook(gathered: UnshardedUnit, backward: BackwardPass) -> UnshardedUnit | None:
    """The last forward before that of `gathered` that `backward`, which runs, is still to come to, unless by a hook."""
    earlier: Any = gathered
    while earlier.previous is not None and (earlier := earlier.previous()) is not None:
        if earlier.backward is backward:
            continue
        if _has_gradient(earlier.last_exit):
            return None
        if _comes_to(earlier.opened.way):
            return earlier
    return None


def _has_gradient(exit_: Any) -> bool:
    """Whether the running backward pass comes to the node of `exit_`, as far as that can be asked."""
    if exit_ is None or exit_[1]() is None:
        return False
    tensor = exit_[2]()
    return tensor is None or _comes_to(tensor.grad_fn)


def _comes_to(node: Any) -> bool:
    try:
        return node is not None and executes_node(node)
    except RuntimeError:  # torch.autograd.grad, of a leaf
        return True
