"""Time a plan: one computing stream, one link for gathers and reduces, one for the all-reduce over replicas.

A launch starts when what was issued before it on the computing stream is done and its link is free; a wait holds the
computing stream until the launch is done. Memory is counted in the order of issue, as allocators do.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsdp_compile.passes.plan.workload import Workload

if TYPE_CHECKING:  # plan.py simulates what it verifies
    from fsdp_compile.passes.plan.plan import Plan, Step


@dataclass(frozen=True)
class Span:
    """What ran from `start` to `end`, in seconds from the beginning of the step."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end - self.start


@dataclass
class Timeline:
    """What a plan takes.

    Attributes:
        compute: the tasks.
        link: the gathers and reduces.
        replicas: the all-reduces over replicas.
        memory: the most bytes that live at once while a task runs or right before it, for each task; a last entry for
            what follows the last one.
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
        """Seconds of a collective that no task covers."""
        return collective.seconds - sum(
            max(0.0, min(task.end, collective.end) - max(task.start, collective.start)) for task in self.compute
        )

    def to_trace(self) -> str:
        """JSON for Perfetto or chrome://tracing: a lane for computing, one for each link, a counter of bytes."""
        lanes = {"compute": self.compute, "link": self.link, "replicas": self.replicas}
        events: list[dict[str, object]] = []
        for lane, (name, spans) in enumerate(lanes.items()):
            events.append({"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}})
            events += [_event(span, lane) for span in spans]
        starts = [*(span.start for span in self.compute), self.makespan]
        for at, live in zip(starts, self.memory, strict=True):
            events.append({"ph": "C", "pid": 0, "name": "memory", "ts": at * 1e6, "args": {"bytes": live}})
        return json.dumps({"traceEvents": events})


def _event(span: Span, lane: int) -> dict[str, object]:
    return {"ph": "X", "pid": 0, "tid": lane, "name": span.name, "ts": span.start * 1e6, "dur": span.seconds * 1e6}


class _Run:
    """The state of the machine while a plan runs."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.index = {unit.name: index for index, unit in enumerate(workload.units)}
        self.now = 0.0  # until when the computing stream is busy
        self.link = self.replicas = 0.0
        self.done: dict[tuple[str, str], float] = {}  # of the last launch of a kind, for each unit
        self.live = 0  # bytes of gathered and packed buffers
        self.timeline = Timeline(memory=list(workload.between))
        self.written: set[int] = set()  # units whose packed buffer has memory

    def note_memory(self, at: int, beneath: int) -> None:
        self.timeline.memory[at] = max(self.timeline.memory[at], self.live + beneath)

    def step(self, step: "Step") -> None:
        indices = [self.index[name] for name in step.units]
        units = [self.workload.units[index] for index in indices]
        if step.kind in ("gather", "reduce"):
            self._launch(step, indices)
            self.live += sum(unit.gathered for unit in units) if step.kind == "gather" else 0
        elif step.kind == "free":
            self.live -= sum(unit.gathered for unit in units)
        else:
            launched = "gather" if step.kind == "wait" else "reduce"
            self.now = max(self.now, *(self.done[launched, name] for name in step.units))
        self.note_memory(step.at, self.workload.between[step.at])
        if step.kind == "wait_reduce":
            self.live -= sum(unit.packed for unit in units)
            self._replicate(step, sum(unit.replicate for unit in units))

    def _launch(self, step: "Step", indices: Iterable[int]) -> None:
        start = max(self.now, self.link)
        self.link = start + self.workload.launch_seconds(step.kind, indices)
        self.timeline.link.append(Span(f"{step.kind} {' '.join(step.units)}", start, self.link))
        self.done.update({(step.kind, name): self.link for name in step.units})

    def _replicate(self, step: "Step", seconds: float) -> None:
        if seconds:
            start = max(self.now, self.replicas)
            self.replicas = start + seconds + self.workload.latency
            self.timeline.replicas.append(Span(f"replicate {' '.join(step.units)}", start, self.replicas))

    def task(self, index: int) -> None:
        task = self.workload.tasks[index]
        for unit in set(task.writes) - self.written:
            self.written.add(unit)
            self.live += self.workload.units[unit].packed
        self.note_memory(index, task.memory)
        start = self.now
        self.now += task.seconds
        self.timeline.compute.append(Span(task.name, start, self.now))


def simulate(workload: Workload, plan: "Plan") -> Timeline:
    """Run `plan`, which `verify` has passed, on `workload`."""
    run = _Run(workload)
    steps = iter([*plan.steps, None])
    step = next(steps)
    for index in range(len(workload.tasks) + 1):
        while step is not None and step.at <= index:
            run.step(step)
            step = next(steps)
        if index < len(workload.tasks):
            run.task(index)
    run.timeline.makespan = max(run.now, run.link, run.replicas)
    return run.timeline
