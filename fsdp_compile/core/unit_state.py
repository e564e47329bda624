"""What changes about a unit while steps run, and how changes that users make to its parameters are noticed.

UnitState             which of forward, backward and `summon_full_params` reads unsharded parameters, if any does
UnshardedState        the unsharded parameters that a unit has at the moment, and the transitions of `UnitState`
GradientDelivery      what a graph that is traced now does with gradients
UnitOptions           what the `set_*` methods of a sharded module chose for its units
VersionCounters       whether values have changed since they were gathered
ParameterLocations    whether modules still hold the parameters that the unit knows
ReduceQueue           what the units of a root share about their reduces

What the eager runtime attaches to a unit is known to it by the protocols `UnshardedMemory` and `SummonedParams` only.
"""

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from fsdp_compile.core._torch import current_backward
from fsdp_compile.core.autograd import GradientReduction
from fsdp_compile.core.ops import NamedGroup

if TYPE_CHECKING:
    from fsdp_compile.core.unit import Unit


class UnitState(Enum):
    """What the parameters of a unit are at the moment (E-STATE-1).

        SHARDED ---- a forward begins --------> FORWARD ----- it ends, or fails -----> SHARDED
        SHARDED ---- backward reaches it -----> BACKWARD ---- its gradients are -----> SHARDED
                                                              there, or backward fails
        SHARDED ---- summon_full_params ------> SUMMONED ---- the context is left ---> SHARDED

    In SHARDED nothing reads unsharded parameters, though buffers may hold them: prefetched for the next forward, not
    freed between forward and backward (SHARD_GRAD_OP), or left by a backward pass under no_sync.
    """

    SHARDED = "sharded"
    FORWARD = "forward"
    BACKWARD = "backward"
    SUMMONED = "summoned"


class GradientDelivery(Enum):
    """What a graph that is traced now does in backward with packed gradients."""

    REDUCE = "reduce"
    REDUCE_AND_UPDATE = "reduce and update"  # the optimizer may update the unit at once (compile_step)
    REDUCE_WITH_ACCUMULATED = "reduce with accumulated"  # their sum with gradients accumulated under no_sync
    DEFER = "defer"  # the eager runtime accumulates them, or reduces them as hooks and `UnitOptions` say


@dataclass
class UnitOptions:
    """What the `set_*` methods of a sharded module chose for its units.

    Attributes:
        all_reduces: hybrid sharding: whether reduced shards are averaged over replicas, or summed up until they are.
        has_deferred: whether `all_reduces` was ever False: sums may wait.
        divide_factor: what the sum of gradients over all ranks is divided by; None means the number of ranks.
        only_sums: whether collectives add, and a kernel divides, where the backend could average.
        reduce_groups: the groups of reduce-scatters, if they are not those of all-gathers.
        reduces_in_flight: how many reduces may be under way before the oldest one is waited for.
        all_reduce_hook: is called with each reduced gradient, 1-D `[shard_numel]`, and may change it in place.
        all_reduce_hook_stream: the stream that it is called in, or None.
        reshard_after_backward: whether a backward pass frees unsharded parameters.
        prefetch_in_forward: the units whose all-gathers the unit's forward starts; None: as the runtime chooses.
        prefetch_in_backward: the same of backward.
    """

    all_reduces: bool = True
    has_deferred: bool = False
    divide_factor: float | None = None
    only_sums: bool = False
    reduce_groups: tuple[NamedGroup, ...] | None = None
    reduces_in_flight: int = 2
    all_reduce_hook: Callable[[Tensor], Any] | None = None
    all_reduce_hook_stream: Any = None
    reshard_after_backward: bool = True
    prefetch_in_forward: "tuple[Unit, ...] | None" = None
    prefetch_in_backward: "tuple[Unit, ...] | None" = None

    @property
    def changes_reduce(self) -> bool:
        """Whether gradients are reduced in another way than a graph's reduces do it."""
        chosen = (self.divide_factor, self.reduce_groups, self.all_reduce_hook)
        return self.has_deferred or self.only_sums or any(each is not None for each in chosen)


class VersionCounters(NamedTuple):
    """When the values of a unit's parameters were last changed: equal counters, equal values.

    The counters of all ranks change together, also those of ranks that store nothing of what was changed.
    """

    params: list[int]  # version counters of the parameters
    shards: list[int]  # for each flat parameter, that of its shard and how often it was bound to its parameters


class UnshardedMemory(Protocol):
    """Unsharded parameters, as the eager runtime gathered them (eager/unsharded.py)."""

    def free(self) -> None:
        """Free their memory."""


class SummonedParams(Protocol):
    """Full parameters in the place of the sharded ones (eager/summon.py)."""

    by: str  # the name of the function that asked for them
    may_compute: bool  # whether all ranks have them, on the device that computes


class UnshardedState:
    """The unsharded parameters that a unit has at the moment, and who reads them.

    Attributes (plain ones where Dynamo guards on them):
        unsharded_params: the unsharded parameters while a forward or backward reads them, else None.
        unsharded_flats: instead, the unsharded flat parameters, while a forward that was compiled by itself runs.
        backward_pass: the backward pass that set one of these two; -1: a forward did.
        awaiting_backward: the eager forwards of this unit whose backward is still to come, in the order in which they
            ended; that is the same order on all ranks.
        prefetched: what `FSDPModule.unshard` gathered, until a forward takes it, or None.
        summoned: the full parameters while they stand in the place of the sharded ones, or None.
        may_keep: whether a backward pass of what was gathered last may leave it unsharded; equal on all ranks.
        kept: what a backward pass left unsharded for the next forward, or None.
    """

    def become_idle(self) -> None:
        """Begin in SHARDED, with nothing gathered."""
        self.unsharded_params: list[Tensor] | None = None
        self.unsharded_flats: list[Tensor] | None = None
        self.backward_pass = -1
        self.awaiting_backward: weakref.WeakKeyDictionary[UnshardedMemory, None] = weakref.WeakKeyDictionary()
        self.prefetched: UnshardedMemory | None = None
        self.summoned: SummonedParams | None = None
        self.may_keep = False
        self.kept: UnshardedMemory | None = None

    @property
    def state(self) -> UnitState:
        """What the parameters are now."""
        if self.summoned is not None:
            return UnitState.SUMMONED
        if not self.is_unsharded:
            return UnitState.SHARDED
        return UnitState.FORWARD if self.backward_pass == -1 else UnitState.BACKWARD

    @property
    def is_unsharded(self) -> bool:
        """Whether module code may read unsharded parameters: in a forward, or in the backward pass now running.

        What a backward pass that failed has left belongs to neither, and is gathered anew.
        """
        present = self.unsharded_params is not None or self.unsharded_flats is not None
        return present and self.backward_pass in (-1, current_backward())

    def show_unsharded(self, tensors: list[Tensor], as_flats: bool) -> None:
        """A forward, or else the running backward pass, reads `tensors`: one per parameter, or one per flat one."""
        if as_flats:
            self.unsharded_flats = tensors
        else:
            self.unsharded_params = tensors
        self.backward_pass = current_backward()

    def hide_unsharded(self, tensors: list[Tensor]) -> None:
        """Nothing reads `tensors` any more. The autograd node that they own owns this unit, so it must drop them."""
        if self.unsharded_params is tensors:
            self.unsharded_params = None
        if self.unsharded_flats is tensors:
            self.unsharded_flats = None

    def describe_state(self) -> str:
        """What the unit is doing, for messages."""
        if self.summoned is not None:
            return f"inside {self.summoned.by}"
        return "in its forward or backward" if self.is_unsharded else "idle"

    def check_not_summoned(self, what: str) -> None:
        """Raise AssertionError if the parameters are summoned: `what` cannot run then (E-FWD-12)."""
        if self.summoned is not None:
            raise AssertionError(
                f"{what}: expected sharded parameters, found {self} {self.describe_state()}; leave that first"
            )


def check_idle(units: Iterable[UnshardedState], what: str, error: type[Exception] = ValueError) -> None:
    """Raise `error` if a unit is not idle or a backward pass is running (E-STATE-3, E-STATE-4)."""
    for unit in units:
        if unit.state is not UnitState.SHARDED:
            raise error(f"{what}: expected idle units, found {unit} {unit.describe_state()}; call {what} between steps")
    if current_backward() != -1:
        raise error(f"{what}: expected to be called between steps, found a backward pass under way")


Location = tuple[dict[str, nn.Parameter | None], str]
"""A module's `_parameters`, and a name there."""


class ParameterLocations:
    """For each parameter of a unit its locations; tied parameters have several.

    Attributes:
        of: the locations of each parameter, by index.
    """

    def __init__(self, params: int) -> None:
        self.of: list[list[Location]] = [[] for _ in range(params)]
        self.record()

    def add(self, index: int, parameters: dict[str, nn.Parameter | None], name: str) -> None:
        """Parameter `index` is in `parameters`, a module's `_parameters`, under `name`."""
        self.of[index].append((parameters, name))
        self.record()

    def record(self) -> None:
        """Record what modules hold now, to compare with later."""
        flattened = [location for locations in self.of for location in locations]
        self._registries = [parameters for parameters, _ in flattened]
        self._names = [name for _, name in flattened]
        self._recorded = [parameters.get(name) for parameters, name in flattened]

    def are_unchanged(self) -> bool:
        """Whether modules hold what they held at the last `record`.

        Asked at every eager forward: the work for each parameter runs in C, at the cost that eager/writeback.py tells.
        """
        held = map(dict.get, self._registries, self._names)
        return all(map(operator.is_, held, self._recorded))


class ReduceQueue(deque[GradientReduction]):
    """Reduces that a root's backward passes have started and not yet waited for, oldest first.

    Attributes:
        awaiting_reduce: units of the root for which no_sync was in force since their last reduce, in one order on all
            ranks: what they have accumulated is to be reduced, even if they take part in no backward pass any more.
        settled_in: the last backward pass at whose end that happens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.awaiting_reduce: list[weakref.ref[Unit]] = []
        self.settled_in = -1
