"""What the units below one root share: the passes over it, streams, reduces in flight, and who hears of the passes.

Forward uses `unit.prefetched`, whoever asked for it: forward prefetch, `set_modules_to_forward_prefetch` or
`FSDPModule.unshard`. Within one forward of the root no parameter may change. Outside of it one may on some ranks only
(an optimizer skips parameters without a gradient): the ranks then agree by an all-reduce of one number.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp_compile.comm import collectives
from fsdp_compile.core.autograd import ReduceQueue
from fsdp_compile.core.settings import Settings, warn_caller
from fsdp_compile.core.sharding import units_gathered_below
from fsdp_compile.core.unit import Phase, Unit
from fsdp_compile.eager.forward_pass import ForwardPass, Listener, heard_by
from fsdp_compile.eager.reduce import abandon_gradients
from fsdp_compile.eager.streams import Device, Streams, UnshardedBuffer
from fsdp_compile.eager.unsharded import Lifetime, UnshardedUnit


class UnshardHandle(torch.distributed.fsdp.UnshardHandle):
    """All-gathers that `FSDPModule.unshard(async_op=True)` has started."""

    def __init__(self, gathers: Sequence[UnshardedUnit]) -> None:
        self._gathers = gathers

    def wait(self) -> None:
        """Order the current stream after the all-gathers; without streams, wait for them."""
        for gathered in self._gathers:
            gathered.wait()
        self._gathers = ()


class Runtime:
    """Run-time state of a root: a sharded module that no other one encloses.

    Args:
        settings: of the call of `fully_shard` on the root.
        is_divided: whether "auto" chose units inside the root, which become one if a module around it is sharded.
        listeners: the layers that hear of passes.

    Attributes:
        running: the running forward of the root, or None.
        has_completed: whether a forward of the root has gathered units and ended.
        reduces_in_flight: reduces that backward passes have started and not yet waited for, oldest first. One queue for
            each root: a thread that waited for the reduce of another thread's model could wait for ever.
        unread: buffers that a failed backward pass had begun to fill. The next forward waits for them: a rank that
            failed alone would wait for ever for the others.
        post_optim_event: what the next forward's all-gathers wait for, instead of all work queued before; or None.
        converting: whether `Module._apply` is running (edits/apply.py).
    """

    def __init__(self, settings: Settings, is_divided: bool = False, listeners: Sequence[type[Listener]] = ()) -> None:
        self.settings, self.is_divided = settings, is_divided
        self.running: ForwardPass | None = None
        self.has_completed = False
        self.reduces_in_flight = ReduceQueue()
        self.unread: list[UnshardedBuffer] = []
        self.post_optim_event: Any = None
        self.converting = False
        self.listeners = tuple(listener(self) for listener in listeners)
        self.heard = heard_by(self.listeners)
        self._is_compared = False
        self._warned: set[str] = set()  # methods without an effect on a compiled forward
        self._streams: dict[torch.device, Streams] = {}
        self._last_forward: weakref.ref[UnshardedUnit] | None = None
        self._last_unit: weakref.ref[Unit] | None = None  # of the last forward with gradients (`ForwardPass.last`)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Runtime":
        copied = memo[id(self)] = Runtime(self.settings, self.is_divided, tuple(map(type, self.listeners)))
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
        """Before a forward of the root `module`, raise ValueError if none can be right."""
        for listen in self.heard.check:
            listen(module)

    def compare(self, module: nn.Module, compiled: bool) -> None:
        """Before the first forward of the root `module` that communicates, raise RuntimeError if ranks differ."""
        if not self._is_compared:
            given = self.settings
            settings = f"backward_prefetch {given.backward_prefetch}, forward_prefetch {given.forward_prefetch}"
            settings += f", find_unused_parameters {given.find_unused_parameters}"
            self._is_compared = all(listen(module, settings, compiled) for listen in self.heard.compare)

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
        self._drop_unread()
        for unit in module._fsdp.units_below:
            if unit.phase is Phase.FORWARD:  # an exception has interrupted what ends a forward
                unit.hide_unsharded()
        self._last_forward = None
        forward = ForwardPass(self, of_root=True, kind=(torch.is_grad_enabled(), module.training))
        for listen in self.heard.begin_forward:
            listen(forward, module)
        for streams in self._streams.values():
            streams.begin_iteration(self.post_optim_event)
        self.running, self.post_optim_event = forward, None

    def complete_iteration(self) -> None:
        """After a complete forward of the root, raise what listeners raise: RuntimeError if ranks differ."""
        forward = self.running
        if forward is None:  # an exception has interrupted it
            return
        for listen in self.heard.complete_forward:
            listen(forward)
        self.has_completed = forward.has_gathered  # not of a forward on one rank, of summoned parameters
        if forward.ended:  # not without gradients
            self._last_unit = forward.last

    def end_iteration(self) -> None:
        """End the forward of the root module, which has returned or failed."""
        self.running = None
        for listen in self.heard.end_forward:
            listen()
        if not torch.is_grad_enabled():  # no backward follows, after which the host may change what copies still read
            for streams in self._streams.values():
                streams.block_on_unshard()

    def reset(self, module: nn.Module) -> None:
        """Free and forget what a failed forward or backward of the root `module` left, gradients included."""
        while self.reduces_in_flight:
            self.reduces_in_flight.wait_for_oldest()
        self._drop_unread()
        for unit in units_gathered_below(module):
            unit.hide_unsharded()
            reshard(unit)
            unit.awaiting_backward.clear()
            abandon_gradients(unit)
        self.end_iteration()

    # --- forward ------------------------------------------------------------------------------------------------------

    def gather(self, unit: Unit, full_precision: bool, forward: ForwardPass) -> UnshardedUnit:
        """The unit's buffers, being filled: prefetched ones if up to date, else new ones."""
        forward.has_gathered = True
        for listen in self.heard.before_gather:
            listen(unit, forward)
        if not forward.of_root:
            self.streams_for(unit.device).begin_iteration()
        for listen in self.heard.before_values:
            listen(unit)
        prefetched = self._take_prefetched(unit, full_precision, forward) if unit.prefetched is not None else None
        return prefetched or UnshardedUnit(unit, full_precision, forward)

    def _take_prefetched(self, unit: Unit, full_precision: bool, forward: ForwardPass) -> UnshardedUnit | None:
        """What was gathered for this forward of `unit`, unless it is out of date on some rank."""
        gathered, unit.prefetched = unit.prefetched, None
        current = gathered.values.full_precision == full_precision and gathered.is_current()
        in_this_forward = forward.of_root and gathered.forward is forward
        if unit.is_sharded and not in_this_forward:
            current = collectives.holds_on_all_ranks(current, unit.group.name, unit.device)
        if not current:
            gathered.drop()
            return None
        gathered.forward = forward
        return gathered

    def unshard(self, units: Sequence[Unit], full_precision: bool) -> UnshardHandle:
        """Begin to gather `units` for their next forward. Raises AssertionError if one is summoned."""
        for unit in units:
            unit.check_not_summoned("unshard")
        started = []
        forward = self.running or ForwardPass(self)
        with torch.inference_mode(False):
            for unit in units:
                if not unit.is_unsharded and unit.prefetched is None:
                    if not forward.of_root:
                        self.streams_for(unit.device).begin_iteration()
                    for listen in self.heard.before_values:
                        listen(unit)
                    unit.prefetched = UnshardedUnit(unit, full_precision, forward)
                if unit.prefetched is not None:
                    started.append(unit.prefetched)
        return UnshardHandle(started)

    # --- backward -----------------------------------------------------------------------------------------------------

    def begins_backward(self, gathered: UnshardedUnit) -> bool:
        """Whether "auto" keeps what the forward of `gathered` leaves: backward needs it before it could be gathered.

        That is the last unit, as it was in the forward before on all ranks. Backward prefetch would gather it where
        backward begins, so the highest moment of memory, which is there, is no higher.
        """
        return (
            gathered.unit.reshard_after_forward is None
            and gathered.forward.of_root
            and self._last_unit is not None
            and self._last_unit() is gathered.unit
        )

    def end_forward(self, gathered: UnshardedUnit) -> None:
        """Record the order in which the forwards of units end: backward reverses it."""
        if torch.is_grad_enabled():
            gathered.previous, self._last_forward = self._last_forward, weakref.ref(gathered)
            ended = gathered.forward.ended
            ended[gathered.unit] = ended.pop(gathered.unit, 0) + 1  # the last one last

    def _drop_unread(self) -> None:
        while self.unread:  # torch keeps what a collective writes until it was waited for
            buffer = self.unread.pop()
            if buffer.filling:  # no other backward pass of the same graph has read it since
                buffer.finish()
                buffer.free()


def reshard(unit: Unit) -> None:
    """Free all unsharded parameters of an idle unit; a backward that still needs them gathers again.

    Raises ValueError in a forward or backward of the unit.
    """
    if unit.is_unsharded:
        raise ValueError(f"reshard: {unit} is in its forward or backward; call it between steps")
    free_for_next_forward(unit)
    for gathered in unit.awaiting_backward:
        if gathered.lifetime is Lifetime.WHILE_READ:
            gathered.free()


def free_for_next_forward(unit: Unit) -> None:
    """Free what was gathered early, or kept by a backward pass, for a forward that has not begun."""
    if unit.prefetched is not None:
        unit.prefetched.drop()
        unit.prefetched = None
    if unit.kept is not None:
        for buffer in unit.kept.buffers:
            buffer.free()
        unit.kept = None
