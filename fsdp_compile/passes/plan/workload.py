"""What one training step computes and communicates: the planner's whole input, as plain numbers.

A workload is a fixed sequence of tasks, forward then backward, and the units whose parameters they read. Between tasks
collectives may be issued and waited for; where, is the plan's business.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Task:
    """A stretch of computation in which no collective is issued or waited for.

    Attributes:
        name: for messages and traces.
        seconds: how long it computes by itself.
        memory: bytes that live while it runs, whatever the plan is: activations, shards, optimizer states.
        reads: indices of the units whose unsharded parameters it reads.
        writes: indices of the units whose unsharded gradients it writes, or some of them.
    """

    name: str
    seconds: float
    memory: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True)
class UnitCost:
    """What it takes to gather and to reduce one unit.

    Attributes:
        name: the unit's path in the model.
        gather: seconds that its all-gather occupies the link, without the launch's latency.
        reduce: the same for its reduce-scatter.
        gathered: bytes of the gathered buffer.
        packed: bytes of the reduce-scatter's input.
        replicate: hybrid sharding: seconds that the all-reduce of the shard over the replicas occupies its own link.
        keep_unsharded: whether the gathered buffer stays from forward to backward; None: the planner decides.
        module: a name that units of the same module share; empty: no other unit is of its module.
    """

    name: str
    gather: float
    reduce: float
    gathered: int
    packed: int
    replicate: float = 0.0
    keep_unsharded: bool | None = False
    module: str = ""


@dataclass(frozen=True)
class Workload:
    """One step.

    Attributes:
        tasks: in the order in which they compute.
        backward: index of the first task of backward; `len(tasks)` if there is none. No gather is issued across it.
        units: the units, by index.
        latency: seconds of a launch beside what its units take; a coalesced launch of several units pays it once.
        can_coalesce: whether one launch may take several units.

    Raises:
        ValueError: a number is negative, or a task names a unit that does not exist.
    """

    tasks: tuple[Task, ...]
    backward: int
    units: tuple[UnitCost, ...]
    latency: float = 0.0
    can_coalesce: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.backward <= len(self.tasks):
            raise ValueError(f"backward: expected 0 to {len(self.tasks)}, the number of tasks, found {self.backward}")
        _check_not_negative("latency", self.latency)
        for task in self.tasks:
            _check_not_negative(f"{task.name}.seconds", task.seconds)
            _check_not_negative(f"{task.name}.memory", task.memory)
            if unknown := [unit for unit in (*task.reads, *task.writes) if not 0 <= unit < len(self.units)]:
                raise ValueError(f"{task.name}: expected units 0 to {len(self.units) - 1}, found {unknown}")
        for unit in self.units:
            for name in ("gather", "reduce", "gathered", "packed", "replicate"):
                _check_not_negative(f"{unit.name}.{name}", getattr(unit, name))

    def launch_seconds(self, kind: str, units: Iterable[int]) -> float:
        """How long one launch that gathers or reduces `units` together occupies the link."""
        return self.latency + sum(getattr(self.units[unit], kind) for unit in units)

    @cached_property
    def reads_in_forward(self) -> dict[int, tuple[int, int]]:
        """First and last task of forward that read a unit."""
        return _intervals((i, task.reads) for i, task in enumerate(self.tasks[: self.backward]))

    @cached_property
    def reads_in_backward(self) -> dict[int, tuple[int, int]]:
        """First and last task of backward that read a unit."""
        return _intervals((i, task.reads) for i, task in enumerate(self.tasks) if i >= self.backward)

    @cached_property
    def writes(self) -> dict[int, tuple[int, int]]:
        """First and last task that write a unit's gradients: the last makes them ready to reduce."""
        return _intervals((i, task.writes) for i, task in enumerate(self.tasks))

    @cached_property
    def between(self) -> tuple[int, ...]:
        """Bytes that live before each task and after the last: no more than beside either neighbour."""
        memory = [task.memory for task in self.tasks]
        return tuple(map(min, [*memory[:1], *memory], [*memory, *memory[-1:]]))

    @property
    def may_keep(self) -> list[int]:
        """Units whose gathered buffer could stay between forward and backward: read in both, and the choice is open."""
        both = self.reads_in_forward.keys() & self.reads_in_backward.keys()
        return sorted(unit for unit in both if self.units[unit].keep_unsharded is None)

    @property
    def must_keep(self) -> frozenset[int]:
        """Units whose gathered buffer has to stay between forward and backward."""
        both = self.reads_in_forward.keys() & self.reads_in_backward.keys()
        return frozenset(unit for unit in both if self.units[unit].keep_unsharded)

    def gathers(self, keep: frozenset[int]) -> list[tuple[int, int, int]]:
        """`(unit, first task, last task)` of each time a unit is gathered, in order of the first task.

        A unit in `keep` is gathered in forward alone and read until its last task of backward.
        """
        gathers = []
        for unit, (first, last) in self.reads_in_forward.items():
            gathers.append((first, unit, self.reads_in_backward[unit][1] if unit in keep else last))
        gathers += [(first, u, last) for u, (first, last) in self.reads_in_backward.items() if u not in keep]
        return [(unit, first, last) for first, unit, last in sorted(gathers)]

    def reduces(self) -> list[tuple[int, int, int]]:
        """`(unit, first task, last task)` that write each unit's gradients, in the order in which they get ready."""
        ready = sorted((last, unit, first) for unit, (first, last) in self.writes.items())
        return [(unit, first, last) for last, unit, first in ready]


def _intervals(tasks: Iterable[tuple[int, tuple[int, ...]]]) -> dict[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}
    for index, units in tasks:
        for unit in units:
            spans[unit] = (spans.get(unit, (index, index))[0], index)
    return spans


def _check_not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name}: expected a number of at least 0, found {value}")
