"""The planner's input: what one training step computes and communicates, as plain numbers.

A workload is a fixed sequence of tasks, forward then backward, and the units whose parameters they read. A plan says
between which tasks collectives are issued and waited for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Task:
    """A stretch of computation in which no collective is issued or waited for.

    Attributes:
        name: for messages and traces.
        seconds: how long it computes.
        memory: bytes that live while it runs under any plan: activations, shards, optimizer states.
        reads: indices of the units whose unsharded parameters it reads.
        writes: indices of the units of whose unsharded gradients it writes all or some.
        reduced: indices of the units that it updates within backward, so that it waits for their reduces.
    """

    name: str
    seconds: float
    memory: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()


@dataclass(frozen=True)
class UnitCost:
    """Seconds and bytes of gathering and reducing one unit.

    Attributes:
        name: the unit's path in the model.
        gather: seconds that its all-gather occupies the link, without the latency of a launch.
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

    @property
    def of_module(self) -> str:
        """The name that all units of its module share."""
        return self.module or self.name


@dataclass(frozen=True)
class Workload:
    """One step.

    Attributes:
        tasks: in the order in which they compute.
        backward: index of the first task of backward; `len(tasks)` if there is none. No gather is issued across it.
        units: the units, by index.
        latency: seconds of a launch beside those of its units; a coalesced launch of several units pays it once.
        can_coalesce: whether one launch may take several units.
    """

    tasks: tuple[Task, ...]
    backward: int
    units: tuple[UnitCost, ...]
    latency: float = 0.0
    can_coalesce: bool = True

    def is_forward(self, index: int) -> bool:
        """Whether a task, or what is issued before it, belongs to forward."""
        return index < self.backward

    @cached_property
    def reads_in_forward(self) -> dict[int, tuple[int, int]]:
        """First and last task of forward that read a unit."""
        return _task_ranges((i, task.reads) for i, task in enumerate(self.tasks) if self.is_forward(i))

    @cached_property
    def reads_in_backward(self) -> dict[int, tuple[int, int]]:
        """First and last task of backward that read a unit."""
        return _task_ranges((i, task.reads) for i, task in enumerate(self.tasks) if not self.is_forward(i))

    @cached_property
    def writes(self) -> dict[int, tuple[int, int]]:
        """First and last task that write a unit's gradients; after the last they are ready to reduce."""
        return _task_ranges((i, task.writes) for i, task in enumerate(self.tasks))

    @cached_property
    def between(self) -> tuple[int, ...]:
        """Bytes that live before each task and after the last one: the lesser of the two neighbors'."""
        memory = [task.memory for task in self.tasks]
        return tuple(map(min, [*memory[:1], *memory], [*memory, *memory[-1:]]))

    @property
    def may_keep(self) -> list[int]:
        """Units that may stay gathered between forward and backward: read in both, and the choice is open."""
        both = self.reads_in_forward.keys() & self.reads_in_backward.keys()
        return sorted(unit for unit in both if self.units[unit].keep_unsharded is None)

    @property
    def must_keep(self) -> frozenset[int]:
        """Units that have to stay gathered between forward and backward."""
        both = self.reads_in_forward.keys() & self.reads_in_backward.keys()
        return frozenset(unit for unit in both if self.units[unit].keep_unsharded)

    def gathers(self, keep: frozenset[int]) -> list[tuple[int, int, int]]:
        """`(unit, first task, last task)` of each gather: the tasks that read its buffer; in order of the first task.

        A unit in `keep` is gathered once, in forward, and read until its last task of backward.
        """
        gathers = []
        for unit, (first, last) in self.reads_in_forward.items():
            gathers.append((first, unit, self.reads_in_backward[unit][1] if unit in keep else last))
        gathers += [(first, u, last) for u, (first, last) in self.reads_in_backward.items() if u not in keep]
        return [(unit, first, last) for first, unit, last in sorted(gathers)]

    def first_issue(self, first: int) -> int:
        """The task from which on a gather for task `first` may be issued: the first one of its direction."""
        return 0 if self.is_forward(first) else self.backward

    def reduces(self) -> list[tuple[int, int, int]]:
        """`(unit, first task, last task)` that write each unit's gradients, in the order in which they get ready."""
        ready = sorted((last, unit, first) for unit, (first, last) in self.writes.items())
        return [(unit, first, last) for last, unit, first in ready]


def _task_ranges(tasks: Iterable[tuple[int, tuple[int, ...]]]) -> dict[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}
    for index, units in tasks:
        for unit in units:
            spans[unit] = (spans.get(unit, (index, index))[0], index)
    return spans


# --- what no plan can be below ----------------------------------------------------------------------------------------


def least_memory(workload: Workload, keep: frozenset[int]) -> list[int]:
    """Bytes that live during each task if units are gathered when they are read and reduced when they are ready."""
    costs = [(workload.units[unit], first, last) for unit, first, last in workload.gathers(keep)]
    held = [(first, last, unit.gathered) for unit, first, last in costs]
    held += [(first, last, workload.units[unit].packed) for unit, first, last in workload.reduces()]
    changes = [0] * (len(workload.tasks) + 1)
    for first, last, size in held:
        changes[first] += size
        changes[last + 1] -= size
    return [task.memory + more for task, more in zip(workload.tasks, accumulate(changes), strict=False)]


def smallest_budget(workload: Workload, keep: frozenset[int] | None = None) -> int:
    """The smallest budget that has a plan: during a task live only the units it reads and the gradients it writes.

    Args:
        workload: the step.
        keep: units whose gathered buffers stay between forward and backward; None: only those that have to.
    """
    return max(least_memory(workload, workload.must_keep if keep is None else keep), default=0)


def lower_bound(workload: Workload, merge: int | None = None) -> float:
    """Seconds that every plan takes at least, with any amount of memory.

    Tasks run one after the other, each after the gathers and reduces that it needs. The link carries one launch at a
    time, and none starts before the task that it follows has ended. All launches together have one latency at least.
    As few units as possible are gathered twice.

    Args:
        workload: the step.
        merge: 1: each unit has a launch of its own.
    """
    latency, tasks = workload.latency, workload.tasks
    each = latency if merge == 1 or not workload.can_coalesce else 0.0  # of each unit; otherwise of all together
    needs: list[list[tuple[int, float]]] = [[] for _ in range(len(tasks) + 1)]  # released before which task, seconds
    replicas: list[tuple[int, int, float]] = []
    for unit, first, _ in workload.gathers(workload.must_keep | set(workload.may_keep)):
        needs[first].append((workload.first_issue(first), workload.units[unit].gather + each))
    needed = {unit: at for at, task in reversed([*enumerate(tasks)]) for unit in task.reduced}
    for unit, _, ready in workload.reduces():
        cost, at = workload.units[unit], needed.get(unit, len(tasks))
        needs[at].append((ready + 1, cost.reduce + each))
        if cost.replicate:
            replicas.append((at, ready + 1, cost.reduce + cost.replicate + 2 * latency))
    ends, before = [0.0], list[tuple[int, float]]()
    for at, needed_here in enumerate(needs):
        start = ends[at]
        if needed_here:
            before = sorted([*before, *needed_here])
            carried = 0.0
            for released, seconds in before:
                carried = max(carried, ends[released]) + seconds
            start = max(start, carried + latency - each)
        start = max([start, *(ends[ready] + seconds for place, ready, seconds in replicas if place == at)])
        ends.append(start + (tasks[at].seconds if at < len(tasks) else 0.0))
    return ends[-1] * (1 - 1e-12)  # sums are rounded
