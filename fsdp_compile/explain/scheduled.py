"""A step as the planner has it, a workload and a plan: what runs when, and the prediction that it makes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from fsdp_compile.explain.prediction import (
    Collective,
    CollectiveKind,
    CollectiveTime,
    Constant,
    MatrixTimes,
    Memory,
    Prediction,
    Setting,
    TimelineSpan,
)
from fsdp_compile.passes.cost.hardware import Hardware
from fsdp_compile.passes.cost.roofline import Level
from fsdp_compile.passes.plan.plan import Plan, Span, Step, Timeline, simulate
from fsdp_compile.passes.plan.workload import Workload, lower_bound

_MOST_TOP = 10  # single collectives that a prediction lists


class Message(NamedTuple):
    """What a gather, a reduce, or an average over replicas ("replicate") sends in a format: bytes in full and in it."""

    format: str
    bytes: int
    sent: int


@dataclass(frozen=True)
class Scheduled:
    """A step, and the plan that it follows.

    Attributes:
        workload: what one pass, a forward and a backward, computes and communicates.
        plan: when it communicates.
        budget: the number of bytes that may live at once, or None for no limit.
        levels: which links gathers and reduces take, and which ones all-reduces over replicas.
        shards: number of ranks that store one copy of the parameters.
        passes: how many the step has.
        update: seconds of an update that follows them and is no task of the workload.
        parameters: bytes of their shards, part of each task's memory.
        optimizer: bytes of its state, also part of that.
        gradients: bytes of their shards at each task and at the end, also part of that; empty: not known.
        logits: bytes of that at the end of forward and the beginning of backward.
        messages: what is sent in a format, by collective, as in "gather blocks.0".
        matrices: of what Muon computes with complete matrices behind the step, for each group of ranks.
        sources: where the seconds come from, a line each.
    """

    workload: Workload
    plan: Plan
    budget: int | None = None
    levels: tuple[Level, Level] = ("network", "network")
    shards: int = 1
    passes: int = 1
    update: float = 0.0
    parameters: int = 0
    optimizer: int = 0
    gradients: tuple[int, ...] = ()
    logits: int = 0
    messages: Mapping[str, Message] = field(default_factory=dict)
    matrices: tuple[MatrixTimes, ...] = ()
    sources: tuple[str, ...] = ()

    @cached_property
    def timeline(self) -> Timeline:
        """The seconds and bytes that one pass takes."""
        return simulate(self.workload, self.plan)

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return self.passes * self.timeline.makespan + self.update

    @cached_property
    def bound(self) -> float:
        """A lower bound: no plan takes fewer seconds."""
        return lower_bound(self.workload)

    @cached_property
    def collectives(self) -> list[Collective]:
        """The gathers and reduces in the order of their launches, all-reduces over replicas."""
        units, timeline = {unit.name: unit for unit in self.workload.units}, self.timeline
        found, before = list[Collective](), 0.0  # when the link had finished all that was launched before
        for step, span in zip(self.plan.of("gather", "reduce"), timeline.link, strict=True):
            gathers = step.kind == "gather"
            sizes = {name: units[name].gathered if gathers else units[name].packed for name in step.units}
            limit = self._limit(step, span, sum(sizes.values()), queued=span.start <= before)
            found.append(self._launch(step.kind, "all-gather" if gathers else "reduce-scatter", span, sizes, limit))
            before = span.end
        for span in timeline.replicas:
            sizes = {name: units[name].packed // self.shards for name in span.name.split(" ")[1:]}
            at_the_end = span.end >= timeline.makespan * (1 - 1e-9)
            limit = "dependency" if at_the_end else "compute"
            found.append(self._launch("replicate", "all-reduce", span, sizes, limit))
        return found

    def _launch(
        self, name: str, kind: CollectiveKind, span: Span, sizes: Mapping[str, int], limit: str
    ) -> Collective:  # fmt: skip
        """A launch for units of these sizes; `name` is that of their messages."""
        exposed = self.timeline.exposed_of(span)
        if exposed <= 1e-9 * self.timeline.makespan:
            exposed, limit = 0.0, ""
        sent = [self.messages.get(f"{name} {unit}", Message("", size, size)) for unit, size in sizes.items()]
        formats = sorted({each.format or "full" for each in sent}) if any(each.format for each in sent) else ()
        return Collective(span.name, kind, self.levels[kind == "all-reduce"], sum(each.bytes for each in sent),
                          span.seconds, exposed, limit, " ".join(formats), sum(each.sent for each in sent))  # fmt: skip

    def _limit(self, step: Step, span: Span, size: int, queued: bool) -> str:
        """What exposes a gather or a reduce, if it is exposed."""
        workload = self.workload
        start = workload.backward if step.at >= workload.backward else 0
        if queued and span.start > 0:
            return "link"
        if step.kind == "reduce":
            waited_for = next(each.at for each in self.plan.of("wait_reduce") if each.units == step.units)
            return "memory" if waited_for < len(workload.tasks) else "dependency"
        if step.at == start:
            return "dependency"
        full = self.budget is not None and self.timeline.memory[step.at - 1] + size > self.budget
        return "memory" if full else "compute"

    def memory(self, hardware: Hardware | None) -> Memory:
        """By part, at the moment at which the most is alive. What no attribute tells apart counts as activations."""
        capacity, fragments = (hardware.memory, hardware.fragments) if hardware else (None, 0.0)
        memory, tasks, workload = self.timeline.memory, self.workload.tasks, self.workload
        at = max(range(len(memory)), key=memory.__getitem__)
        gathered, peak = self._gathered_at(at), memory[at]
        beneath, name = max(0, peak - gathered), "the end of backward"
        if at < len(tasks):
            beneath, name = tasks[at].memory, tasks[at].name
        elif self.gradients:
            beneath = self._kept
        gathered = min(gathered, peak - beneath)
        gradients = self.gradients[at] if self.gradients else 0
        logits = self.logits if workload.backward - at in (0, 1) else 0
        activations = max(0, beneath - self.parameters - gradients - self.optimizer - logits)
        packed, other = max(0, peak - beneath - gathered), int(fragments * peak)
        return Memory(self.parameters, gradients, self.optimizer, activations, logits, gathered, packed, other,
                      peak + other, name, capacity)  # fmt: skip

    @property
    def _kept(self) -> int:
        """Bytes of all shards and states."""
        return self.parameters + self.gradients[-1] + self.optimizer

    def _gathered_at(self, at: int) -> int:
        """Bytes of gathered buffers while task `at` runs."""
        sizes = {unit.name: unit.gathered for unit in self.workload.units}
        alive = 0
        for step in self.plan.of("gather", "free"):
            if step.at <= at:
                alive += sum(sizes[name] for name in step.units) * (1 if step.kind == "gather" else -1)
        return alive

    def _spans(self) -> Iterator[TimelineSpan]:
        """What runs when; computing spans of one name that follow each other without a wait are one."""
        timeline, joined = self.timeline, list[list[Any]]()
        for span in timeline.compute:
            if joined and span.name == joined[-1][0] and span.start <= joined[-1][2] * (1 + 1e-12):
                joined[-1][2] = span.end
            else:
                joined.append([span.name, span.start, span.end])
        if self.update:
            joined.append(["update", timeline.makespan, timeline.makespan + self.update])
        yield from (TimelineSpan("compute", *each) for each in joined)
        sent = [*timeline.link, *timeline.replicas]
        for span, single in zip(sent, self.collectives, strict=True):
            if single.seconds:  # one rank sends nothing
                yield TimelineSpan(single.level, span.name, span.start, span.end, single.exposed)

    def _memory_over_time(self, fragments: float) -> tuple[tuple[float, int], ...]:
        makespan = self.timeline.makespan
        starts = [0.0, *(span.start for span in self.timeline.compute[1:]), makespan]
        points = [(0.0, -1), *zip(starts, self.timeline.memory, strict=True)]
        if self.gradients:
            points.append((makespan + self.update, self._kept))
        points = [(seconds, int((1 + fragments) * size)) for seconds, size in points]
        return tuple(point for before, point in pairwise(points) if point[1] != before[1])

    def predict(
        self, model: str, parameters: int, setting: Setting, hardware: Hardware | None, tokens: int,
        flops: tuple[int, int],
    ) -> Prediction:  # fmt: skip
        """The prediction of this step, with the names of `Prediction`.

        `tokens` and `flops` are of one pass: operations without and with those that backward repeats.
        """
        workload, passes = self.workload, self.passes
        seconds = {"forward": 0.0, "backward": 0.0}
        for at, task in enumerate(workload.tasks):
            seconds["forward" if workload.is_forward(at) else "backward"] += task.seconds
        sent = [each for each in self.collectives if each.seconds]
        collectives = []
        for kind, level in dict.fromkeys((each.kind, each.level) for each in sent):
            alike = [each for each in sent if (each.kind, each.level) == (kind, level)]
            sums = (passes * sum(getattr(each, name) for each in alike) for name in ("bytes", "seconds", "exposed"))
            collectives.append(CollectiveTime(kind, level, passes * len(alike), *sums))
        dtype = "float32" if setting.precision == "fp32" else "bfloat16"
        possible = self.step * hardware.peak.get(dtype, 0.0) if hardware else 0.0  # operations at the peak
        mfu, hfu = (passes * each / possible if possible else 0.0 for each in flops)
        figures = hardware.figures() if hardware else ()
        return Prediction(
            model=model,
            parameters=parameters,
            setting=setting,
            forward=passes * seconds["forward"],
            backward=passes * seconds["backward"],
            update=self.update,
            exposed=passes * max(0.0, self.timeline.exposed),
            step=self.step,
            tokens_per_second=passes * tokens / self.step if self.step else 0.0,
            mfu=mfu,
            hfu=hfu,
            collectives=tuple(collectives),
            top=tuple(sorted(sent, key=lambda each: -each.seconds)[:_MOST_TOP]),
            memory=self.memory(hardware),
            timeline=tuple(self._spans()),
            memory_over_time=self._memory_over_time(hardware.fragments if hardware else 0.0),
            constants=tuple(
                Constant(name, value, unit, source.origin, source.source) for name, value, unit, source in figures
            ),
            matrices=self.matrices,
        )
