"""What is asked of a prediction, and what it says: plain data, without torch.

    Setting      the cluster, the batch and the options that a step is predicted for
    Prediction   what a step takes there: seconds by part, memory by part, what else could be chosen

Seconds, bytes and tokens are per rank. `to_dict` of both is what the JSON of the command line holds.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

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
class TopCollective:
    """A single collective.

    Attributes:
        name: what it does for which unit, such as "gather blocks.0".
        kind: as in `CollectiveTime`.
        level: as in `CollectiveTime`.
        bytes: its full size.
        seconds: how long it occupies the links.
        exposed: the seconds of these in which nothing computes.
        limit: what exposes it. "dependency": nothing can compute before it, or after it; "compute": what computes
            beside it is too short. Empty if nothing does.
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
    top: tuple[TopCollective, ...]
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
