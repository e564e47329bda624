"""What is asked of a prediction and what it says: plain data, without torch.

    Setting      the cluster, the batch and the options that a step is predicted for
    Scheduled    a step as the planner has it: a workload, a plan, and what these take
    Prediction   what a step takes in a setting: seconds by part, memory by part, what else could be chosen

Seconds, bytes and tokens are per rank. `to_dict` is what the JSON of the command line holds.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

from fsdp_compile.passes.plan.bound import lower_bound
from fsdp_compile.passes.plan.plan import Plan, Span, Step, Timeline, prefetched, simulate
from fsdp_compile.passes.plan.workload import Workload

FORMAT = 1
"""Version of what `Prediction.to_dict` returns; a field that changes its meaning increases it."""

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce"]
Level = Literal["node", "network"]
Origin = Literal["measured", "fitted", "assumed", "data sheet"]
Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
Precision = Literal["fp32", "bf16", "fp16", "amp_bf16", "amp_fp16", "fp8"]
Optimizer = Literal["adamw", "adam", "sgd", "momentum", "none"]

STRATEGIES: tuple[str, ...] = get_args(Strategy)
PRECISIONS: tuple[str, ...] = get_args(Precision)
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
RUNTIMES = ("fsdp_compile", "fsdp2")


@dataclass(frozen=True)
class Setting:
    """What a step is predicted for.

    Attributes:
        world_size: number of ranks, one GPU each.
        batch: sequences per rank of one forward.
        sequence: tokens of a sequence.
        strategy: how parameters are sharded, by the name in `ShardingStrategy`. The hybrid ones shard within a group
            of `shard_size` ranks.
        checkpointing: "none"; "full", of every block; "selective op", which saves attention and every second matrix
            product; "selective N", which checkpoints every N-th block.
        accumulation: forwards and backwards of one step, each of which reduces its gradients.
        precision: "bf16" and "fp16": parameters are gathered, used and reduced in two bytes, and stored in float32;
            "amp_bf16" and "amp_fp16" say the same, as Composer calls it; "fp8": as bf16, with matrix products in
            float8; "fp32".
        optimizer: "adamw" and "adam" store two float32 values per parameter, "momentum" one, "sgd" none; with "none"
            there is no update.
        clip: whether gradients are clipped to a norm.
        hardware: name of a hardware file that the package has, or the path of another one.
        ranks_per_node: ranks that the fast links connect; None: as the hardware file says.
        shard_size: ranks that store one copy of the parameters under a hybrid strategy; None: those of a node.
        compiled: whether the step runs compiled, with fused chains, or eagerly, one kernel for each operator.
        runtime: what runs the step: "fsdp_compile", this package, whose compiled graphs contain the collectives; or
            "fsdp2", which issues them between blocks, compiled or not.
        compile_step: whether `compile_step` runs it: then the first all-gathers run beside the update before.
        compiled_loss: whether what is outside of blocks, such as the loss, runs compiled; None: as the blocks where
            this package runs the step, and not with "fsdp2", with which torchtitan compiles each block alone.
        network: name of the link between nodes, or `custom:LATENCY,BANDWIDTH` for each rank; None: as the hardware
            file says.
        keep: blocks that are not resharded after forward, counted from the last one, where the strategy reshards.
        reduce_dtype: in which dtype gradients are reduced; None: as they are gathered.

    Raises:
        ValueError: a field has a value that it cannot have, and is named.
    """

    world_size: int
    batch: int = 1
    sequence: int = 2048
    strategy: str = "FULL_SHARD"
    checkpointing: str = "none"
    accumulation: int = 1
    precision: str = "bf16"
    optimizer: str = "adamw"
    clip: bool = True
    hardware: str = "h100-80"
    ranks_per_node: int | None = None
    shard_size: int | None = None
    compiled: bool = True
    runtime: str = "fsdp_compile"
    compile_step: bool = False
    compiled_loss: bool | None = None
    network: str | None = None
    keep: int = 0
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        for name, least in {"world_size": 1, "batch": 1, "sequence": 1, "accumulation": 1, "keep": 0}.items():
            _expect_int(name, getattr(self, name), least)
        for name in ("ranks_per_node", "shard_size"):
            if getattr(self, name) is not None:
                _expect_int(name, getattr(self, name), 1)
        _expect_one_of("strategy", self.strategy, STRATEGIES)
        _expect_one_of("precision", self.precision, PRECISIONS)
        _expect_one_of("optimizer", self.optimizer, OPTIMIZERS)
        _expect_one_of("runtime", self.runtime, RUNTIMES)
        _expect_one_of("reduce_dtype", self.reduce_dtype, (None, "float32", "bfloat16", "float16"))
        interval = self.checkpointing.removeprefix("selective ") if isinstance(self.checkpointing, str) else ""
        known = ("none", "full", "selective op")
        if self.checkpointing not in known and not (interval.isdecimal() and int(interval)):
            raise ValueError(
                f"checkpointing: expected one of {', '.join(known)} or 'selective N', found {self.checkpointing!r}"
            )
        if self.shard_size is not None and self.world_size % self.shard_size:
            raise ValueError(f"shard_size: expected a divisor of world_size {self.world_size}, found {self.shard_size}")

    @property
    def compiles_loss(self) -> bool:
        """`compiled_loss`, or what None stands for."""
        by_runtime = self.compiled and self.runtime == "fsdp_compile"
        return by_runtime if self.compiled_loss is None else self.compiled_loss

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def _expect_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, found {value!r}")


def _expect_one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(map(str, known))}, found {value!r}")


# --- what a prediction says -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CollectiveTime:
    """All collectives of one kind at one level of the cluster, in one step.

    Attributes:
        kind: what they do.
        level: "network" if ranks of several nodes take part, otherwise "node".
        count: how many are launched.
        bytes: the sum of their full sizes: gathered, or given to be reduced.
        seconds: how long they occupy the links.
        exposed: the seconds of these in which nothing computes.
    """

    kind: CollectiveKind
    level: Level
    count: int
    bytes: int
    seconds: float
    exposed: float


@dataclass(frozen=True)
class Collective:
    """A single launch.

    Attributes:
        name: "gather", "reduce" or "replicate", and the units that it serves.
        kind: as in `CollectiveTime`.
        level: as in `CollectiveTime`.
        bytes: size of the gathered buffers, or of the inputs of the reduction.
        seconds: how long it occupies the links.
        exposed: the seconds of these in which nothing computes.
        limit: why they are exposed; empty if none are. "dependency": nothing can compute before it, or the last
            gradient comes late. "link": it queued behind another collective. "memory": the budget did not let it start
            earlier, or made something wait for it. "compute": what computes beside it is too short.
    """

    name: str
    kind: CollectiveKind
    level: Level
    bytes: int
    seconds: float
    exposed: float
    limit: str


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the moment at which the most are alive.

    Attributes:
        parameters: shards of the parameters.
        gradients: shards of the gradients.
        optimizer: the optimizer's state.
        activations: what forward has saved for backward, and what is computed at that moment, without logits.
        logits: the outputs over the vocabulary, their float32 copies and their gradients.
        gathered: unsharded parameters.
        packed: gradients that are packed for a reduce-scatter.
        other: what the context, the communicator's buffers and the allocator's fragments take.
        peak: the sum of these.
        peak_at: what computes at that moment, in words.
        capacity: bytes that the GPU has; None: not known.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    gathered: int
    packed: int
    other: int
    peak: int
    peak_at: str
    capacity: int | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the capacity; None if that is not known."""
        return None if self.capacity is None else self.peak <= self.capacity


@dataclass(frozen=True)
class Constant:
    """A number that the prediction depends on.

    Attributes:
        name: its field in the hardware file.
        value: the number.
        unit: of it, such as "flop/s"; empty for a ratio.
        origin: how it is known.
        source: where it comes from.
    """

    name: str
    value: float
    unit: str
    origin: Origin
    source: str


@dataclass(frozen=True)
class TimelineSpan:
    """What runs from `start` to `end`, in seconds from the beginning of the step.

    Attributes:
        lane: "compute", or the links within a node or between nodes.
        name: the unit, and what is done for it.
        start: when it begins.
        end: when it ends.
        exposed: of a collective, the seconds in which nothing computes; 0 for what computes.
    """

    lane: Literal["compute", "node", "network"]
    name: str
    start: float
    end: float
    exposed: float = 0.0


@dataclass(frozen=True)
class Alternative:
    """Another setting, and what the step takes with it.

    Attributes:
        change: what is different, in words.
        setting: all of it.
        step: seconds.
        tokens_per_second: per GPU.
        peak: bytes.
        fits: as in `Memory`.
    """

    change: str
    setting: Setting
    step: float
    tokens_per_second: float
    peak: int
    fits: bool | None


# --- a step as the planner has it -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockChoice:
    """What becomes of a block between forward and backward.

    Attributes:
        name: its path in the model.
        activations: "keep", or how they are treated otherwise.
        unsharded: how many of its units stay unsharded.
        units: how many it has.
    """

    name: str
    activations: str
    unsharded: int
    units: int


@dataclass(frozen=True)
class Scheduled:
    """A step, and the plan that it follows.

    Attributes:
        workload: what the step computes and communicates.
        plan: when it communicates.
        budget: the number of bytes that may live at once, or None for no limit.
        blocks: what becomes of each block between forward and backward, where that was chosen.
        levels: which links gathers and reduces take, and which ones all-reduces over replicas.
        shards: number of ranks that store one copy of the parameters.
    """

    workload: Workload
    plan: Plan
    budget: int | None = None
    blocks: tuple[BlockChoice, ...] = ()
    levels: tuple[Level, Level] = ("network", "network")
    shards: int = 1

    @cached_property
    def timeline(self) -> Timeline:
        """The seconds and bytes that this takes."""
        return simulate(self.workload, self.plan)

    @cached_property
    def bound(self) -> float:
        """A lower bound: no plan takes fewer seconds."""
        return lower_bound(self.workload)

    @cached_property
    def collectives(self) -> list[Collective]:
        """The gathers and reduces in the order of their launches, all-reduces over replicas, those of norms."""
        units, timeline = {unit.name: unit for unit in self.workload.units}, self.timeline
        found, before = list[Collective](), 0.0  # when the link had finished all that was launched before
        for step, span in zip(self.plan.of("gather", "reduce"), timeline.link, strict=True):
            gathers = step.kind == "gather"
            size = sum(units[name].gathered if gathers else units[name].packed for name in step.units)
            limit = self._limit(step, span, size, queued=span.start <= before)
            found.append(self._single(span, "all-gather" if gathers else "reduce-scatter", size, limit))
            before = span.end
        for span in timeline.replicas:
            size = sum(units[name].packed for name in span.name.split(" ")[1:]) // self.shards
            at_the_end = span.end >= timeline.makespan * (1 - 1e-9)
            found.append(self._single(span, "all-reduce", size, "dependency" if at_the_end else "compute"))
        norms = (Collective(each.name, "all-reduce", self.levels[0], 4, each.seconds, each.seconds, "dependency")
                 for each in timeline.norms)  # fmt: skip
        return [*found, *norms]

    def _single(self, span: Span, kind: CollectiveKind, size: int, limit: str) -> Collective:
        exposed = self.timeline.exposed_of(span)
        hidden = exposed <= 1e-9 * self.timeline.makespan
        level = self.levels[kind == "all-reduce"]
        return Collective(span.name, kind, level, size, span.seconds, *(0.0, "") if hidden else (exposed, limit))

    def _limit(self, step: Step, span: Span, size: int, queued: bool) -> str:
        """What exposes a gather or a reduce, if it is exposed."""
        workload = self.workload
        start = workload.backward if step.at >= workload.backward else 0
        if step.at >= workload.forward:
            start = max(start, workload.forward)
        if queued and span.start > 0:
            return "link"
        if step.kind == "reduce":
            waited_for = next(each.at for each in self.plan.of("wait_reduce") if each.units == step.units)
            return "memory" if waited_for < (workload.end_of_backward or len(workload.tasks)) else "dependency"
        if step.at == start or step in prefetched(workload, self.plan):
            return "dependency"
        full = self.budget is not None and self.timeline.memory[step.at - 1] + size > self.budget
        return "memory" if full else "compute"

    def gathered_at(self, at: int) -> int:
        """Bytes of gathered buffers while task `at` runs."""
        sizes, alive = {unit.name: unit.gathered for unit in self.workload.units}, 0
        for step in self.plan.of("gather", "free"):
            if step.at <= at:
                alive += sum(sizes[name] for name in step.units) * (1 if step.kind == "gather" else -1)
        return alive

    def spans(self) -> Iterator["TimelineSpan"]:
        """What runs when; computing spans of one name that follow each other without a wait are one."""
        timeline, joined = self.timeline, list[list[Any]]()
        for span in timeline.compute:
            if joined and span.name == joined[-1][0] and span.start <= joined[-1][2] * (1 + 1e-12):
                joined[-1][2] = span.end
            else:
                joined.append([span.name, span.start, span.end])
        yield from (TimelineSpan("compute", *each) for each in joined)
        sent = [*timeline.link, *timeline.replicas, *timeline.norms]
        for span, single in zip(sent, self.collectives, strict=True):
            yield TimelineSpan(single.level, span.name, span.start, span.end, single.exposed)

    def memory_over_time(self, after: float, end: int, fragments: float) -> tuple[tuple[float, int], ...]:
        """(seconds, bytes) at each change; `after` seconds behind the step `end` bytes are alive."""
        makespan = self.timeline.makespan
        starts = [0.0, *(span.start for span in self.timeline.compute[1:]), makespan, makespan + after]
        sizes = [int((1 + fragments) * size) for size in (*self.timeline.memory, end)]
        points = [(0.0, -1), *zip(starts, sizes, strict=True)]
        return tuple(point for before, point in pairwise(points) if point[1] != before[1])


# --- predictions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """What one step takes, of a model in a setting.

    Attributes:
        model: its name.
        parameters: how many it has.
        setting: what was asked.
        forward: seconds in which forwards compute, over the whole step.
        backward: the same of backwards, with what they compute again.
        update: seconds of clipping and of the optimizer.
        exposed: seconds in which collectives run and nothing computes.
        step: seconds; the sum of these four.
        tokens_per_second: per GPU.
        mfu: the part of the peak that the model's own operations use: 6 for each parameter and token, and those of
            attention, not halved (Chowdhery et al.: PaLM, 2022, appendix B).
        hfu: the same with the operations of the forward that backward repeats; equal to `mfu` if it repeats none.
        collectives: by kind and level.
        top: the largest single collectives.
        memory: by part.
        timeline: the lanes of one forward and backward, and the update.
        memory_over_time: (seconds, bytes) at each change.
        alternatives: the setting with one thing changed, and combinations that fit.
        best: the one of these with the most tokens per second that fits; None if the setting itself is that.
        constants: what the prediction depends on.
        warnings: sentences about the setting.
    """

    model: str
    parameters: int
    setting: Setting
    forward: float
    backward: float
    update: float
    exposed: float
    step: float
    tokens_per_second: float
    mfu: float
    hfu: float
    collectives: tuple[CollectiveTime, ...]
    top: tuple[Collective, ...]
    memory: Memory
    timeline: tuple[TimelineSpan, ...] = ()
    memory_over_time: tuple[tuple[float, int], ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    best: Alternative | None = None
    constants: tuple[Constant, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the GPU's memory; None if that is not known."""
        return self.memory.fits

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, as JSON has them, with `format` and `fits`."""
        fields = asdict(self)
        fields["memory"]["fits"] = self.fits
        return {"format": FORMAT, "fits": self.fits, **fields}
