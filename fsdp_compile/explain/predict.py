"""From a model and settings to a report: it is traced a few times, and everything else is computed from that.

    explain_settings   options of one value or several -> settings -> predictions -> a report
    Model              traced for each sequence length, with and without recomputation by operator, at the two batches
                       from which all others follow (work.py); world sizes, links, strategies cost no trace
    Priced             work, a setting and hardware as a workload and a plan: FSDP2's rule, one unit ahead, or what
                       compiled graphs of this package do, simulated by passes/plan
    price              the prediction of that
    predict            predictions for many settings; alternatives have one thing changed, and the best setting is
                       searched over strategy, checkpointing and batch together

A step with gradient accumulation is that many equal passes and one update; each pass reduces its gradients.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_compile.config import update_moves
from fsdp_compile.explain.prediction import (
    Alternative,
    Collective,
    CollectiveTime,
    Constant,
    Memory,
    Prediction,
    Scheduled,
    Setting,
    TimelineSpan,
)
from fsdp_compile.explain.report import Report
from fsdp_compile.explain.trace import TracedModel
from fsdp_compile.explain.work import BATCHES, NotAffine, StepWork, UnitWork, at_batch
from fsdp_compile.passes.cost.hardware import Hardware, device, link, read_hardware
from fsdp_compile.passes.cost.roofline import Group, update_seconds
from fsdp_compile.passes.plan.plan import Plan, Timeline
from fsdp_compile.passes.plan.schedule import alternating, prefetch
from fsdp_compile.passes.plan.workload import Task, UnitCost, Workload

USUAL = "h100-80"  # hardware, where none is named
MOST_TOP = 10  # single collectives that a prediction lists
LARGEST = 1 << 20  # ranks that are tried at most to make a step fit
UPDATE = "update"  # the task of `compile_step` that comes first
_PREFETCHED = 2  # units that `compile_step` gathers beside it by default
_TASKS = 8  # of a block's forward or backward in a compiled graph, between which collectives may begin
_STATES = {"adamw": 8, "adam": 8, "momentum": 4, "sgd": 0, "none": 0}
# Bytes that an update reads and writes for each parameter, in float32. Eager optimizers without fused kernels pass over
# them several times.
UPDATE_MOVES = {name: 4 * update_moves(states / 4) if name != "none" else 0 for name, states in _STATES.items()}
_UPDATE_PASSES = 3  # of an update that is not fused
_CLIP_MOVES = 12  # the norm reads gradients, scaling reads and writes them


# --- from work to a workload and a plan -------------------------------------------------------------------------------

# Note [What graphs of this package do]
# Where collectives are part of a compiled graph, they follow the rule for graphs without a link (`alternating`), by
# which collectives begin between any two products, not just between blocks. Backward gathers the last block again.
# Gradients are written into the buffer that is reduced, which takes the memory of the gathered one: nothing is packed.
# Parameters outside of blocks are read until the end of backward. Shards of gradients come to exist one by one. The
# first product of a checkpointed block's backward may run before its forward is computed again. `compile_step` updates
# the parameters that the next forward reads first, and gathers them beside the rest of the update.


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
    def begins_with_update(self) -> bool:
        """Whether the tasks begin with the update, beside which the first all-gathers run."""
        called = self.in_graph and self.setting.compile_step and self.setting.accumulation == 1
        return called and self.setting.precision != "fp8"  # what is scaled is not prefetched

    @cached_property
    def resharding(self) -> bool:
        """Whether blocks are freed between forward and backward."""
        return self.setting.strategy in ("FULL_SHARD", "HYBRID_SHARD") and self.shards > 1

    # --- seconds ------------------------------------------------------------------------------------------------------

    @cached_property
    def collectives_of(self) -> Callable[[int], tuple[float, float, float]]:
        """By number of parameters: seconds of a gather, a reduce, and an all-reduce over replicas, without launches."""

        def seconds(parameters: int) -> tuple[float, float, float]:
            packed = parameters * self.packed_width
            gather = reduce = replicate = 0.0
            if self.shards > 1:
                gather = self.shard_group.transfer(parameters * self.gathered_width)
                reduce = self.shard_group.transfer(packed)
            if self.replica_group.size > 1:
                replicate = self.replica_group.all_reduce(packed / self.shards)
            return gather, reduce, replicate

        return cache(seconds)

    @cached_property
    def seconds(self) -> Callable[[UnitWork, bool], float]:
        """What a unit computes in one direction, for blocks beside collectives that slow it down."""
        known: dict[tuple[int, bool], float] = {}

        def seconds(unit: UnitWork, backward: bool) -> float:
            computing = sum(each.seconds(self.hardware) for each in (unit.backward if backward else unit.forward))
            if unit is self.work.begin or unit is self.work.end:
                return computing
            gather, reduce, _ = self.collectives_of(unit.parameters)
            beside = (gather if self.resharding or not backward else 0.0) + (reduce if backward else 0.0)
            packing = 0.0
            if backward and self.shards > 1 and not self.in_graph:  # gradients are copied into the buffer of the reduce
                moved = unit.parameters * (self.gathered_width + self.packed_width)
                packing = moved / (self.hardware.bandwidth * self.hardware.chain_efficiency)
            slower = self.hardware.contention * min(beside, computing)
            return computing + packing + slower + self.hardware.layer_seconds

        def kept(unit: UnitWork, backward: bool) -> float:
            key = (id(unit), backward)
            if key not in known:
                known[key] = seconds(unit, backward)
            return known[key]

        return kept

    @cached_property
    def _planned(self) -> tuple[Workload, tuple[int, ...]]:
        """One pass as the planner sees it, and bytes of shards of gradients while each task runs, and at the end.

        Unit 0 is all that is outside of blocks.
        """
        units, (parameters, everything, optimizer) = [*self.work.units], self._stored
        begin, end, blocks = units[0], units[-1], units[1:-1]
        outside = self.work.parameters - sum(block.parameters for block in blocks)
        graph, accumulates = self.in_graph, self.setting.accumulation > 1
        costs = [self._unit(begin.name if not blocks else "root", outside, keep=True)]
        # FSDP2 never frees the last block, where backward begins; graphs gather it again.
        stays = min(self.setting.keep, len(blocks)) + (0 if graph and not self.setting.keep else 1)
        for index, block in enumerate(blocks):
            keep = not self.resharding or index >= len(blocks) - stays
            costs.append(self._unit(f"blocks.{index}", block.parameters, keep))
        tasks, gradients, made = list[Task](), list[int](), 0

        def add(name: str, unit: int, of: UnitWork, backward: bool, memory: int) -> None:
            nonlocal made
            exist = made if graph and not accumulates else everything
            total, one = parameters + optimizer + exist + memory, self.seconds(of, backward)
            last = of is begin and backward
            reads = (unit,) if not last or graph else ()
            task = Task(f"{name} {'backward' if backward else 'forward'}", one, total, reads,
                        (unit,) if backward else ())  # fmt: skip
            parts = [*_divided(task, unit, backward)] if graph and unit else [task]
            tasks.extend(parts)
            gradients.extend([exist] * len(parts))
            made += 4 * -(-of.parameters // self.shards) if backward and unit else 0

        saved = begin.saved_bytes
        beneath = list[int]()
        add(begin.name, 0, begin, False, begin.forward_bytes)
        for index, block in enumerate(blocks, 1):
            beneath.append(saved + block.input_bytes)
            add(f"blocks.{index - 1}", index, block, False, beneath[-1] + block.forward_bytes)
            saved += block.input_bytes + block.saved_bytes
        add(end.name, 0, end, False, saved + end.input_bytes + end.forward_bytes)
        split = len(tasks)
        add(end.name, 0, end, True, saved + end.input_bytes + end.backward_bytes)
        for index in range(len(blocks), 0, -1):
            block = blocks[index - 1]
            beside = _first_product(block) if graph else block.parameters * self.gathered_width
            add(f"blocks.{index - 1}", index, block, True, beneath[index - 1] + block.backward_bytes + beside)
        add(begin.name, 0, begin, True, begin.backward_bytes)
        if self.begins_with_update:
            tasks, split = [Task(UPDATE, self.update, self._states), *tasks], split + 1
            gradients = [everything, *gradients]
        launch = self.shard_group.launch if self.shards > 1 else 0.0
        return Workload(tuple(tasks), split, tuple(costs), launch, can_coalesce=False), (*gradients, everything)

    def _unit(self, name: str, parameters: int, keep: bool) -> UnitCost:
        gather, reduce, replicate = self.collectives_of(parameters)
        gathered = parameters * self.gathered_width if self.shards > 1 or self.gathered_width < 4 else 0
        packed = parameters * self.packed_width
        return UnitCost(name, gather, reduce, gathered, packed, replicate, keep_unsharded=keep)

    @cached_property
    def scheduled(self) -> Scheduled:
        """One pass: of FSDP2, the reduce of a unit runs beside the backward of the next one."""
        workload, levels = self._planned[0], (self.shard_group.level, self.replica_group.level)
        if not self.in_graph:
            plan = prefetch(workload, forward=2, backward=1, before_wait=False, in_flight=1)
            return Scheduled(workload, plan, levels=levels, shards=self.shards)
        plan = alternating(workload)
        if self.begins_with_update:  # the first gathers begin before all tasks
            first = plan.of("gather")[:_PREFETCHED]
            steps = (step for step in plan.steps if step not in first)
            plan = Plan((*(step._replace(at=0) for step in first), *steps))
        return Scheduled(workload, plan, levels=levels, shards=self.shards)

    @property
    def workload(self) -> Workload:
        """One pass as tasks and units."""
        return self.scheduled.workload

    @property
    def plan(self) -> Plan:
        """When it communicates."""
        return self.scheduled.plan

    @property
    def gradients(self) -> tuple[int, ...]:
        """Bytes of shards of gradients that exist while each task runs, and at the end."""
        return self._planned[1]

    @property
    def timeline(self) -> Timeline:
        """What one pass takes."""
        return self.scheduled.timeline

    @cached_property
    def update(self) -> float:
        """Seconds of clipping and of the optimizer."""
        shard = self.work.parameters / self.shards
        passes = 1 if self.setting.compiled else _UPDATE_PASSES
        moved = UPDATE_MOVES[self.setting.optimizer] * passes + (_CLIP_MOVES if self.setting.clip else 0)
        return update_seconds(shard * moved, self.hardware) + self.hardware.step_seconds

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
        memory, tasks = self.timeline.memory, self.workload.tasks
        at = max(range(len(memory)), key=memory.__getitem__)
        beneath = tasks[at].memory if at < len(tasks) else self._states
        gathered = min(self.scheduled.gathered_at(at), memory[at] - beneath)
        end = self.workload.backward  # the task of `end`'s backward
        logits = self.work.end.logits_bytes if at in (end - 1, end) else 0
        parameters, _, optimizer = self._stored
        other = int(self.hardware.fragments * memory[at])
        return Memory(
            parameters,
            self.gradients[at],
            optimizer,
            activations=max(0, beneath - parameters - self.gradients[at] - optimizer - logits),
            logits=logits,
            gathered=gathered,
            packed=max(0, memory[at] - beneath - gathered),
            other=other,
            peak=memory[at] + other,
            peak_at=tasks[at].name if at < len(tasks) else "the end of backward",
            capacity=self.hardware.memory,
        )


def _divided(task: Task, unit: int, backward: bool) -> Iterator[Task]:
    """`task` in equal tasks; those of backward only read the block's parameters, and the last one only writes."""
    for at in range(_TASKS):
        ends = backward and at == _TASKS - 1
        yield replace(
            task, seconds=task.seconds / _TASKS, reads=() if ends else (unit,), writes=(unit,) if ends else ()
        )


def _first_product(block: UnitWork) -> int:
    """Bytes of what the first product of a checkpointed block's backward makes; 0 of another block."""
    products = (each for each in block.backward[len(block.forward) :] if each.kind.endswith("product"))
    return 0 if block.saved_bytes else next((each.written_bytes for each in products), 0)


# --- predictions ------------------------------------------------------------------------------------------------------


def price(work: StepWork, setting: Setting, hardware: Hardware) -> Prediction:
    """What a step takes that does `work` in each of its passes.

    Raises:
        ValueError: the hardware has no figure for a dtype that the work computes in.
    """
    priced = Priced.of(work, setting, hardware)
    passes, timeline = setting.accumulation, priced.timeline
    split, tasks = priced.workload.backward, priced.workload.tasks
    peak = hardware.peak.get("float32" if setting.precision == "fp32" else "bfloat16", 0.0)
    model = passes * priced.work.model_flops / priced.step
    recomputed = passes * priced.work.recomputed_flops / priced.step
    singles = [each for each in priced.scheduled.collectives if priced.shards > 1 or each.kind == "all-reduce"]
    spans = [span for span in priced.scheduled.spans()
             if priced.shards > 1 or span.lane == "compute" or span.name.startswith("replicate")]  # fmt: skip
    after = 0.0 if priced.begins_with_update else priced.update
    if after:
        at = sum(span.lane == "compute" for span in spans)
        spans.insert(at, TimelineSpan("compute", UPDATE, timeline.makespan, timeline.makespan + after))
    return Prediction(
        model=work.model,
        parameters=work.parameters,
        setting=setting,
        forward=passes * sum(task.seconds for task in tasks[:split] if task.name != UPDATE),
        backward=passes * sum(task.seconds for task in tasks[split:]),
        update=priced.update,
        exposed=passes * max(0.0, timeline.exposed),
        step=priced.step,
        tokens_per_second=priced.tokens_per_second,
        mfu=model / peak if peak else 0.0,
        hfu=(model + recomputed) / peak if peak else 0.0,
        collectives=by_kind(singles, passes),
        top=tuple(sorted(singles, key=lambda each: -each.seconds)[:MOST_TOP]),
        memory=priced.memory,
        timeline=tuple(spans),
        memory_over_time=priced.scheduled.memory_over_time(after, priced._states, hardware.fragments),
        constants=constants_of(hardware),
        warnings=tuple(_warnings(setting, hardware)),
    )


def by_kind(singles: Sequence[Collective], passes: int = 1) -> tuple[CollectiveTime, ...]:
    """Sums of single collectives by kind and level."""
    found = []
    for kind, level in dict.fromkeys((each.kind, each.level) for each in singles):
        alike = [each for each in singles if (each.kind, each.level) == (kind, level)]
        sums = (passes * sum(getattr(each, name) for each in alike) for name in ("bytes", "seconds", "exposed"))
        found.append(CollectiveTime(kind, level, passes * len(alike), *sums))
    return tuple(found)


def constants_of(hardware: Hardware) -> tuple[Constant, ...]:
    """What a prediction on `hardware` depends on."""
    figures = hardware.figures()
    return tuple(Constant(name, value, unit, source.origin, source.source) for name, value, unit, source in figures)


def _warnings(setting: Setting, hardware: Hardware) -> Iterator[str]:
    half, single = hardware.peak.get("bfloat16", 0.0), hardware.peak.get("float32", 0.0)
    if setting.precision == "fp32" and half > 2 * single > 0 and hardware.memory is not None:
        yield (f"precision: fp32 on {hardware.name} leaves its matrix units unused, and is up to {half / single:.0f} "
               "times slower than bf16")  # fmt: skip


# --- many settings ---------------------------------------------------------------------------------------------------


class Model:
    """A model whose work is known in every setting."""

    def __init__(self, make_model: Callable[[], Any], example_inputs: Any = None, name: str | None = None) -> None:
        self.traced = TracedModel(make_model, example_inputs, name)
        self._points: dict[Any, tuple[StepWork, StepWork]] = {}
        self._works: dict[Any, StepWork] = {}

    def work(self, setting: Setting) -> StepWork:
        """What one forward and backward computes. ValueError if the model cannot be traced."""
        by_operator = setting.checkpointing == "selective op"
        key = (setting.sequence, by_operator, setting.compiled, setting.compiles_loss, setting.precision)
        full = (*key, setting.batch, setting.checkpointing)
        if full in self._works:
            return self._works[full]
        if key not in self._points:
            first, second = (self.traced.work(batch, *key) for batch in BATCHES)
            self._points[key] = first, second
        try:
            work = at_batch(*self._points[key], setting.batch)
        except NotAffine:
            work = self.traced.work(setting.batch, *key)
        if setting.checkpointing not in ("none", "selective op"):
            work = work.checkpointed(setting.checkpointing)
        self._works[full] = work
        return work


def predict_step(
    make_model: Callable[[], Any],
    settings: Sequence[Setting],
    example_inputs: Any = None,
    *,
    hardware: Mapping[str, Hardware] | None = None,
    name: str | None = None,
    alternatives: bool = True,
) -> list[Prediction]:
    """Predict what a step of a model takes in each of `settings`, without running it.

    Args:
        make_model: makes the model, unsharded. What it makes gets no memory.
        settings: clusters and options.
        example_inputs: as in `explain`.
        hardware: hardware by the names that settings give, beside the files that the package has.
        name: of the model; None: the name of its class.
        alternatives: whether other settings are tried too, for `Prediction.alternatives` and `.best`.

    Raises:
        ValueError: a setting names hardware that is unknown, or a model cannot be traced or is on a device.
    """
    used = {each.hardware: (hardware or {}).get(each.hardware) or device(each.hardware) for each in settings}
    networks = {each.network: link(each.network) for each in settings if each.network is not None}
    model = Model(make_model, example_inputs, name)

    def hardware_of(setting: Setting) -> Hardware:
        here = used[setting.hardware]
        return replace(here, network=networks[setting.network]) if setting.network is not None else here

    predictions = []
    for setting in settings:
        here = hardware_of(setting)
        made = price(model.work(setting), setting, here)
        if alternatives:
            others = tuple(_alternatives(model, setting, here, made))
            made = replace(made, alternatives=others, best=_best(model, setting, here, made))
        predictions.append(made)
    return predictions


def _alternatives(model: Model, setting: Setting, hardware: Hardware, made: Prediction) -> Iterator[Alternative]:
    """The setting with one thing changed."""
    for checkpointing in ("none", "selective op", "full"):
        if checkpointing != setting.checkpointing:
            words = {"none": "no checkpointing", "full": "full checkpointing"}.get(checkpointing, checkpointing)
            yield _priced(model, f"checkpointing: {words}", replace(setting, checkpointing=checkpointing), hardware)
    for strategy in _strategies(setting, hardware):
        if strategy != setting.strategy:
            yield _priced(model, f"strategy: {strategy}", replace(setting, strategy=strategy), hardware)
    blocks = sum(block.count for block in model.work(setting).blocks)
    if setting.strategy in ("FULL_SHARD", "HYBRID_SHARD") and blocks > 1:
        half = blocks // 2
        words = f"keep {half} of {blocks} blocks unsharded for backward"
        yield _priced(model, words, replace(setting, keep=half), hardware)
    if setting.keep:
        yield _priced(model, "keep no block unsharded for backward", replace(setting, keep=0), hardware)
    for batch in (setting.batch // 2, setting.batch * 2):
        if batch:
            yield _priced(model, f"batch: {batch}", replace(setting, batch=batch), hardware)
    twice = 2 * setting.world_size
    yield _priced(model, f"{twice:,} ranks", replace(setting, world_size=twice), hardware)
    if made.fits is False:
        enough = _enough_ranks(model, setting, hardware)
        if enough is not None and enough != twice:
            yield _priced(model, f"{enough:,} ranks, the fewest that fit, in powers of two",
                          replace(setting, world_size=enough), hardware)  # fmt: skip


def _strategies(setting: Setting, hardware: Hardware) -> list[str]:
    """The strategies that could make sense: the hybrid ones where there are several nodes."""
    several = setting.world_size > (setting.ranks_per_node or hardware.ranks_per_node)
    return ["FULL_SHARD", "SHARD_GRAD_OP", *(["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] if several else [])]


def _enough_ranks(model: Model, setting: Setting, hardware: Hardware) -> int | None:
    """The smallest power of two times the number of ranks at which the step fits."""
    ranks = 2 * setting.world_size
    while ranks <= LARGEST:
        tried = replace(setting, world_size=ranks)
        if Priced.of(model.work(tried), tried, hardware).memory.fits:
            return ranks
        ranks *= 2
    return None


def _best(model: Model, setting: Setting, hardware: Hardware, made: Prediction) -> Alternative | None:
    """The setting with the most tokens per second that fits, unless that is the one that was asked for."""
    best: Alternative | None = None
    speed = made.tokens_per_second if made.fits is not False else 0.0
    for strategy in _strategies(setting, hardware):
        for checkpointing in dict.fromkeys((setting.checkpointing, "none", "selective op", "full")):
            for batch in sorted({1, 2, 4, 8, 16, setting.batch, 2 * setting.batch}):
                tried = replace(setting, strategy=strategy, checkpointing=checkpointing, batch=batch, keep=0)
                priced = Priced.of(model.work(tried), tried, hardware)
                if priced.memory.fits is False:
                    break  # a larger batch needs more
                if priced.tokens_per_second > speed * (1 + 1e-6):
                    speed = priced.tokens_per_second
                    best = _alternative(f"{strategy}, checkpointing {checkpointing}, batch {batch}", tried, priced)
    return best


def _priced(model: Model, change: str, setting: Setting, hardware: Hardware) -> Alternative:
    return _alternative(change, setting, Priced.of(model.work(setting), setting, hardware))


def _alternative(change: str, setting: Setting, priced: Priced) -> Alternative:
    return Alternative(change, setting, priced.step, priced.tokens_per_second, priced.memory.peak, priced.memory.fits)


# --- options ---------------------------------------------------------------------------------------------------------


def explain_settings(
    model: nn.Module | Callable[[], nn.Module],
    example_inputs: Callable[[int, int], Sequence[Any]] | None,
    chosen: Mapping[str, Any],
    hardware: str | Path | Hardware | None,
    calibration: str | Path | None,
    name: str | None,
    alternatives: bool,
) -> Report:
    """What `fsdp_compile.explain` does, with the fields of `Setting` in one mapping."""
    used, makes = hardware_of(hardware, calibration), factory(model)
    settings = combinations({**chosen, "hardware": used.name})
    predictions = predict_step(
        makes, settings, example_inputs, hardware={used.name: used}, name=name, alternatives=alternatives
    )
    return Report(tuple(predictions))


def combinations(chosen: Mapping[str, Any]) -> list[Setting]:
    """One setting for each combination of values; a value is one or a sequence of several.

    Raises:
        TypeError: an option is no field of `Setting`.
        ValueError: a value is none that the field can have, or a sequence is empty.
    """
    names = [each.name for each in fields(Setting)]
    for name, value in chosen.items():
        if name not in names:
            raise TypeError(f"{name}: expected one of {', '.join(names)}, found another option")
        if isinstance(value, Sequence) and not value:
            raise ValueError(f"{name}: expected at least one value, found none")
    several = [value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
               for value in chosen.values()]  # fmt: skip
    return [Setting(**dict(zip(chosen, values, strict=True))) for values in product(*several)]


def factory(model: nn.Module | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A function that makes the model, without memory where tensors are fake; its errors name `model`.

    Raises:
        ValueError: `model` is no module and no function, or has parameters on an accelerator.
    """
    if isinstance(model, nn.Module):
        return partial(_copy, _on_no_accelerator(model))
    if not callable(model):
        raise ValueError(f"model: expected a module or a function that makes one, found {type(model).__name__}")

    def make() -> nn.Module:
        try:
            made = model()
        except Exception as error:
            raise ValueError(f"model: expected a function that makes a module, but it raised {type(error).__name__}: "
                             f"{error}") from error  # fmt: skip
        if not isinstance(made, nn.Module):
            raise ValueError(
                f"model: expected a function that makes a module, found one that makes {type(made).__name__}"
            )
        return _on_no_accelerator(made)

    return make


def _on_no_accelerator(model: nn.Module) -> nn.Module:
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        if each.device.type not in ("cpu", "meta"):
            raise ValueError(f"model: expected tensors on the CPU or the meta device, found {name} on {each.device}; "
                             "leave out what moves it there")  # fmt: skip
    return model


def _copy(model: nn.Module) -> nn.Module:
    """A copy of `model` whose tensors are made anew, without their values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)


def hardware_of(hardware: str | Path | Hardware | None, calibration: str | Path | None) -> Hardware:
    """Hardware by its name, with what was measured or fitted in a calibration in place of its own constants.

    Raises:
        ValueError: hardware of that name is unknown, a file is no hardware file, or the calibration is of another one.
    """
    if calibration is None:
        return hardware if isinstance(hardware, Hardware) else device(str(hardware or USUAL))
    measured = read_hardware(Path(calibration))
    if hardware is None:
        return measured
    base = hardware if isinstance(hardware, Hardware) else device(str(hardware))
    if measured.name != base.name:
        raise ValueError(f"calibration: expected a file of {base.name}, found one of {measured.name}")
    known = {name: source for name, source in measured.sources.items() if source.origin in ("measured", "fitted")}
    links = {name: link for name in ("node", "network")
             if (link := getattr(measured, name)).origin == "measured"}  # fmt: skip
    figures = {name: getattr(measured, name) for name in known}
    return replace(base, **figures, **links, sources={**base.sources, **known})
