"""From work, a setting and hardware to a prediction: seconds by unit, a plan of collectives, memory by part.

    price(work, setting, hardware)
      _seconds         what each unit computes, in each direction
      _workload        that as tasks and units, as the planner has them, with seconds of collectives
      prefetch         the plan that FSDP2 follows and compiled graphs nearly follow: one unit ahead (passes/plan)
      simulate         when everything runs, and what is alive then
      _memory          the parts of the peak

A step with gradient accumulation is that many equal passes and one update; each pass reduces its gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

from fsdp_compile.config import update_moves
from fsdp_compile.explain.graphs import UPDATE, GraphStep, as_graph
from fsdp_compile.explain.prediction import (
    CollectiveKind,
    CollectiveTime,
    Constant,
    Level,
    Memory,
    Prediction,
    Setting,
    TimelineSpan,
    TopCollective,
)
from fsdp_compile.explain.work import StepWork, UnitWork, seconds_of
from fsdp_compile.passes.cost.cluster import Group
from fsdp_compile.passes.cost.hardware import Hardware
from fsdp_compile.passes.cost.roofline import update_seconds
from fsdp_compile.passes.plan.plan import Plan, Span, Timeline, simulate
from fsdp_compile.passes.plan.search import prefetch
from fsdp_compile.passes.plan.workload import Task, UnitCost, Workload

MOST_TOP = 10  # single collectives that a prediction lists
_STATES = {"adamw": 8, "adam": 8, "momentum": 4, "sgd": 0, "none": 0}
# Bytes that an update reads and writes for each parameter, in float32. Eager optimizers without fused kernels pass over
# them several times.
UPDATE_MOVES = {name: 4 * update_moves(states / 4) if name != "none" else 0 for name, states in _STATES.items()}
_UPDATE_PASSES = 3  # of an update that is not fused
_CLIP_MOVES = 12  # the norm reads gradients, scaling reads and writes them


@dataclass(frozen=True)
class Priced:
    """A step on a cluster.

    Attributes:
        work: what one rank computes in one pass.
        setting: what was asked.
        hardware: what it runs on.
    """

    work: StepWork
    setting: Setting
    hardware: Hardware

    @classmethod
    def of(cls, work: StepWork, setting: Setting, hardware: Hardware) -> "Priced":
        """With products in float8 where the setting says so."""
        return cls(work.in_float8() if setting.precision == "fp8" else work, setting, hardware)

    # --- groups and bytes ---------------------------------------------------------------------------------------------

    @cached_property
    def per_node(self) -> int:
        """Ranks of a node."""
        return min(self.setting.world_size, self.setting.ranks_per_node or int(self.hardware.ranks_per_node))

    @cached_property
    def shards(self) -> int:
        """Ranks that store one copy of the parameters."""
        world = self.setting.world_size
        if self.setting.strategy == "NO_SHARD":
            return 1
        if "HYBRID" in self.setting.strategy:
            return min(world, self.setting.shard_size or self.per_node)
        return world

    @cached_property
    def shard_group(self) -> Group:
        """The ranks that gather and reduce."""
        return Group(self.shards, min(self.shards, self.per_node), self.hardware)

    @cached_property
    def replica_group(self) -> Group:
        """The ranks that store the same shard, or all parameters under NO_SHARD."""
        replicas = self.setting.world_size // self.shards
        on_node = max(1, self.per_node // self.shards)
        return Group(replicas, min(replicas, on_node), self.hardware)

    @cached_property
    def gathered_width(self) -> int:
        """Bytes of an element of a gathered buffer."""
        return 4 if self.setting.precision == "fp32" else 2

    @cached_property
    def packed_width(self) -> int:
        """Bytes of an element of a reduce-scatter."""
        if self.setting.reduce_dtype is not None:
            return 4 if self.setting.reduce_dtype == "float32" else 2
        return self.gathered_width

    @cached_property
    def in_graph(self) -> bool:
        """Whether collectives are in a compiled graph: see Note [What graphs of this package do]."""
        return self.setting.compiled and self.setting.runtime == "fsdp_compile"

    @cached_property
    def resharding(self) -> bool:
        """Whether blocks are freed between forward and backward."""
        return self.setting.strategy in ("FULL_SHARD", "HYBRID_SHARD") and self.shards > 1

    # --- seconds ------------------------------------------------------------------------------------------------------

    @cached_property
    def collectives_of(self) -> Callable[[int], tuple[float, float, float]]:
        """By number of parameters: seconds of a gather, a reduce, and an all-reduce over replicas, without launches."""
        return cache(self._collectives_of)

    def _collectives_of(self, parameters: int) -> tuple[float, float, float]:
        packed = parameters * self.packed_width
        gather = reduce = replicate = 0.0
        if self.shards > 1:
            gather = self.shard_group.transfer(parameters * self.gathered_width)
            reduce = self.shard_group.transfer(packed)
        if self.replica_group.size > 1:
            replicate = self.replica_group.all_reduce(packed / self.shards)
        return gather, reduce, replicate

    def seconds(self, unit: UnitWork, backward: bool, is_block: bool) -> float:
        """What a unit computes in one direction, beside collectives that slow it down."""
        computing = seconds_of(unit.backward if backward else unit.forward, self.hardware)
        if not is_block:
            return computing
        gather, reduce, _ = self.collectives_of(unit.parameters)
        beside = (gather if self.resharding or not backward else 0.0) + (reduce if backward else 0.0)
        packing = 0.0
        if backward and self.shards > 1 and not self.in_graph:  # gradients are copied into the buffer that is reduced
            moved = unit.parameters * (self.gathered_width + self.packed_width)
            packing = moved / (self.hardware.bandwidth * self.hardware.chain_efficiency)
        slower = self.hardware.contention * min(beside, computing)
        return computing + packing + slower + self.hardware.layer_seconds

    @cached_property
    def workload(self) -> Workload:
        """One pass as the planner sees it. Unit 0 is all that is outside of blocks."""
        return self.graph.workload if self.in_graph else self._by_blocks

    @cached_property
    def graph(self) -> GraphStep:
        """One pass as compiled graphs do it."""
        blocks = [*self.work.units][1:-1]
        outside = self.work.parameters - sum(block.parameters for block in blocks)
        return as_graph(
            self._by_blocks,
            blocks,
            [4 * -(-parameters // self.shards) for parameters in (outside, *(block.parameters for block in blocks))],
            self.gathered_width,
            reshards_last=bool(blocks) and self.resharding and not self.setting.keep,
            accumulates=self.setting.accumulation > 1,
            update=self.update if self.begins_with_update else None,
        )

    @cached_property
    def begins_with_update(self) -> bool:
        """Whether the tasks begin with the update, beside which the first all-gathers run."""
        called = self.in_graph and self.setting.compile_step and self.setting.accumulation == 1
        return called and self.setting.precision != "fp8"  # what is scaled is not prefetched

    @cached_property
    def _by_blocks(self) -> Workload:
        """One pass with a task for each block and direction."""
        units, states = [*self.work.units], self._states
        begin, end, blocks = units[0], units[-1], units[1:-1]
        known: dict[tuple[int, bool], float] = {}

        def timed(unit: UnitWork, backward: bool) -> float:
            key = (id(unit), backward)
            if key not in known:
                known[key] = self.seconds(unit, backward, unit is not begin and unit is not end)
            return known[key]

        outside = self.work.parameters - sum(block.parameters for block in blocks)
        costs = [self._unit(begin.name if not blocks else "root", outside, keep=True)]
        # The last block always stays: backward begins there.
        first_to_stay = len(blocks) - min(self.setting.keep, len(blocks)) - 1
        for index, block in enumerate(blocks):
            name = f"blocks.{index}"
            costs.append(self._unit(name, block.parameters, keep=not self.resharding or index >= first_to_stay))
        tasks = [Task(f"{begin.name} forward", timed(begin, False), states + begin.forward_bytes, (0,))]
        saved, backward = begin.saved_bytes, list[Task]()
        for index, block in enumerate(blocks, 1):
            name, below = f"blocks.{index - 1}", states + saved
            alive = below + block.input_bytes + block.forward_bytes
            tasks.append(Task(f"{name} forward", timed(block, False), alive, (index,)))
            gradients = block.parameters * self.gathered_width
            alive = below + block.input_bytes + block.backward_bytes + gradients
            backward.append(Task(f"{name} backward", timed(block, True), alive, (index,), (index,)))
            saved += block.input_bytes + block.saved_bytes
        below = states + saved + end.input_bytes
        tasks.append(Task(f"{end.name} forward", timed(end, False), below + end.forward_bytes, (0,)))
        split = len(tasks)
        tasks.append(Task(f"{end.name} backward", timed(end, True), below + end.backward_bytes, (0,), (0,)))
        tasks += reversed(backward)
        tasks.append(Task(f"{begin.name} backward", timed(begin, True), states + begin.backward_bytes, (), (0,)))
        launch = self.shard_group.launch if self.shards > 1 else 0.0
        return Workload(tuple(tasks), split, tuple(costs), launch, can_coalesce=False)

    def _unit(self, name: str, parameters: int, keep: bool) -> UnitCost:
        gather, reduce, replicate = self.collectives_of(parameters)
        gathered = parameters * self.gathered_width if self.shards > 1 or self.gathered_width < 4 else 0
        packed = parameters * self.packed_width
        return UnitCost(name, gather, reduce, gathered, packed, replicate, keep_unsharded=keep)

    @cached_property
    def plan(self) -> Plan:
        """One unit ahead, as FSDP2 does; the reduce of a unit runs beside the backward of the next one."""
        if self.in_graph:
            return self.graph.plan
        return prefetch(self.workload, forward=2, backward=1, before_wait=False, in_flight=1)

    @cached_property
    def timeline(self) -> Timeline:
        """One pass."""
        return simulate(self.workload, self.plan)

    @cached_property
    def update(self) -> float:
        """Seconds of clipping and of the optimizer."""
        shard = self.work.parameters / self.shards
        passes = 1 if self.setting.compiled else _UPDATE_PASSES
        moved = UPDATE_MOVES[self.setting.optimizer] * passes + (_CLIP_MOVES if self.setting.clip else 0)
        return update_seconds(shard * moved, self.hardware) + self.hardware.step_seconds

    @cached_property
    def exposed(self) -> float:
        """Seconds of a pass in which nothing computes."""
        return max(0.0, self.timeline.exposed)

    @cached_property
    def step(self) -> float:
        """Seconds of the step."""
        passes = self.setting.accumulation * self.timeline.makespan
        return passes if self.begins_with_update else passes + self.update

    @cached_property
    def tokens_per_second(self) -> float:
        """Per GPU; sequences where the model has no tokens."""
        return self.setting.accumulation * (self.work.tokens or self.setting.batch) / self.step

    # --- memory -------------------------------------------------------------------------------------------------------

    @cached_property
    def _stored(self) -> tuple[int, int, int]:
        """Bytes of the shards of parameters, of their gradients, and of the optimizer's state."""
        shard = -(-self.work.parameters // self.shards)
        return 4 * shard, 4 * shard, _STATES[self.setting.optimizer] * shard

    @property
    def _states(self) -> int:
        return sum(self._stored)

    @cached_property
    def memory(self) -> Memory:
        """By part, at the moment at which the most is alive."""
        memory = self.timeline.memory
        at = max(range(len(memory)), key=memory.__getitem__)
        tasks = self.workload.tasks
        beneath = tasks[at].memory if at < len(tasks) else self._states
        gathered = min(self._gathered_at(at), memory[at] - beneath)
        packed = max(0, memory[at] - beneath - gathered)
        end = self.workload.backward  # the task of `end`'s backward
        logits = self.work.end.logits_bytes if at in (end - 1, end) else 0
        parameters, gradients, optimizer = self._stored
        if self.in_graph:
            gradients = self.graph.gradients[at]
        other = int(self.hardware.fragments * memory[at])
        name = tasks[at].name if at < len(tasks) else "the end of backward"
        return Memory(
            parameters,
            gradients,
            optimizer,
            max(0, beneath - parameters - gradients - optimizer - logits),
            logits,
            gathered,
            packed,
            other,
            memory[at] + other,
            name,
            self.hardware.memory,
        )

    def _gathered_at(self, at: int) -> int:
        """Bytes of gathered buffers while task `at` runs."""
        sizes, alive = {unit.name: unit.gathered for unit in self.workload.units}, 0
        for step in self.plan.of("gather", "free"):
            if step.at <= at:
                alive += sum(sizes[name] for name in step.units) * (1 if step.kind == "gather" else -1)
        return alive


# --- the prediction ---------------------------------------------------------------------------------------------------


def price(work: StepWork, setting: Setting, hardware: Hardware, warnings: tuple[str, ...] = ()) -> Prediction:
    """What a step takes that does `work` in each of its passes.

    Raises:
        ValueError: the hardware has no figure for a dtype that the work computes in.
    """
    priced = Priced.of(work, setting, hardware)
    passes, tasks = setting.accumulation, priced.workload.tasks
    split = priced.workload.backward
    forward = passes * sum(task.seconds for task in tasks[:split] if task.name != UPDATE)
    backward = passes * sum(task.seconds for task in tasks[split:])
    peak = hardware.peak.get("float32" if setting.precision == "fp32" else "bfloat16", 0.0)
    singles = list(_singles(priced))
    recomputed = passes * priced.work.recomputed_flops / priced.step
    model = passes * priced.work.model_flops / priced.step
    return Prediction(
        model=work.model,
        parameters=work.parameters,
        setting=setting,
        forward=forward,
        backward=backward,
        update=priced.update,
        exposed=passes * priced.exposed,
        step=priced.step,
        tokens_per_second=priced.tokens_per_second,
        mfu=model / peak if peak else 0.0,
        hfu=(model + recomputed) / peak if peak else 0.0,
        collectives=tuple(_by_kind(singles, passes)),
        top=tuple(sorted(singles, key=lambda each: -each.seconds)[:MOST_TOP]),
        memory=priced.memory,
        timeline=tuple(_spans(priced, singles)),
        memory_over_time=_memory_over_time(priced),
        constants=tuple(
            Constant(name, value, unit, source.origin, source.source)
            for name, value, unit, source in hardware.figures()
        ),
        warnings=(*warnings, *_warnings(setting, hardware)),
    )


def _singles(priced: Priced) -> Iterator[TopCollective]:
    """The collectives of one pass, in the order in which they are launched, those over replicas last."""
    units = {unit.name: unit for unit in priced.workload.units}
    timeline = priced.timeline
    if priced.shards > 1:
        for span in timeline.link:
            what, name = span.name.split(" ", 1)
            kind: CollectiveKind = "all-gather" if what == "gather" else "reduce-scatter"
            size = units[name].gathered if what == "gather" else units[name].packed
            yield _single(span, kind, priced.shard_group.level, size, timeline)
    for span in timeline.replicas:
        size = units[span.name.split(" ", 1)[1]].packed // priced.shards
        yield _single(span, "all-reduce", priced.replica_group.level, size, timeline)


def _single(span: Span, kind: CollectiveKind, level: Level, size: int, timeline: Timeline) -> TopCollective:
    exposed = max(0.0, timeline.exposed_of(span))
    exposed = 0.0 if exposed <= 1e-9 * timeline.makespan else exposed
    limit = ""
    if exposed:
        edge = span.start <= 0 or span.end >= timeline.makespan * (1 - 1e-9)
        limit = "dependency" if edge else "compute"
    return TopCollective(span.name, kind, level, size, span.seconds, exposed, limit)


def _by_kind(singles: list[TopCollective], passes: int) -> Iterator[CollectiveTime]:
    for kind, level in dict.fromkeys((each.kind, each.level) for each in singles):
        alike = [each for each in singles if (each.kind, each.level) == (kind, level)]
        yield CollectiveTime(
            kind,
            level,
            passes * len(alike),
            passes * sum(each.bytes for each in alike),
            passes * sum(each.seconds for each in alike),
            passes * sum(each.exposed for each in alike),
        )


def _spans(priced: Priced, singles: list[TopCollective]) -> Iterator[TimelineSpan]:
    timeline = priced.timeline
    for name, start, end in _joined(timeline.compute):
        yield TimelineSpan("compute", name, start, end)
    if not priced.begins_with_update:
        yield TimelineSpan("compute", UPDATE, timeline.makespan, timeline.makespan + priced.update)
    spans = [*(timeline.link if priced.shards > 1 else ()), *timeline.replicas]
    for span, single in zip(spans, singles, strict=True):
        yield TimelineSpan(single.level, span.name, span.start, span.end, single.exposed)


def _joined(spans: list[Span]) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of computing spans; those of one name that follow each other without a wait are one."""
    name, start, end = "", 0.0, 0.0
    for span in spans:
        if span.name == name and span.start <= end * (1 + 1e-12):
            end = span.end
            continue
        if name:
            yield name, start, end
        name, start, end = span.name, span.start, span.end
    if name:
        yield name, start, end


def _memory_over_time(priced: Priced) -> tuple[tuple[float, int], ...]:
    timeline = priced.timeline
    starts = [0.0, *(span.start for span in timeline.compute[1:]), timeline.makespan]
    held = 1 + priced.hardware.fragments  # as in the peak
    sizes = [int(held * size) for size in (*timeline.memory, priced._states)]
    end = timeline.makespan + (0.0 if priced.begins_with_update else priced.update)
    points = [*zip([*starts, end], sizes, strict=True)]
    return tuple(point for before, point in pairwise([(0.0, -1), *points]) if point[1] != before[1])


def _warnings(setting: Setting, hardware: Hardware) -> Iterator[str]:
    half, single = hardware.peak.get("bfloat16", 0.0), hardware.peak.get("float32", 0.0)
    if setting.precision == "fp32" and half > 2 * single > 0 and hardware.memory is not None:
        yield (f"precision: fp32 on {hardware.name} leaves its matrix units unused, and is up to {half / single:.0f} "
               "times slower than bf16")  # fmt: skip
