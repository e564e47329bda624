"""Predict steps of an unsharded model in many settings: it is traced a few times, all else is arithmetic.

predict_step       predictions for some settings; alternatives have one thing changed, and the best setting is
                   searched over strategy, checkpointing and batch together
Priced             work in a setting on hardware as a workload and a plan: FSDP2's, or what compiled graphs of
                   this package do by default, simulated by passes/plan
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn

from fsdp_compile.comm.formats import ratio
from fsdp_compile.core.layout import lay_out
from fsdp_compile.explain.matrices import costs_of_matrices, muon_of
from fsdp_compile.explain.prediction import Alternative, Prediction, Setting
from fsdp_compile.explain.ranks import sharded
from fsdp_compile.explain.scheduled import Message, Scheduled
from fsdp_compile.explain.trace import Model
from fsdp_compile.explain.unit_work import StepWork, UnitWork
from fsdp_compile.passes.cost.hardware import Hardware, device, link
from fsdp_compile.passes.cost.roofline import launch_seconds, level_of, update_seconds
from fsdp_compile.passes.graph.prices import Prices, work_seconds
from fsdp_compile.passes.plan.schedule import order_of_blocks
from fsdp_compile.passes.plan.workload import Task, UnitCost, Workload

LARGEST = 1 << 20  # ranks that are tried at most to make a step fit
_DTYPES = {4: torch.float32, 2: torch.bfloat16}  # by bytes of an element
_TASKS = 8  # of a block's forward or backward in a compiled graph, between which collectives may begin
_STATES = {"adamw": 8, "adam": 8, "momentum": 4, "muon": 4, "sgd": 0, "none": 0}  # bytes for each parameter
UPDATE_MOVES = {name: 12 + 2 * states if name != "none" else 0 for name, states in _STATES.items()}
"""Bytes that an update reads and writes for each parameter, in float32: all are read, all but gradients are written."""
_UPDATE_PASSES = 3  # of an eager optimizer over its tensors, whose kernels are not fused
_CLIP_MOVES = 12  # the norm reads gradients, scaling reads and writes them


# --- from work to a workload and a plan -------------------------------------------------------------------------------

# Note [What graphs of this package do]
# Where collectives are part of a compiled graph, they begin between any two products, not just between blocks, in the
# order that graphs follow by default (`order_of_blocks`). Backward gathers the last block again. Gradients are written
# into the buffer that is reduced, which takes the memory of the gathered one: nothing is packed. Parameters outside of
# blocks are read until the end of backward. Shards of gradients come to exist one by one. The first product of a
# checkpointed block's backward may run before its forward is computed again.


class Priced:
    """Seconds and bytes of a step in one setting.

    Args:
        work: what one rank computes in one pass.
        setting: what was asked.
        hardware: what it runs on.
    """

    def __init__(self, work: StepWork, setting: Setting, hardware: Hardware) -> None:
        self.work = work.in_float8() if setting.precision == "fp8" else work
        self.setting, self.hardware = setting, hardware
        world, strategy = setting.world_size, setting.strategy
        per_node = min(world, setting.ranks_per_node or int(hardware.ranks_per_node))
        self.shards = 1 if strategy == "NO_SHARD" else world  # ranks that store one copy of the parameters
        if "HYBRID" in strategy:
            self.shards = min(world, setting.shard_size or per_node)
        replicas = world // self.shards
        link, replica_link = (hardware.connect(n) for n in (per_node, max(1, per_node // self.shards)))
        groups = {"shards": (self.shards, link), "replicas": (replicas, replica_link)}
        launch = launch_seconds(self.shards, link) if self.shards > 1 else 0.0
        self.prices = Prices(hardware, groups, launch)
        # Bytes of an element of what is gathered and of what is reduced.
        self._gathered_width = self._packed_width = 4 if setting.precision == "fp32" else 2
        if setting.reduce_dtype is not None:
            self._packed_width = 4 if setting.reduce_dtype == "float32" else 2
        formats = (setting.wire_gather, self._gathered_width), (setting.wire_reduce, self._packed_width)
        self._ratios = tuple(ratio(format or "", _DTYPES[width]) for format, width in formats)
        shard = -(-work.parameters // self.shards)
        # Bytes of the shards of parameters, which are those of their gradients, and of the optimizer's state.
        self._stored = 4 * shard, _STATES[setting.optimizer] * shard
        self._reshards = strategy in ("FULL_SHARD", "HYBRID_SHARD") and self.shards > 1
        # Whether collectives are in a compiled graph, see Note [What graphs of this package do].
        self._in_graph = setting.compiled and setting.runtime == "fsdp_compile"

    @cached_property
    def _cost(self) -> Callable[[int], UnitCost]:
        """The cost of a unit by its number of parameters; the name is left open."""

        def cost(parameters: int) -> UnitCost:
            gathered, packed = parameters * self._gathered_width, parameters * self._packed_width
            gather = reduce = replicate = 0.0
            if self.shards > 1:
                gather, reduce = (
                    self.prices.message("shards", full, full * part if part < 1 else None)
                    for full, part in zip((gathered, packed), self._ratios, strict=True)
                )
            if self.prices.groups["replicas"][0] > 1:
                sent = packed * self._ratios[1] / self.shards
                replicate = self.prices.message("replicas", sent, is_all_reduce=True)
            is_copied = self.shards > 1 or self._gathered_width < 4
            return UnitCost("", gather, reduce, gathered if is_copied else 0, packed, replicate)

        return cache(cost)

    def _sent(self, unit: UnitWork) -> int:
        """The elements of a unit with the padding of this package's layout."""
        if self.setting.runtime != "fsdp_compile" or not unit.shapes:
            return unit.parameters
        return lay_out([(str(index), shape) for index, shape in enumerate(unit.shapes)], self.shards).numel

    def _seconds(self, unit: UnitWork, backward: bool) -> float:
        """Seconds of a unit's forward or backward; a block is slowed down by collectives beside it."""
        computing = sum(work_seconds(each, self.hardware) for each in (unit.backward if backward else unit.forward))
        if unit is self.work.begin or unit is self.work.end:
            return computing
        cost = self._cost(self._sent(unit))
        beside = (cost.gather if self._reshards or not backward else 0.0) + (cost.reduce if backward else 0.0)
        packing = 0.0
        if backward and self.shards > 1 and not self._in_graph:  # gradients are copied into the buffer of the reduce
            moved = unit.parameters * (self._gathered_width + self._packed_width)
            packing = moved / (self.hardware.bandwidth * self.hardware.chain_efficiency)
        slower = self.hardware.contention * min(beside, computing)
        return computing + packing + slower + self.hardware.layer_seconds

    @cached_property
    def scheduled(self) -> Scheduled:
        """The step in the order of blocks: the reduce of a unit runs beside the backward of the next one."""
        units, (parameters, optimizer) = [*self.work.units], self._stored
        begin, end, blocks = units[0], units[-1], units[1:-1]
        outside = self.work.parameters - sum(block.parameters for block in blocks)
        graph, accumulates = self._in_graph, self.setting.accumulation > 1
        # Unit 0 is all that is outside of blocks.
        costs = [replace(self._cost(outside), name="root" if blocks else begin.name, keep_unsharded=True)]
        # FSDP2 never frees the last block, where backward begins; graphs gather it again.
        stays = min(self.setting.keep, len(blocks)) + (0 if graph and not self.setting.keep else 1)
        for index, block in enumerate(blocks):
            keep = not self._reshards or index >= len(blocks) - stays
            costs.append(replace(self._cost(self._sent(block)), name=f"blocks.{index}", keep_unsharded=keep))
        seconds: dict[tuple[int, bool], float] = {}  # equal blocks are one object
        tasks, gradients, made = list[Task](), list[int](), 0  # bytes of shards of gradients, at each task and so far

        def add(name: str, unit: int, of: UnitWork, backward: bool, memory: int) -> None:
            nonlocal made
            exist = made if graph and not accumulates else parameters
            key = (id(of), backward)
            if key not in seconds:
                seconds[key] = self._seconds(of, backward)
            reads = () if of is begin and backward and not graph else (unit,)
            task = Task(f"{name} {'backward' if backward else 'forward'}", seconds[key],
                        parameters + optimizer + exist + memory, reads, (unit,) if backward else ())  # fmt: skip
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
            beside = _first_product(block) if graph else block.parameters * self._gathered_width
            add(f"blocks.{index - 1}", index, block, True, beneath[index - 1] + block.backward_bytes + beside)
        add(begin.name, 0, begin, True, begin.backward_bytes)
        workload = Workload(tuple(tasks), split, tuple(costs), self.prices.latency, can_coalesce=False)
        return Scheduled(
            workload,
            order_of_blocks(workload),
            levels=(level_of(*self.prices.groups["shards"], 1), level_of(*self.prices.groups["replicas"], 1)),
            shards=self.shards,
            passes=self.setting.accumulation,
            update=update_of(self.work.parameters / self.shards, self.setting, self.hardware),
            parameters=parameters,
            optimizer=optimizer,
            gradients=(*gradients, parameters),
            logits=self.work.end.logits_bytes,
            messages=dict(self._messages(workload)),
        )

    def _messages(self, workload: Workload) -> Iterator[tuple[str, Message]]:
        """What is sent in a format, by collective."""
        for unit in workload.units:
            sizes = {"gather": unit.gathered, "reduce": unit.packed, "replicate": unit.packed // self.shards}
            formats = self.setting.wire_gather, self.setting.wire_reduce, self.setting.wire_reduce
            ratios = self._ratios[0], self._ratios[1], self._ratios[1]
            for (kind, size), format, part in zip(sizes.items(), formats, ratios, strict=True):
                if format is not None:
                    yield f"{kind} {unit.name}", Message(format, size, round(size * part))

    @property
    def tokens_per_second(self) -> float:
        """Per GPU."""
        return self.setting.accumulation * self.work.tokens / self.scheduled.step

    def alternative(self, change: str) -> Alternative:
        """This step as an alternative to that of another setting."""
        memory = self.scheduled.memory(self.hardware)
        step, speed = self.scheduled.step, self.tokens_per_second
        return Alternative(change, self.setting, step, speed, memory.peak, memory.fits)


def update_of(parameters: float, setting: Setting, hardware: Hardware) -> float:
    """Seconds of clipping and of the optimizer, of so many parameters that a rank updates."""
    passes = 1 if setting.compiled else _UPDATE_PASSES
    moved = parameters * (UPDATE_MOVES[setting.optimizer] * passes + (_CLIP_MOVES if setting.clip else 0))
    return max(update_seconds(moved, hardware), hardware.kernel_seconds) + hardware.step_seconds


def _divided(task: Task, unit: int, backward: bool) -> Iterator[Task]:
    """Split a block's task; in backward the last part writes the gradients, and the others read the parameters."""
    for at in range(_TASKS):
        ends = backward and at == _TASKS - 1
        reads, writes = ((), (unit,)) if ends else ((unit,), ())
        yield replace(task, seconds=task.seconds / _TASKS, reads=reads, writes=writes)


def _first_product(block: UnitWork) -> int:
    """Bytes that the first product of a checkpointed block's backward writes; 0 for other blocks."""
    products = (each for each in block.backward[len(block.forward) :] if each.kind.endswith("product"))
    return 0 if block.saved_bytes else next((each.written_bytes for each in products), 0)


def price(work: StepWork, setting: Setting, hardware: Hardware) -> Prediction:
    """Predict a step that does `work` in each of its passes."""
    priced = Priced(work, setting, hardware)
    model, repeated = priced.work.model_flops, priced.work.recomputed_flops
    flops = model, model + repeated
    return priced.scheduled.predict(work.model, work.parameters, setting, hardware, work.tokens, flops)


# --- many settings ---------------------------------------------------------------------------------------------------


def predict_step(
    model: nn.Module | Callable[[], Any],
    settings: Sequence[Setting],
    example_inputs: Callable[..., Sequence[Any]] | None = None,
    *,
    hardware: Hardware | None = None,
    alternatives: bool = True,
    shard: Callable[[nn.Module], nn.Module] | None = None,
) -> list[Prediction]:
    """Predict what a step of a model takes in each of `settings`, without running it.

    Args:
        model: as in `explain`.
        settings: clusters and options.
        example_inputs: as in `explain`.
        hardware: of all settings; None: by the names that they give.
        alternatives: whether other settings are tried too, for `Prediction.alternatives` and `.best`.
        shard: such as `fully_shard`, for the matrices of Muon; None: these are left out.

    Raises:
        ValueError: a setting names hardware or a link that is unknown, or the model cannot be made or traced.
    """
    used = []
    for setting in settings:
        here = hardware or device(setting.hardware, "hardware")
        used.append(here if setting.network is None else replace(here, network=link(setting.network, "network")))
    traced = Model(model, example_inputs)
    predictions = []
    for setting, here in zip(settings, used, strict=True):
        made = price(traced.work(setting), setting, here)
        if alternatives:
            others = _Others(traced, setting, here)
            made = replace(made, alternatives=tuple(others.changed(made)), best=others.best(made))
        if setting.optimizer == "muon" and shard is not None:
            ranks, between = Priced(traced.work(setting), setting, here).prices.groups["shards"]
            with sharded(model, shard, ranks) as whole:
                costs = costs_of_matrices(muon_of(whole), between, here)
            made = replace(made, matrices=tuple(times for _, times in costs))
        predictions.append(made)
    return predictions


@dataclass(frozen=True)
class _Others:
    """Try other settings of a model on the same hardware."""

    model: Model
    setting: Setting
    hardware: Hardware

    def _priced(self, **changes: Any) -> Priced:
        setting = replace(self.setting, **changes)
        return Priced(self.model.work(setting), setting, self.hardware)

    @property
    def _strategies(self) -> list[str]:
        """The strategies that could make sense: the hybrid ones where there are several nodes."""
        several = self.setting.world_size > (self.setting.ranks_per_node or self.hardware.ranks_per_node)
        return ["FULL_SHARD", "SHARD_GRAD_OP", *(["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] if several else [])]

    def changed(self, made: Prediction) -> Iterator[Alternative]:
        """The setting with one thing changed; if neither it nor twice its ranks fit, also the fewest ranks that do."""
        setting, ranks = self.setting, 2 * self.setting.world_size
        blocks = sum(block.count for block in self.model.work(setting).blocks)
        words = {"none": "no checkpointing", "selective op": "selective op", "full": "full checkpointing"}
        changes: list[tuple[str, str, Any]] = [
            *((f"checkpointing: {text}", "checkpointing", name) for name, text in words.items()),
            *((f"strategy: {name}", "strategy", name) for name in self._strategies),
        ]
        if setting.strategy in ("FULL_SHARD", "HYBRID_SHARD") and blocks > 1:
            changes.append((f"keep {blocks // 2} of {blocks} blocks unsharded for backward", "keep", blocks // 2))
        changes.append(("keep no block unsharded for backward", "keep", 0))
        changes += [(f"batch: {batch}", "batch", batch) for batch in (setting.batch // 2, setting.batch * 2) if batch]
        for change, field, value in changes:
            if value != getattr(setting, field):
                yield self._priced(**{field: value}).alternative(change)
        yield (larger := self._priced(world_size=ranks).alternative(f"{ranks:,} ranks"))
        while made.fits is False and larger.fits is False and (ranks := 2 * ranks) <= LARGEST:
            change = f"{ranks:,} ranks, the fewest that fit, in powers of two"
            if (larger := self._priced(world_size=ranks).alternative(change)).fits:
                yield larger

    def best(self, made: Prediction) -> Alternative | None:
        """The setting with the most tokens per second that fits, unless that is the one that was asked for."""
        best: Alternative | None = None
        speed = made.tokens_per_second if made.fits is not False else 0.0
        for strategy in self._strategies:
            for checkpointing in dict.fromkeys((self.setting.checkpointing, "none", "selective op", "full")):
                for batch in sorted({1, 2, 4, 8, 16, self.setting.batch, 2 * self.setting.batch}):
                    change = f"{strategy}, checkpointing {checkpointing}, batch {batch}"
                    priced = self._priced(strategy=strategy, checkpointing=checkpointing, batch=batch, keep=0)
                    found = priced.alternative(change)
                    if found.fits is False:
                        break  # a larger batch needs more
                    if found.tokens_per_second > speed * (1 + 1e-6):
                        speed, best = found.tokens_per_second, found
        return best
