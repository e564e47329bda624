"""What the units below one root share: the order in which they run, prefetching, streams, reduces in flight.

    forward    unit 0   unit 1   unit 2          forward prefetch follows the order of the first iteration (E-PRE-2)
    backward   unit 2   unit 1   unit 0          backward prefetch reverses this iteration's forward (E-PRE-3)

At most one unit is prefetched. A wrong prediction costs one all-gather, whose result is freed by the next prediction or
at the end of the pass.

Forward uses `unit.prefetched`, whoever asked for it: forward prefetch, `set_modules_to_forward_prefetch` or
`FSDPModule.unshard`. Within one forward of the root no parameter may change. Outside of it one may on some ranks only
(an optimizer skips parameters without a gradient): the ranks then agree by an all-reduce of one number.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile.comm import collectives
from fsdp_compile.comm.waits import state_of
from fsdp_compile.core._torch import call_after_backward, current_backward
from fsdp_compile.core.settings import Settings, warn_caller
from fsdp_compile.core.sharding import changed_in_forward, units_gathered_below
from fsdp_compile.core.unit import Phase, ReduceQueue, Unit
from fsdp_compile.eager.checks import check_root, compare_units, groups_of, warn_of_kept_views
from fsdp_compile.eager.order import Order
from fsdp_compile.eager.reduce import abandon_gradients
from fsdp_compile.eager.streams import Device, Streams, UnshardedBuffer
from fsdp_compile.eager.unsharded import UnshardedUnit, UnshardHandle, free_for_next_forward, reshard
from fsdp_compile.eager.writeback import refresh


class Runtime:
    """Run-time state of a root: a sharded module that no other one encloses.

    Args:
        settings: of the call of `fully_shard` on the root.
        is_divided: whether "auto" chose units inside the root, which become one if a module around it is sharded.

    Attributes:
        iteration: an object that stands for the running forward of the root, or None.
        order: the units of the first iteration, each at its first use (E-ORD-1).
        forward_order: on which the ranks agree; that of backward is `reduces_in_flight.order`.
        reduces_in_flight: reduces that backward passes have started and not yet waited for, oldest first. One queue for
            each root: a thread that waited for the reduce of another thread's model could wait for ever.
        shared_in_forward: units of several modules that the running forward has gathered; the root closes them.
        unread: buffers that a failed backward pass had begun to fill. The next forward waits for them: a rank that
            failed alone would wait for ever for the others.
        post_optim_event: what the next forward's all-gathers wait for, instead of all work queued before; or None.
        converting: whether `Module._apply` is running (eager/casting.py).
    """

    def __init__(self, settings: Settings, is_divided: bool = False) -> None:
        self.settings, self.is_divided = settings, is_divided
        self.iteration: object | None = None
        self.order: list[weakref.ref[Unit]] = []
        self.reduces_in_flight = ReduceQueue()
        self.shared_in_forward: list[UnshardedUnit] = []
        self.unread: list[UnshardedBuffer] = []
        self.post_optim_event: Any = None
        self.converting = False
        self.forward_order, self.reduces_in_flight.order = Order("forward"), Order("backward")
        self._order_is_known = self._is_checked = self._is_compared = False
        self._looked_for_views = set[bool]()
        self._warned: set[str] = set()  # methods without an effect on a compiled forward
        self._changed_in_forward: list[str] = []  # parameters that the first forward has changed
        self._streams: dict[torch.device, Streams] = {}
        self._predicted: Unit | None = None  # what forward prefetch gathers
        self._prefetched_in_backward: weakref.ref[UnshardedUnit] | None = None
        self._last_forward: weakref.ref[UnshardedUnit] | None = None
        self._last_unit: weakref.ref[Unit] | None = None  # whose forward, its only one, ended just before the root's
        self._ended: dict[Unit, int] = {}  # how many forwards of each unit have ended in this iteration

    def __deepcopy__(self, memo: dict[int, Any]) -> "Runtime":
        copied = memo[id(self)] = Runtime(self.settings, self.is_divided)
        queue = memo.setdefault(id(self.reduces_in_flight), ReduceQueue())  # also of the copied units
        queue.order, copied.reduces_in_flight = copied.reduces_in_flight.order, queue
        return copied

    def streams_for(self, device: torch.device) -> Streams:
        """The streams of units that compute on `device`, made at the first use."""
        if device not in self._streams:
            self._streams[device] = Streams(Device(device), self.settings.limit_all_gathers)
            self._streams[device].begin_iteration()
        return self._streams[device]

    def share_streams(self, other: "Runtime") -> None:
        """Use the streams of `other`, a root whose forwards and backwards alternate with these."""
        self._streams = other._streams

    def check(self, module: nn.Module) -> None:
        """Before the first forward of the root `module`, raise ValueError if none can be right."""
        if not self._is_checked:
            check_root(module)
            self._is_checked = True

    def check_again(self) -> None:
        """Check before the next forward of the root as before the first one."""
        self._is_checked = False

    def compare(self, module: nn.Module, compiled: bool) -> None:
        """Before the first forward of the root `module` that communicates, raise RuntimeError if ranks differ."""
        if not self._is_compared:
            given = self.settings
            settings = f"backward_prefetch {given.backward_prefetch}, forward_prefetch {given.forward_prefetch}"
            self._is_compared = compare_units(module, settings, compiled)
            units, orders = units_gathered_below(module), (self.forward_order, self.reduces_in_flight.order)
            orders[0].groups = orders[1].groups = groups_of(units)
            for group in self.forward_order.groups if self._is_compared else ():
                flats = [flat for unit in units if group in (unit.group, unit.replicas) for flat in unit.flats]
                state_of(group).number_model([*orders, *flats])

    def warn_compiled(self, methods: set[str]) -> None:
        """Before a compiled forward, warn once of each of `methods`, which were called and have no effect on it."""
        for method in sorted(methods - self._warned):
            self._warned.add(method)
            warn_caller(
                f"{method} has no effect on a compiled forward and its backward: graphs gather, free and reduce where "
                f"their plan says; leave the call out, run the model eagerly, or compile its blocks by block.compile()"
            )

    # --- iterations ---------------------------------------------------------------------------------------------------

    def begin_iteration(self, module: Any) -> None:
        """Begin a forward of the root `module`. Raises as `check` and `compare` do."""
        self.check(module)
        self.compare(module, compiled=False)
        self._drop_prediction()
        self._drop_unread()
        for unit in module._fsdp.units_below:
            if unit.phase is Phase.FORWARD:  # an exception has interrupted what ends a forward
                unit.hide_unsharded()
        self.shared_in_forward.clear()
        self._last_forward, self.iteration = None, object()
        self._ended.clear()
        self.forward_order.begin((torch.is_grad_enabled(), module.training))
        if not self._order_is_known:
            self.order.clear()  # of an iteration that failed
            self._changed_in_forward = []
        for streams in self._streams.values():
            streams.begin_iteration(self.post_optim_event)
        self.post_optim_event = None

    def look_at_first(self, module: nn.Module, opened: Sequence[UnshardedUnit]) -> None:
        """In the first forward of the root, look for parameters that the forward of `module` has changed.

        In the first one with gradients, and the first without, also for views of them that it has kept.
        """
        if self.iteration is None:
            return
        if not self._order_is_known:
            self._changed_in_forward += [name for gathered in opened for name in gathered.find_changed()]
        if torch.is_grad_enabled() not in self._looked_for_views:
            buffers = [buffer for gathered in opened for buffer in gathered.buffers if not buffer.is_shard]
            warn_of_kept_views(module, {buffer.storage.data_ptr() for buffer in buffers} - {0})

    def complete_iteration(self) -> None:
        """After a complete forward of the root, raise RuntimeError if ranks differ or the first one changed parameters.

        A rank sees that of those parameters alone of which it stores a part, so that ranks compare them too.
        """
        changed, self._changed_in_forward = self._changed_in_forward, []
        self.forward_order.end([changed_in_forward([name]) for name in changed])
        if changed:
            raise RuntimeError(changed_in_forward(changed))
        self._looked_for_views.add(torch.is_grad_enabled())
        self._order_is_known = bool(self.order)  # not of a forward on one rank, of summoned parameters
        if self._ended:  # not without gradients
            last = next(reversed(self._ended))
            self._last_unit = weakref.ref(last) if self._ended[last] == 1 else None

    def end_iteration(self) -> None:
        """End the forward of the root module, which has returned or failed."""
        self.iteration = None
        self.forward_order.drop()
        self._drop_prediction()
        if not torch.is_grad_enabled():  # no backward follows, after which the host may change what copies still read
            for streams in self._streams.values():
                streams.block_on_unshard()

    def reset(self, module: nn.Module) -> None:
        """Free and forget what a failed forward or backward of the root `module` left, gradients included."""
        while self.reduces_in_flight:
            self.reduces_in_flight.wait_for_oldest()
        self._drop_unread()
        for gathered in self.shared_in_forward:
            gathered.hide()
        self.shared_in_forward.clear()
        for unit in units_gathered_below(module):
            unit.hide_unsharded()
            reshard(unit)
            unit.awaiting_backward.clear()
            for flat in unit.flats:
                flat.reduction.wait_on_host()
            abandon_gradients(unit)
        self.end_iteration()

    def abandon(self, module: nn.Module) -> None:
        """As `reset`, without any wait, after the process groups of collectives in flight have failed.

        Memory that these may still write to stays with them. Ranks are compared anew before the next forward.
        """
        self.reduces_in_flight.clear()
        self.unread.clear()
        self.shared_in_forward.clear()
        self.iteration = self._predicted = self._prefetched_in_backward = self._last_forward = self._last_unit = None
        self._is_compared = self._order_is_known = False
        self.forward_order.forget()
        self.reduces_in_flight.order.forget()
        for unit in units_gathered_below(module):
            unit.become_idle()
            abandon_gradients(unit)

    # --- forward ------------------------------------------------------------------------------------------------------

    def gather(self, unit: Unit, full_precision: bool) -> UnshardedUnit:
        """The unit's buffers, being filled: prefetched ones if up to date, else new ones."""
        running = self.iteration is not None
        if running and not self._order_is_known and self._position(unit) is None:
            self.order.append(weakref.ref(unit))
        if running and unit.is_sharded:
            self.forward_order.next("all-gather", unit)
        streams = self.streams_for(unit.device)
        if not running:  # a unit that runs outside of its root
            streams.begin_iteration()
        if self._predicted is not None and self._predicted is not unit:
            position, other = self._position(unit), self._position(self._predicted)
            if position is None or other is None or position > other:  # the prediction was wrong
                self._drop_prediction()
        gathered = self._take_prefetched(unit, full_precision) or UnshardedUnit(unit, full_precision, streams)
        gathered.unread = self.unread
        return gathered

    def _take_prefetched(self, unit: Unit, full_precision: bool) -> UnshardedUnit | None:
        """What was gathered for this forward of `unit`, unless it is out of date on some rank."""
        if self._predicted is unit:
            self._predicted = None
        gathered, unit.prefetched = unit.prefetched, None
        if gathered is None:
            return None
        refresh(unit)
        current = gathered.full_precision == full_precision and gathered.is_current()
        in_this_forward = self.iteration is not None and gathered.iteration is self.iteration
        if unit.is_sharded and not in_this_forward:
            current = collectives.holds_on_all_ranks(current, unit.group_name, unit.device)
        if not current:
            gathered.free()
        return gathered if current else None

    def prefetch_forward(self, gathered: UnshardedUnit) -> None:
        """Begin to gather the units that the user chose, else the one after that of `gathered` (E-PRE-2)."""
        chosen = gathered.unit.options.prefetch_in_forward
        if chosen is not None:
            self.unshard(chosen, gathered.full_precision)
            return
        wanted = self.settings.forward_prefetch and self._order_is_known and self.iteration is not None
        if not wanted or self._predicted is not None:
            return
        position = self._position(gathered.unit)
        following = self.order[position + 1]() if position is not None and position + 1 < len(self.order) else None
        if following is not None and following.prefetched is None and not following.is_unsharded:
            self.unshard([following], gathered.full_precision)
            self._predicted = following

    def unshard(self, units: Sequence[Unit], full_precision: bool) -> UnshardHandle:
        """Begin to gather `units` for their next forward. Raises AssertionError if one is summoned."""
        for unit in units:
            unit.check_not_summoned("unshard")
        started = []
        with torch.inference_mode(False):
            for unit in units:
                if not unit.is_unsharded and unit.prefetched is None:
                    streams = self.streams_for(unit.device)
                    if self.iteration is None:
                        streams.begin_iteration()
                    unit.prefetched = UnshardedUnit(unit, full_precision, streams, self.iteration)
                if unit.prefetched is not None:
                    started.append(unit.prefetched)
        return UnshardHandle(started)

    def _position(self, unit: Unit) -> int | None:
        return next((position for position, known in enumerate(self.order) if known() is unit), None)

    def _drop_prediction(self) -> None:
        if self._predicted is not None:
            free_for_next_forward(self._predicted)
            self._predicted = None

    # --- backward -----------------------------------------------------------------------------------------------------

    def begins_backward(self, gathered: UnshardedUnit) -> bool:
        """Whether "auto" keeps what the forward of `gathered` leaves: backward needs it before it could be gathered.

        That is the last unit, as it was in the forward before on all ranks. Backward prefetch would gather it where
        backward begins, so the highest moment of memory, which is there, is no higher.
        """
        return (
            gathered.unit.reshard_after_forward is None
            and self.iteration is not None
            and self._last_unit is not None
            and self._last_unit() is gathered.unit
        )

    def end_forward(self, gathered: UnshardedUnit) -> None:
        """Record the order in which the forwards of units end: backward reverses it."""
        if torch.is_grad_enabled():
            gathered.prefetch_backward, gathered.previous = self.prefetch_backward, self._last_forward
            gathered.in_root_forward = self.iteration is not None
            self._last_forward = weakref.ref(gathered)
            self._ended[gathered.unit] = self._ended.pop(gathered.unit, 0) + 1  # the last one last

    def _drop_unread(self) -> None:
        while self.unread:  # torch keeps what a collective writes until it was waited for
            buffer = self.unread.pop()
            if buffer.filling:  # no other backward pass of the same graph has read it since
                buffer.finish()
                buffer.free()

    def prefetch_backward(self, gathered: UnshardedUnit, when: BackwardPrefetch) -> None:
        """Begin to gather the units that the user chose, else the one whose backward comes next (E-PRE-1)."""
        chosen = gathered.unit.options.prefetch_in_backward
        if chosen is not None:
            for unit in chosen if when is BackwardPrefetch.BACKWARD_PRE else ():
                last = list(unit.awaiting_backward)[-1:]
                if last and last[0].backward_pass != current_backward():
                    self._prefetch_again(last[0])
            return
        target = gathered.previous() if gathered.previous is not None else None
        if when is not self.settings.backward_prefetch or target is None or target.backward_pass == current_backward():
            return
        earlier = self._prefetched_in_backward() if self._prefetched_in_backward is not None else None
        if earlier is not None and earlier is not target:
            earlier.free_prefetched()
        if self._prefetch_again(target):
            self._prefetched_in_backward = weakref.ref(target)

    def _prefetch_again(self, target: UnshardedUnit) -> bool:
        """Begin to gather again what `target` freed, unless values changed; return whether anything was."""
        if not target.is_current() or not target.prefetch():
            return False
        call_after_backward(target.free_prefetched, if_failed=target.leave_unread)  # if nothing has read it (E-PRE-5)
        return True
