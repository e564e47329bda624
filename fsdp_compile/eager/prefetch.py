"""Gathering a unit before a pass comes to it.

    forward    unit 0   unit 1   unit 2          forward prefetch follows the order of the first iteration (E-PRE-2)
    backward   unit 2   unit 1   unit 0          backward prefetch reverses this iteration's forward (E-PRE-3)

At most one unit is prefetched. A wrong prediction costs one all-gather, whose result is freed by the next prediction or
at the end of the pass. Users may choose units themselves: `set_modules_to_forward_prefetch` and the like.
"""

import weakref
from typing import Any

from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile.core.backward_pass import BackwardPass
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.forward_pass import ForwardPass, Listener
from fsdp_compile.eager.runtime import free_for_next_forward
from fsdp_compile.eager.unsharded import UnshardedUnit


class Prefetch(Listener):
    """Begins to gather the units that the user chose, else the one that comes next."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._order: list[weakref.ref[Unit]] = []  # the units of the first iteration, each at its first use (E-ORD-1)
        self._predicted: Unit | None = None  # what forward prefetch gathers
        self._in_backward: weakref.ref[UnshardedUnit] | None = None  # what backward prefetch gathered last

    def begin_forward(self, forward: ForwardPass, module: nn.Module) -> None:
        """Begin the order anew until a forward is complete."""
        self.end_forward()
        if not self.root.has_completed:
            self._order.clear()

    def end_forward(self) -> None:
        """Free what was predicted and not read."""
        if self._predicted is not None:
            free_for_next_forward(self._predicted)
            self._predicted = None

    def before_gather(self, unit: Unit, forward: ForwardPass) -> None:
        """Record the order; free what was predicted wrongly."""
        if forward.of_root and not self.root.has_completed and self._position(unit) is None:
            self._order.append(weakref.ref(unit))
        if self._predicted is unit:
            self._predicted = None
        elif self._predicted is not None:
            position, other = self._position(unit), self._position(self._predicted)
            if position is None or other is None or position > other:
                self.end_forward()

    def _position(self, unit: Unit) -> int | None:
        return next((position for position, known in enumerate(self._order) if known() is unit), None)

    def in_forward(self, gathered: UnshardedUnit) -> None:
        """Begin to gather the units that the user chose, else the one after that of `gathered` (E-PRE-2)."""
        chosen, full_precision = gathered.unit.options.prefetch_in_forward, gathered.values.full_precision
        if chosen is not None:
            self.root.unshard(chosen, full_precision)
            return
        wanted = self.root.settings.forward_prefetch and self.root.has_completed and self.root.running is not None
        if not wanted or self._predicted is not None:
            return
        position = self._position(gathered.unit)
        following = self._order[position + 1]() if position is not None and position + 1 < len(self._order) else None
        if following is not None and following.prefetched is None and not following.is_unsharded:
            self.root.unshard([following], full_precision)
            self._predicted = following

    def in_backward(self, gathered: UnshardedUnit, backward: BackwardPass) -> None:
        """Begin to gather again the units that the user chose, else the one whose backward comes next (E-PRE-1)."""
        chosen = gathered.unit.options.prefetch_in_backward
        if chosen is None:
            self._gather_next(gathered, backward, BackwardPrefetch.BACKWARD_PRE)
            return
        for unit in chosen:
            last = list(unit.awaiting_backward)[-1:]
            if last and last[0].backward is not backward:
                self._gather_again(last[0], backward)

    def after_backward(self, gathered: UnshardedUnit, backward: BackwardPass | None) -> None:
        """As `in_backward`, where all-gathers wait for the gradients of the unit before."""
        if gathered.unit.options.prefetch_in_backward is None and backward is not None:
            self._gather_next(gathered, backward, BackwardPrefetch.BACKWARD_POST)

    def _gather_next(self, gathered: UnshardedUnit, backward: BackwardPass, when: BackwardPrefetch) -> None:
        target = gathered.previous() if gathered.previous is not None else None
        if when is not self.root.settings.backward_prefetch or target is None or target.backward is backward:
            return
        earlier = self._in_backward() if self._in_backward is not None else None
        if earlier is not None and earlier is not target:
            earlier.free_prefetched()
        self._gather_again(target, backward)
        self._in_backward = weakref.ref(target)

    def _gather_again(self, target: UnshardedUnit, backward: BackwardPass) -> None:
        """Begin to gather again what `target` freed, unless values changed."""
        if target.is_current() and target.prefetch():
            backward.at_end(target.free_prefetched, if_failed=target.leave_unread)  # if nothing has read it (E-PRE-5)
