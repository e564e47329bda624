"""Which parameters have no gradient among packed ones, where zeros stand for what nothing has used."""

import operator
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import repeat

from torch import Tensor

Indices = Set[int]
NONE: Indices = frozenset()


def mark_unused(packed: Tensor, grads: Sequence[Tensor | None], frozen: Sequence[int] = ()) -> Tensor:
    """Return `packed`, 1-D, of which `unused_in` says which of `grads` were None, other than those of `frozen`."""
    if any(map(operator.is_, grads, repeat(None))):  # in C: it runs for each parameter
        set_unused(packed, [index for index, grad in enumerate(grads) if grad is None and index not in frozen])
    return packed


def set_unused(packed: Tensor, unused: Sequence[int]) -> Tensor:
    """Return `packed`, of which `unused_in` says `unused`, by index."""
    vars(packed)["_fsdp_unused"] = unused, packed._version
    return packed


def unused_in(packed: Tensor) -> Sequence[int]:
    """The indices of parameters that train and that `packed` has zeros for, because nothing has used them.

    None of a tensor that was changed since: autograd adds up gradients in place, and another graph may use others.
    """
    unused, version = getattr(packed, "_fsdp_unused", ((), 0))
    return unused if version == packed._version else ()


class UnusedParameters:
    """Which parameters of a flat one nothing on this rank has used, in what adds up to the next gradient of the shard.

    Each backward pass has notes of its own: a reentrant checkpoint runs one within another one, of the same parameters.
    `running` returns an object for the running one, another one for each; None outside of any.
    """

    def __init__(self, running: Callable[[], object]) -> None:
        self._running = running
        # Given the reduced gradient and indices that this rank has not used, returns those that the pass is to give no
        # gradient; None: zeros are given to all.
        self.leave_out: Callable[[Tensor, Indices], Indices] | None = None
        self.is_asked = True  # whether it is called where this rank has used all, too
        self._unused: dict[object, Indices] = {}  # by backward pass
        self._of_graphs: dict[object, list[Tensor]] = {}  # gradients of the shard that have been noted

    @property
    def so_far(self) -> Indices:
        """The indices in what the running pass has added up."""
        return self._unused.get(self._running(), NONE)

    def note(self, unused: Iterable[int], grad: Tensor | None = None) -> None:
        """Note what a part of the next gradient has not used; `grad`: of the shard, 1-D, as a graph returns it.

        Nothing is noted while zeros are given to all.
        """
        if self.leave_out is None:
            return
        backward, others = self._running(), frozenset(unused)
        self._unused[backward] = self._unused.get(backward, others) & others
        if grad is not None:
            self._of_graphs.setdefault(backward, []).append(grad)

    def take(self, of_graphs: Tensor | None, total: Tensor, split: Callable[[Tensor], Sequence[Tensor]]) -> Indices:
        """What nothing on this rank has used in `total`, `[shard_numel]`, from now on of the gradient after it.

        `of_graphs`: what is in it of graphs that reduce, which note nothing where they use all. If it is the sum of
        several, those parameters are used that have other values than zeros.
        """
        unused, noted = self.take_noted(), self._of_graphs.pop(self._running(), [])
        if of_graphs is not None and (marked := unused_in(of_graphs)):  # by what has begun this pass
            return frozenset(marked)
        if of_graphs is None or not unused or [each.data_ptr() for each in noted] == [of_graphs.data_ptr()]:
            return unused
        parts = split(total) if noted else ()
        return frozenset(index for index in unused if noted and not parts[index].any())

    def take_noted(self) -> Indices:
        """What nothing on this rank has used in what was added up, which is none of the next gradient any more."""
        return self._unused.pop(self._running(), NONE)

    def left_out(self, grad: Tensor, unused: Indices) -> Indices:
        """Which parameters the running pass is to give no gradient, of those that this rank has not used in `grad`."""
        if self.leave_out is None or not (unused or self.is_asked):
            return NONE
        return self.leave_out(grad, unused)

    def forget(self) -> None:
        """What was added up is dropped."""
        self._unused.clear()
        self._of_graphs.clear()
