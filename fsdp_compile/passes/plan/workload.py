"""The planner's input: what one training step computes and communicates, as plain numbers.

A workload is a fixed sequence of tasks, forward then backward, and the units whose parameters they read. A plan says
between which tasks collectives are issued and waited for.

With the optimizer's update the workload is one period of training, cut where no collective is under way:

    tasks    backward ... | before updates, update of each unit, next step | forward ...      then backward again
                                                                           `Workload.forward`
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
        reduced: indices of the units whose reduced gradients it reads, so that it waits for their reduces.
        updates: indices of the units that it updates: then they may be gathered for the next forward.
        all_reduce: seconds of an all-reduce, of a norm, that it starts on the link and waits for before it computes.
    """

    name: str
    seconds: float
    memory: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    all_reduce: float = 0.0


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
        may_prefetch: whether its all-gather for the next forward may be launched right behind its update.
        arrives: of a forward alone: seconds into it at which the gather ends, if it was launched before; None: it is
            launched in this forward.
    """

    name: str
    gather: float
    reduce: float
    gathered: int
    packed: int
    replicate: float = 0.0
    keep_unsharded: bool | None = False
    module: str = ""
    may_prefetch: bool = False
    arrives: float | None = None

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
        forward: index of the first task of forward; above 0 in a step with updates, whose `backward` is 0.
        units: the units, by index.
        latency: seconds of a launch beside those of its units; a coalesced launch of several units pays it once.
        can_coalesce: whether one launch may take several units.

    Raises:
        ValueError: a number is negative, or a task names a unit that does not exist.
    """

    tasks: tuple[Task, ...]
    backward: int
    units: tuple[UnitCost, ...]
    latency: float = 0.0
    can_coalesce: bool = True
    forward: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.backward <= len(self.tasks):
            raise ValueError(f"backward: expected 0 to {len(self.tasks)}, the number of tasks, found {self.backward}")
        if not 0 <= self.forward <= len(self.tasks) or (self.forward and self.backward):
            raise ValueError(
                f"forward: expected 0, or up to {len(self.tasks)} where backward is 0, found {self.forward}"
            )
        _check_not_negative("latency", self.latency)
        for task in self.tasks:
            for name in ("seconds", "memory", "all_reduce"):
                _check_not_negative(f"{task.name}.{name}", getattr(task, name))
            named = (*task.reads, *task.writes, *task.reduced, *task.updates)
            if unknown := [unit for unit in named if not 0 <= unit < len(self.units)]:
                raise ValueError(f"{task.name}: expected units 0 to {len(self.units) - 1}, found {unknown}")
        for unit in self.units:
            for name in ("gather", "reduce", "gathered", "packed", "replicate"):
                _check_not_negative(f"{unit.name}.{name}", getattr(unit, name))

    def is_forward(self, index: int) -> bool:
        """Whether a task, or what is issued before it, belongs to forward."""
        return index >= self.forward if self.forward else index < self.backward

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
    def updated(self) -> dict[int, int]:
        """The task that updates a unit."""
        return {unit: index for index, task in enumerate(self.tasks) for unit in task.updates}

    @cached_property
    def end_of_backward(self) -> int:
        """Index of the last task before the updates; 0 if there are no updates."""
        return next((at for at, task in enumerate(self.tasks) if task.updates), 1) - 1

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

        A unit in `keep` is gathered once, in forward, and read until its last task of backward. Where backward comes
        first, that is in the next step, and the last task here is the last one of all.
        """
        gathers = []
        for unit, (first, last) in self.reads_in_forward.items():
            until = len(self.tasks) - 1 if self.forward else max(last, self.reads_in_backward.get(unit, (0, 0))[1])
            gathers.append((first, unit, until if unit in keep else last))
        gathers += [(first, u, last) for u, (first, last) in self.reads_in_backward.items() if u not in keep]
        return [(unit, first, last) for first, unit, last in sorted(gathers)]

    def held(self, keep: frozenset[int]) -> dict[int, int]:
        """The units that the forward before has kept for a backward that comes first, and their last task in it."""
        return {unit: self.reads_in_backward[unit][1] for unit in sorted(keep)} if self.forward else {}

    def first_issue(self, unit: int, first: int) -> tuple[int, int]:
        """Before which task a gather for task `first` may be issued by itself, -1 if none; and from which task freely.

        The former is the task after the unit's update, before the forward that the gather belongs to.
        """
        if not self.is_forward(first):
            return -1, self.backward
        if not self.forward or not self.units[unit].may_prefetch or unit not in self.updated:
            return -1, self.forward
        return self.updated[unit] + 1, self.forward

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


def _check_not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name}: expected a number of at least 0, found {value}")


# --- what no plan can be below ----------------------------------------------------------------------------------------


def least_memory(workload: Workload, keep: frozenset[int]) -> list[int]:
    """Bytes that live during each task if units are gathered when they are read and reduced when they are ready."""
    costs = [(workload.units[unit], first, last) for unit, first, last in workload.gathers(keep)]
    held = [(first if unit.arrives is None else 0, last, unit.gathered) for unit, first, last in costs]
    held += [(0, last, workload.units[unit].gathered) for unit, last in workload.held(keep).items()]
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
    under_way, arrived, latest = 0.0, 0, 0
    for unit, first, _ in workload.gathers(workload.must_keep | set(workload.may_keep)):
        early, free = workload.first_issue(unit, first)
        if workload.forward and free:
            latest = early = max(early, latest) if min(early, latest) >= 0 else -1
        if (arrives := workload.units[unit].arrives) is None:
            needs[first].append((free if early < 0 else early, workload.units[unit].gather + each))
        else:
            needs[first].append((0, max(0.0, arrives - under_way)))
            under_way, arrived = max(under_way, arrives), arrived + 1
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
            start = max(start, carried + (latency - each if len(before) > arrived else 0.0))
        start = max([start, *(ends[ready] + seconds for place, ready, seconds in replicas if place == at)])
        ends.append(start + (tasks[at].all_reduce + tasks[at].seconds if at < len(tasks) else 0.0))
    return ends[-1] * (1 - 1e-12)  # sums are rounded
