"""A plan as data: which unit is gathered, waited for, freed and reduced before which task of a training step.

As text it has one line for each step, to read, edit and load again:

    at   0  gather       blocks.0 blocks.1      # one coalesced launch
    at   1  wait         blocks.0 blocks.1

`verify` checks any plan, also one that the planner did not make, and `simulate` gives its time and memory.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from fsdp_compile.passes.plan.workload import Workload

Kind = Literal["gather", "wait", "free", "reduce", "wait_reduce"]
KINDS: tuple[str, ...] = get_args(Kind)


class Step(NamedTuple):
    """One step of a plan.

    Attributes:
        kind: gather (start an all-gather), wait (for it), free (the gathered buffer), reduce (start a reduce-scatter),
            wait_reduce (wait for it, which frees its input; hybrid sharding: and start the all-reduce over replicas).
        units: names; several units of a gather or reduce are one coalesced launch.
        at: the task that follows; after the last one, the number of tasks.
    """

    kind: Kind
    units: tuple[str, ...]
    at: int

    def __str__(self) -> str:
        return f"at {self.at:3}  {self.kind:<11}  {' '.join(self.units)}"


class PlanError(ValueError):
    """A plan that cannot be read, or that breaks a rule of `verify`."""


@dataclass(frozen=True)
class Plan:
    """Steps in the order of issue, equal on all ranks."""

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "".join(f"{step}\n" for step in self.steps)

    def of(self, *kinds: Kind) -> list[Step]:
        """The steps of some kinds, in order."""
        return [step for step in self.steps if step.kind in kinds]

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read the text that `str` gives. PlanError, with the number of the line, if it cannot be read."""
        return cls(tuple(_parsed_steps(text)))


def _parsed_steps(text: str) -> Iterator[Step]:
    for count, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) < 4 or words[0] != "at":
            raise PlanError(f"line {count}: expected 'at TASK KIND UNIT...', found {line.strip()!r}")
        _, at, kind, *units = words
        if not at.isdecimal() or len(at) > 9:
            raise PlanError(f"line {count}: expected the number of a task, found {at[:40]}")
        if kind not in KINDS:
            raise PlanError(f"line {count}: expected one of {', '.join(KINDS)}, found {kind}")
        yield Step(kind, tuple(units), int(at))  # type: ignore[arg-type]  # checked in the line above


_FOLLOWS = {"gather": "free", "wait": "gather", "free": "wait", "reduce": None, "wait_reduce": "reduce"}


def verify(workload: Workload, plan: Plan, budget: int | None = None) -> None:
    """Raise PlanError, naming the step, the unit and the rule, if `plan` is not a correct plan for `workload`.

    Args:
        workload: the step.
        plan: any plan, also one written by hand.
        budget: bytes that may live at most; None: no limit.
    """
    _check_steps(workload, plan)
    _check_cycles(plan)
    _check_reads(workload, plan)
    _check_reduces(workload, plan)
    if budget is None:
        return
    memory = simulate(workload, plan).memory
    over = max(range(len(memory)), key=memory.__getitem__)
    if memory[over] > budget:
        names = [*(task.name for task in workload.tasks), "the end of the step"]
        raise PlanError(f"budget: expected at most {budget} bytes, found {memory[over]} at task {over}, {names[over]}")


def _check_steps(workload: Workload, plan: Plan) -> None:
    names = Counter(unit.name for unit in workload.units)
    before = 0
    for step in plan.steps:
        if not before <= step.at <= len(workload.tasks):
            raise PlanError(f"{step}: expected steps in order, at {before} to {len(workload.tasks)}, found {step.at}")
        before = step.at
        for name in step.units:
            if names[name] != 1:
                raise PlanError(f"{step}: expected one of the {len(names)} units, found {name}")


def _check_cycles(plan: Plan) -> None:
    """Each unit is gathered, waited for, freed, in turn; reduced and waited for once; launches are waited for whole."""
    last: dict[tuple[bool, str], Step] = {}
    for step in plan.steps:
        reduces = step.kind in ("reduce", "wait_reduce")
        for name in step.units:
            before = last.get((reduces, name))
            expected = _FOLLOWS[step.kind]
            if (before.kind if before else "free" if step.kind == "gather" else None) != expected:
                raise PlanError(
                    f"{step}: expected the {expected or 'only reduce'} of {name} before, found {before or 'nothing'}"
                )
            if step.kind in ("wait", "wait_reduce") and before is not None and before.units != step.units:
                raise PlanError(f"{step}: expected to wait for all of one launch, found the launch {before}")
            last[reduces, name] = step
    for (reduces, _), step in last.items():
        expected = "wait_reduce" if reduces else "free"
        if step.kind != expected:
            raise PlanError(f"{step}: expected a {expected} after it, found the plan's end")


def _open_intervals(workload: Workload, plan: Plan) -> dict[str, list[tuple[int, int, int]]]:
    """Where each gather of each unit is issued, waited for, and freed."""
    at: dict[str, list[int]] = {unit.name: [] for unit in workload.units}
    for step in plan.of("gather", "wait", "free"):
        for name in step.units:
            at[name].append(step.at)
    return {name: list(zip(each[::3], each[1::3], each[2::3], strict=True)) for name, each in at.items()}


def _check_reads(workload: Workload, plan: Plan) -> None:
    intervals = _open_intervals(workload, plan)
    for at, task in enumerate(workload.tasks):
        for name in (workload.units[index].name for index in task.reads):
            if not any(wait <= at < free for _, wait, free in intervals[name]):
                raise PlanError(f"task {at}, {task.name}, reads {name}: expected it gathered, found it freed")
    for index, unit in enumerate(workload.units):
        for gather, _, free in intervals[unit.name]:
            _check_boundary(workload, index, gather, free)


# Note [What may cross from forward to backward]
# Forward and backward are two graphs, and what is alive between them is an output of one and an input of the other. A
# unit that is kept unsharded crosses as its gathered buffer. A gather that is issued in forward and waited for in
# backward would cross as a buffer that a collective still writes, which autograd would save. So a plan gathers a unit
# in forward for backward only if backward reads the same buffer, and the search issues no gather of backward before
# the first task of backward.
def _check_boundary(workload: Workload, index: int, gather: int, free: int) -> None:
    unit, crosses = workload.units[index], gather < workload.backward < free
    keeps = crosses and workload.reads_in_backward.get(index, (free, free))[0] < free
    if crosses and not keeps:
        raise PlanError(f"at {free} free {unit.name}: expected it freed with the forward that gathered it")
    if keeps and unit.keep_unsharded is False:
        raise PlanError(f"at {free} free {unit.name}: expected it freed after forward, found it kept for backward")


def _check_reduces(workload: Workload, plan: Plan) -> None:
    reduces = {name: step for step in plan.of("reduce") for name in step.units}
    for index, (_, ready) in workload.writes.items():
        name = workload.units[index].name
        if name not in reduces:
            raise PlanError(f"{name}: expected a reduce of its gradients, found none")
        if reduces[name].at <= ready:
            raise PlanError(f"{reduces[name]}: expected it after task {ready}, which writes the last gradient")
    waits = {name: step for step in plan.of("wait_reduce") for name in step.units}
    for at, task in enumerate(workload.tasks):
        for name in (workload.units[index].name for index in task.reduced):
            if waits[name].at > at:
                raise PlanError(f"{waits[name]}: expected it before task {at}, {task.name}, which needs the gradients")


# --- time and memory of a plan ----------------------------------------------------------------------------------------

# There is one computing stream, one link for gathers and reduces, one for the all-reduce over replicas. A launch starts
# when everything issued before it on the computing stream is done and its link is free; a wait holds the computing
# stream until the launch is done. Memory is counted in the order of issue, as allocators do.


class Span(NamedTuple):
    """A task or collective that ran from `start` to `end`, in seconds from the beginning of the step."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end - self.start


@dataclass
class Timeline:
    """Time and memory of a plan.

    Attributes:
        compute: the tasks.
        link: the gathers and reduces.
        replicas: the all-reduces over replicas.
        memory: for each task, the most bytes that live at once while it runs or right before it; a last entry for the
            time after the last task.
        makespan: seconds from the first launch to the end of all tasks and collectives.
    """

    compute: list[Span] = field(default_factory=list)
    link: list[Span] = field(default_factory=list)
    replicas: list[Span] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    makespan: float = 0.0

    @property
    def peak(self) -> int:
        """The most bytes that live at once."""
        return max(self.memory)

    @property
    def exposed(self) -> float:
        """Seconds of the step in which nothing computes."""
        return self.makespan - sum(span.seconds for span in self.compute)

    def exposed_of(self, collective: Span) -> float:
        """Seconds of a collective during which no task runs."""
        return collective.seconds - sum(
            max(0.0, min(task.end, collective.end) - max(task.start, collective.start)) for task in self.compute
        )


class Machine:
    """The computing stream, the links and the memory while a step runs, fed by `simulate` or by the scheduler.

    Attributes:
        now: until when the computing stream is busy, in seconds.
        link: until when the link of gathers and reduces is busy.
        live: bytes of gathered and packed buffers.
        done: when the last launch of a kind ends, by kind and unit.
        timeline: what has run.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload, self.units = workload, {unit.name: unit for unit in workload.units}
        self.now = self.link = self.replicas = 0.0
        self.done: dict[tuple[str, str], float] = {}
        self.live = 0
        self.timeline = Timeline(memory=list(workload.between))
        self.written: set[int] = set()  # units whose packed buffer has memory

    def note_memory(self, at: int, beneath: int) -> None:
        """Note the bytes that live before or while a task runs: the buffers and `beneath`."""
        self.timeline.memory[at] = max(self.timeline.memory[at], self.live + beneath)

    def step(self, step: Step) -> None:
        """Issue one step of a plan."""
        kind, names, at = step
        units = [self.units[name] for name in names]
        if kind == "gather":
            self._launch(step, sum(unit.gather for unit in units))
            self.live += sum(unit.gathered for unit in units)
        elif kind == "reduce":
            self._launch(step, sum(unit.reduce for unit in units))
        elif kind == "free":
            self.live -= sum(unit.gathered for unit in units)
        else:
            self.now = max(self.now, self.done["gather" if kind == "wait" else "reduce", names[0]])
        self.note_memory(at, self.workload.between[at])
        if kind == "wait_reduce":
            self.live -= sum(unit.packed for unit in units)
            if seconds := sum(unit.replicate for unit in units):
                start = max(self.now, self.replicas)
                self.replicas = start + seconds + self.workload.latency
                self.timeline.replicas.append(Span(f"replicate {' '.join(names)}", start, self.replicas))
                self.done.update({("replicate", name): self.replicas for name in names})

    def _launch(self, step: Step, seconds: float) -> None:
        start = max(self.now, self.link)
        self.link = start + self.workload.latency + seconds
        self.timeline.link.append(Span(f"{step.kind} {' '.join(step.units)}", start, self.link))
        for name in step.units:
            self.done[step.kind, name] = self.link

    def task(self, index: int) -> None:
        """Compute one task."""
        task = self.workload.tasks[index]
        for unit in set(task.writes) - self.written:
            self.written.add(unit)
            self.live += self.workload.units[unit].packed
        self.note_memory(index, task.memory)
        names = [self.workload.units[unit].name for unit in task.reduced]
        self.now = max([self.now, *(self.done.get(("replicate", name), 0.0) for name in names)])
        start = self.now
        self.now += task.seconds
        self.timeline.compute.append(Span(task.name, start, self.now))

    def end(self) -> Timeline:
        """The timeline, once everything has ended."""
        self.timeline.makespan = max(self.now, self.link, self.replicas)
        return self.timeline


def simulate(workload: Workload, plan: Plan) -> Timeline:
    """Return the time and memory of `plan`, which must pass `verify`."""
    machine = Machine(workload)
    steps = iter([*plan.steps, None])
    step = next(steps)
    for index in range(len(workload.tasks) + 1):
        while step is not None and step.at <= index:
            machine.step(step)
            step = next(steps)
        if index < len(workload.tasks):
            machine.task(index)
    return machine.end()
