"""What the units under one root share: the order in which they run, and what is gathered ahead.

    forward    unit 0   unit 1   unit 2          forward prefetch: as the first iteration ran (E-PRE-2)
    backward   unit 2   unit 1   unit 0          backward prefetch: the reverse of this iteration's forward (E-PRE-3)

At most one unit is gathered ahead. A wrong guess costs one gather and is freed at the end of the pass.
"""

import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile.eager.gathered import Gathered
from fsdp_compile.eager.torch_private import call_after_backward
from fsdp_compile.eager.unshard import UnshardHandle, take_unsharded, unshard
from fsdp_compile.unit import Unit


class Root:
    """Iteration-wide state of a module that no sharded module encloses.

    Args:
        backward_prefetch: BACKWARD_PRE gathers the next unit while this one computes, BACKWARD_POST after it, None not
            ahead at all.
        forward_prefetch: whether forward gathers one unit ahead, in the order of the first iteration.
    """

    def __init__(
        self,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch: bool = False,
    ) -> None:
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.order: list[weakref.ref[Unit]] = []  # of the first iteration, each unit once
        self.recording = True
        self.iteration: object | None = None  # the forward of the root module that is running
        self.converting = False  # eager/convert.py is at work
        self._ahead: tuple[Unit, Gathered] | None = None
        self._last: weakref.ref[Gathered] | None = None  # the last to have ended its forward

    def __deepcopy__(self, memo: dict[int, Any]) -> "Root":
        twin = memo[id(self)] = Root(self.backward_prefetch, self.forward_prefetch)
        return twin

    def begin_iteration(self) -> None:
        """A forward of the root module starts."""
        self.iteration = object()
        self._drop_ahead()
        self._last = None

    def end_iteration(self) -> None:
        """The forward of the root module has ended, or failed."""
        self.iteration = None
        self._drop_ahead()
        self.recording = self.recording and not self.order

    def gather(self, unit: Unit, full_precision: bool) -> Gathered:
        """The unit's buffers, being filled: those gathered ahead, or new ones. Gather the next unit after it."""
        if self.recording and all(known() is not unit for known in self.order):
            self.order.append(weakref.ref(unit))
        gathered = (
            self._take_unsharded(unit, full_precision)
            or self._take_ahead(unit, full_precision)
            or Gathered(unit, full_precision)
        )
        if self.forward_prefetch and not self.recording:
            self._gather_ahead(unit, full_precision)
        return gathered

    def unshard(self, units: Sequence[Unit], full_precision: bool) -> UnshardHandle:
        """Begin to gather `units` for their next forward, as a user asks."""
        return unshard(units, full_precision, self.iteration)

    def _take_unsharded(self, unit: Unit, full_precision: bool) -> Gathered | None:
        if unit.unsharded is None:
            return None
        same_forward = unit.unsharded.iteration is self.iteration is not None
        return take_unsharded(unit, full_precision, same_forward)

    def _take_ahead(self, unit: Unit, full_precision: bool) -> Gathered | None:
        if self._ahead is None or self._ahead[0] is not unit or self._ahead[1].full_precision != full_precision:
            return None
        _, gathered = self._ahead
        self._ahead = None
        return gathered

    def _gather_ahead(self, unit: Unit, full_precision: bool) -> None:
        place = next((i for i, known in enumerate(self.order) if known() is unit), len(self.order))
        following = self.order[place + 1]() if place + 1 < len(self.order) else None
        if following is not None and following.views is following.unsharded is self._ahead is None:
            self._ahead = (following, Gathered(following, full_precision))

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead[1].free()
            self._ahead = None

    def ended_forward(self, gathered: Gathered) -> None:
        """Note the order in which forwards end: backward runs against it."""
        gathered.root, gathered.before = self, self._last
        self._last = weakref.ref(gathered)

    def prefetch_backward(self, gathered: Gathered, when: BackwardPrefetch) -> None:
        """Begin to gather the unit whose backward is likely to come next (E-PRE-1)."""
        target: Any = gathered.before() if gathered.before is not None else None
        if when is not self.backward_prefetch or target is None or target.backward != -1:
            return
        if target.prefetch():
            call_after_backward(target.free_if_unused)
