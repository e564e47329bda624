"""What the units under one root share: the order in which they run, what is gathered ahead, and streams.

    forward    unit 0   unit 1   unit 2          forward prefetch: as the first iteration ran (E-PRE-2)
    backward   unit 2   unit 1   unit 0          backward prefetch: the reverse of this iteration's forward (E-PRE-3)

At most one unit is gathered ahead. A wrong guess costs one gather, and is freed when it has shown itself wrong: by the
next guess, or at the end of the pass.
"""

import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile.comm import collectives
from fsdp_compile.core.sharding import sharding_of
from fsdp_compile.core.unit import Unit, is_open
from fsdp_compile.eager._torch import call_after_backward, current_backward
from fsdp_compile.eager.streams import Streams, device_of
from fsdp_compile.eager.unshard import UnshardHandle, take_unsharded, unshard
from fsdp_compile.eager.unsharded import UnshardedUnit


class Runtime:
    """Iteration-wide state of a module that no sharded module encloses.

    Args:
        backward_prefetch: BACKWARD_PRE gathers the next unit while this one computes, BACKWARD_POST after it, None not
            ahead at all.
        forward_prefetch: whether forward gathers one unit ahead, in the order of the first iteration.
        limit_all_gathers: whether the host waits for the device before it gathers a third unit.
    """

    def __init__(
        self,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
    ) -> None:
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self.order: list[weakref.ref[Unit]] = []  # of the first iteration, each unit at its first use (E-ORD-1)
        self.recording, self.checked = True, False
        self._streams: dict[torch.device, Streams] = {}
        self._order_check: OrderCheck | None = None
        self._checking = False  # whether the iteration under way is compared
        self._ahead: tuple[Unit, UnshardedUnit] | None = None  # in forward
        self._guess: weakref.ref[UnshardedUnit] | None = None  # in backward
        self.iteration: object | None = None  # the forward of the root module that is running
        self.converting = False  # eager/convert.py is at work
        self._last: weakref.ref[UnshardedUnit] | None = None  # the last to have ended its forward

    def __deepcopy__(self, memo: dict[int, Any]) -> "Runtime":
        twin = memo[id(self)] = Runtime(self.backward_prefetch, self.forward_prefetch, self.limit_all_gathers)
        return twin

    def streams_for(self, device: torch.device) -> Streams:
        """The streams of units that compute on `device`, made at the first use."""
        if device not in self._streams:
            self._streams[device] = Streams(device_of(device), self.limit_all_gathers)
            self._streams[device].begin_iteration()
        return self._streams[device]

    @property
    def running(self) -> bool:
        """Whether a forward of the root module is running."""
        return self.iteration is not None

    # --- iterations ---------------------------------------------------------------------------------------------------

    def begin_iteration(self, module: Any) -> None:
        """A forward of the root module starts.

        Raises:
            ValueError: settings that all units under one root share differ.
        """
        if not self.checked:
            check_settings(module)
            self.checked = True
        self._drop_ahead()
        self._last, self.iteration = None, object()
        if self.recording:
            self.order.clear()  # of an iteration that failed
        for streams in self._streams.values():
            streams.begin_iteration()
        self._checking = wants_order_check(module)
        if self._checking:
            self._order_check = self._order_check or OrderCheck(module)
            self._order_check.begin()

    def complete_iteration(self) -> None:
        """The forward of the root module has run to its end."""
        if self._checking and self._order_check is not None:
            self._order_check.end()
        self.recording = False

    def end_iteration(self) -> None:
        """The forward of the root module has ended, or failed."""
        self.iteration = None
        self._drop_ahead()
        self._checking = False
        if not torch.is_grad_enabled():  # no backward follows, after which the host may change what copies still read
            for streams in self._streams.values():
                streams.block_on_unshard()

    # --- forward ------------------------------------------------------------------------------------------------------

    def gather(self, unit: Unit, full_precision: bool) -> UnshardedUnit:
        """The unit's buffers, being filled: those gathered ahead, or new ones.

        Raises:
            RuntimeError: another rank is about to gather another unit; looked for at debug level DETAIL alone.
        """
        if self._checking and self._order_check is not None:
            self._order_check.next(unit)
        if self.recording and self.running and self._place(unit) is None:
            self.order.append(weakref.ref(unit))
        streams = self.streams_for(unit.device)
        if not self.running:  # a unit that runs outside of its root
            streams.begin_iteration()
        return (
            self._take_unsharded(unit, full_precision)
            or self._take_ahead(unit, full_precision)
            or UnshardedUnit(unit, full_precision, streams)
        )

    def prefetch_forward(self, gathered: UnshardedUnit) -> None:
        """Begin to gather the unit after that of `gathered`, which is about to compute (E-PRE-2)."""
        if not self.forward_prefetch or self.recording or not self.running or self._ahead is not None:
            return
        place = self._place(gathered.unit)
        following = self.order[place + 1]() if place is not None and place + 1 < len(self.order) else None
        if following is not None and following.unsharded is None and not is_open(following):
            streams = self.streams_for(following.device)
            self._ahead = (following, UnshardedUnit(following, gathered.full_precision, streams))

    def _place(self, unit: Unit) -> int | None:
        return next((place for place, known in enumerate(self.order) if known() is unit), None)

    def unshard(self, units: Sequence[Unit], full_precision: bool) -> UnshardHandle:
        """Begin to gather `units` for their next forward, as a user asks."""
        return unshard(units, full_precision, self.iteration, self.streams_for)

    def _take_unsharded(self, unit: Unit, full_precision: bool) -> UnshardedUnit | None:
        if unit.unsharded is None:
            return None
        same_forward = unit.unsharded.iteration is self.iteration is not None
        return take_unsharded(unit, full_precision, same_forward)

    def _take_ahead(self, unit: Unit, full_precision: bool) -> UnshardedUnit | None:
        if self._ahead is None:
            return None
        guessed, gathered = self._ahead
        if guessed is unit and gathered.full_precision == full_precision and gathered.is_current():
            self._ahead = None
            return gathered
        if guessed is unit or not self._comes_before(unit, guessed):
            self._drop_ahead()
        return None

    def _comes_before(self, unit: Unit, other: Unit) -> bool:
        """Whether `unit` is used before `other`: then `other` may still come."""
        place, others = self._place(unit), self._place(other)
        return place is not None and others is not None and place < others

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead[1].free()
            self._ahead = None

    def ended_forward(self, gathered: UnshardedUnit) -> None:
        """Note the order in which forwards end: backward runs against it."""
        if torch.is_grad_enabled():
            gathered.root, gathered.before = self, self._last
            self._last = weakref.ref(gathered)

    # --- backward -----------------------------------------------------------------------------------------------------

    def prefetch_backward(self, gathered: UnshardedUnit, when: BackwardPrefetch) -> None:
        """Begin to gather the unit whose backward is likely to come next (E-PRE-1)."""
        target = gathered.before() if gathered.before is not None else None
        now = current_backward()
        if when is not self.backward_prefetch or target is None or target.backward == now:
            return
        guess = self._guess() if self._guess is not None else None
        if guess is not None and guess is not target:
            guess.free_ahead()
        if target.is_current() and target.prefetch():  # else it is left to its own backward to say what is wrong
            target.ahead = True
            self._guess = weakref.ref(target)
            call_after_backward(partial(_free_ahead, self._guess))


def _free_ahead(guess: weakref.ref[UnshardedUnit]) -> None:
    """At the end of a backward pass that gathered `guess` ahead: free it if nothing read it (E-PRE-5)."""
    gathered = guess()
    if gathered is not None:
        gathered.free_ahead()


_SETTINGS = {
    "limit_all_gathers": "limit_all_gathers",
    "FSDP_COMPILE_FULL_PREC_IN_EVAL": "full_precision_in_eval",
}


def check_settings(module: nn.Module) -> None:
    """Raise ValueError if units of `module` and below differ in a setting that a root has once (E-STRAT-11)."""
    shardings = {path: sharding_of(each) for path, each in module.named_modules() if sharding_of(each)}
    for setting, attribute in _SETTINGS.items():
        values = {path: getattr(sharding, attribute) for path, sharding in shardings.items()}
        expected = values[""]
        for path, found in values.items():
            if found != expected:
                raise ValueError(
                    f"{setting}: expected one value for all units under one root, found {expected} for "
                    f"{type(module).__name__} and {found} for {path}; use the same in every call of fully_shard"
                )


def wants_order_check(module: nn.Module) -> bool:
    """Whether an iteration of the root `module` is to be compared."""
    return module.training and dist.get_debug_level() == dist.DebugLevel.DETAIL


class OrderCheck:
    """Compares the order in which units run in forward: among ranks at first, later with the first iteration.

    Args:
        module: the root. A unit's number is its place among all units of the root, equal on all ranks.
    """

    def __init__(self, module: Any) -> None:
        self.names = _describe(module)
        self.numbers = {unit: number for number, unit in enumerate(self.names)}
        self.first: list[int] = []
        self.is_fixed = False  # whether the first iteration has come to its end
        self.place = 0
        self.warned = False

    def begin(self) -> None:
        """An iteration starts."""
        self.place = 0
        if not self.is_fixed:
            self.first.clear()

    def next(self, unit: Unit) -> None:
        """`unit` is about to run.

        Raises:
            RuntimeError: in the first iteration, on all ranks: a rank runs another one.
        """
        self._note(self.numbers[unit])

    def end(self) -> None:
        """The iteration has run to its end. Raises as `next` does if another rank still has units to run."""
        self._note(len(self.names))
        self.is_fixed = True

    def _note(self, number: int) -> None:
        if not self.is_fixed:
            self._compare_ranks(number)
            self.first.append(number)
        elif not self.warned and (self.place >= len(self.first) or self.first[self.place] != number):
            self.warned = True
            expected = self.first[self.place] if self.place < len(self.first) else len(self.names)
            warnings.warn(
                f"order of units: expected {self._name(expected)} next, as in the first iteration, found "
                f"{self._name(number)}; prefetching works for one order, and ranks must change it together",
                UserWarning,
                stacklevel=2,
            )
        self.place += 1

    def _compare_ranks(self, number: int) -> None:
        group = next(iter(self.names)).group
        device = next(iter(self.names)).device
        mine = torch.tensor([len(self.names), number], device=device)
        found = collectives.all_gather(mine, group.size(), group.group_name).view(-1, 2).tolist()
        if all(each == found[0] for each in found):
            return
        ranks = dist.get_process_group_ranks(group)
        if any(count != len(self.names) for count, _ in found):
            said = ", ".join(f"rank {rank}: {count}" for rank, (count, _) in zip(ranks, found, strict=True))
            raise RuntimeError(f"order of units: expected equally many units on all ranks, found {said}; build and "
                               f"shard the same model on all")  # fmt: skip
        said = "; ".join(f"rank {rank}: {self._name(next)}" for rank, (_, next) in zip(ranks, found, strict=True))
        raise RuntimeError(
            f"order of units: expected the same unit next on all ranks after {self.place} equal ones, found {said}; "
            f"let forward call the same modules in the same order on all ranks"
        )

    def _name(self, number: int) -> str:
        return list(self.names.values())[number] if number < len(self.names) else "the end of forward"


def _describe(module: nn.Module) -> dict[Unit, str]:
    """The units of `module` and below, each once, with words for messages."""
    names: dict[Unit, str] = {}
    for path, each in module.named_modules():
        sharding = sharding_of(each)
        for unit in sharding.units if sharding else ():
            some = ", ".join(unit.names[:3]) + (", ..." if len(unit.names) > 3 else "")
            names.setdefault(unit, f"{path or type(each).__name__} ({some})")
    return names
