"""What is asked of a prediction and what it says: plain data, without torch.

    Setting      the cluster, the batch and the options that a step is predicted for
    Prediction   seconds by part, memory by part, and what else could be chosen

Seconds, bytes and tokens are per rank.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from os import PathLike
from typing import Any, Literal

from fsdp_compile.config import check_type
from fsdp_compile.passes.cost.hardware import Hardware, Origin, device
from fsdp_compile.passes.cost.roofline import Level

FORMAT = 2
"""Version of the JSON; a field that changes its meaning increases it."""

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce"]
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
PRECISIONS = ("fp32", "bf16", "fp16", "amp_bf16", "amp_fp16", "fp8")
OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "muon", "none")
RUNTIMES = ("fsdp_compile", "fsdp2")
WIRE_FORMATS = ("bf16", "fp8", "int8")  # those of `fsdp_compile.Wire`
USUAL = "h100-80"  # hardware, where none is named

_LEAST = {"world_size": 1, "batch": 1, "sequence": 1, "accumulation": 1, "keep": 0, "ranks_per_node": 1,
          "shard_size": 1}  # fmt: skip


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
        optimizer: "adamw" and "adam" store two float32 values per parameter, "momentum" one, "sgd" none; "muon" one,
            and `Prediction.matrices` has what it computes and exchanges behind the step; "none" is no update.
        clip: whether gradients are clipped to a norm.
        hardware: name of a hardware file that the package has, or the path of another one.
        ranks_per_node: ranks that the fast links connect; None: as the hardware file says.
        shard_size: ranks that store one copy of the parameters under a hybrid strategy; None: those of a node.
        compiled: whether the step runs compiled, with fused chains, or eagerly, one kernel for each operator.
        runtime: "fsdp_compile", this package, whose compiled graphs contain the collectives; or "fsdp2", which issues
            them between blocks, compiled or not.
        network: name of the link between nodes, or `custom:LATENCY,BANDWIDTH` for each rank; None: as the hardware
            file says.
        keep: blocks that are not resharded after forward, counted from the last one, where the strategy reshards.
        reduce_dtype: in which dtype gradients are reduced; None: as they are gathered.
        wire_gather: the format in which parameters are sent, as in `Wire`; None: in full.
        wire_reduce: the same of gradients.

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
    network: str | None = None
    keep: int = 0
    reduce_dtype: str | None = None
    wire_gather: str | None = None
    wire_reduce: str | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in ("ranks_per_node", "shard_size"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: expected a whole number of at least {least}, found {value!r}")
        for name, known in (
            ("strategy", STRATEGIES),
            ("precision", PRECISIONS),
            ("optimizer", OPTIMIZERS),
            ("runtime", RUNTIMES),
            ("reduce_dtype", (None, "float32", "bfloat16", "float16")),
            ("wire_gather", (None, *WIRE_FORMATS) if self.runtime == "fsdp_compile" else (None,)),
            ("wire_reduce", (None, *WIRE_FORMATS) if self.runtime == "fsdp_compile" else (None,)),
            ("clip", (True, False)),
            ("compiled", (True, False)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(map(str, known))}, found {getattr(self, name)!r}")
        if not re.fullmatch("none|full|selective (op|0*[1-9][0-9]*)", str(self.checkpointing)):
            raise ValueError(f"checkpointing: expected one of none, full, selective op or 'selective N', found "
                             f"{self.checkpointing!r}")  # fmt: skip
        if not isinstance(self.network, str | None):
            raise ValueError(f"network: expected the name of a link or None, found {self.network!r}")
        if self.shard_size is not None and self.world_size % self.shard_size:
            raise ValueError(f"shard_size: expected a divisor of world_size {self.world_size}, found {self.shard_size}")

    @property
    def compiles_loss(self) -> bool:
        """Whether what is outside of blocks is compiled too: not with FSDP2, where each block is compiled alone."""
        return self.compiled and self.runtime == "fsdp_compile"


# --- what a prediction says -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """A single launch.

    Attributes:
        name: "gather", "reduce" or "replicate", and the units that it serves.
        kind: what it does.
        level: "network" if ranks of several nodes take part, otherwise "node".
        bytes: size of the gathered buffers, or of the inputs of the reduction.
        seconds: how long it occupies the links.
        exposed: the seconds of these in which nothing computes.
        limit: why they are exposed; empty if none are. "dependency": nothing can compute before it, or the last
            gradient comes late. "link": it queued behind another collective. "memory": the budget did not let it start
            earlier, or made something wait for it. "compute": what computes beside it is too short.
        format: in which its values are sent; empty: in full. Of a launch of several units all of theirs.
        sent: bytes of the same buffers in that format.
    """

    name: str
    kind: CollectiveKind
    level: Level
    bytes: int
    seconds: float
    exposed: float
    limit: str
    format: str
    sent: int


@dataclass(frozen=True)
class CollectiveTime:
    """All collectives of one kind at one level of the cluster: how many are launched in a step, and their sums."""

    kind: CollectiveKind
    level: Level
    count: int
    bytes: int
    seconds: float
    exposed: float


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
    """A number that the prediction depends on: its field in the hardware file, its unit ("" of a ratio), its source."""

    name: str
    value: float
    unit: str
    origin: Origin
    source: str


@dataclass(frozen=True)
class TimelineSpan:
    """What runs from `start` to `end`, in seconds from the beginning of the step: a task, or a collective on its links.

    Of a collective `exposed` are the seconds in which nothing computes.
    """

    lane: Literal["compute", "node", "network"]
    name: str
    start: float
    end: float
    exposed: float = 0.0


@dataclass(frozen=True)
class Alternative:
    """Another setting, what is different in words, and what the step takes with it: as in `Prediction` and `Memory`."""

    change: str
    setting: Setting
    step: float
    tokens_per_second: float
    peak: int
    fits: bool | None


@dataclass(frozen=True)
class MatrixTimes:
    """The part of a step that computes with complete matrices, as of Muon.

    Attributes:
        owners: in words, how many matrices there are, and how they are dealt to ranks.
        compute: seconds of Newton-Schulz, or what the optimizer computes, of the slowest rank.
        exchange: seconds of the exchanges to owners, and as many of those from owners.
        bytes: the most that a rank sends or receives in each of the two.
        exposed: seconds that all of it takes beyond `compute`, if no other updates run beside the first exchange.
        waits: seconds in which the rank that computes least waits, for exchanges and for others.
        waiting: that rank.
        gathered: seconds of computing if each rank computed all matrices.
    """

    owners: str
    compute: float
    exchange: float
    bytes: float
    exposed: float
    waits: float
    waiting: int
    gathered: float

    def lines(self) -> Iterator[str]:
        """What a report shows."""
        yield self.owners
        yield f"compute   {1e3 * self.compute:.2f} ms; if each rank computed all: {1e3 * self.gathered:.2f} ms"
        mebibytes, exposed, waits = self.bytes / 2**20, 1e3 * self.exposed, 1e3 * self.waits
        yield f"exchange  {1e3 * self.exchange:.2f} ms each way, at most {mebibytes:.1f} MiB of a rank"
        yield f"exposed   {exposed:.2f} ms; rank {self.waiting} waits longest, {waits:.2f} ms with that for others"

    def __str__(self) -> str:
        return "\n".join(self.lines())


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
        tokens_per_second: per GPU; sequences where the model has no tokens.
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
        matrices: what Muon computes with complete matrices behind the step, for each group of ranks; no part of `step`.
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
    matrices: tuple[MatrixTimes, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the GPU's memory; None if that is not known."""
        return self.memory.fits


# --- options: nothing here imports torch, so that a command refuses them at once --------------------------------------


def settings_of(chosen: Mapping[str, Any], hardware: Hardware) -> list[Setting]:
    """One for each combination; `chosen` has a value or several for each field. ValueError or TypeError if one has
    none, or a field does not exist."""
    names = [each.name for each in fields(Setting)]
    several = []
    for option, value in chosen.items():
        if option not in names:
            raise TypeError(f"{option}: expected one of {', '.join(names)}, found another option")
        several.append(value if isinstance(value, Sequence) and not isinstance(value, str) else [value])
        if not several[-1]:
            raise ValueError(f"{option}: expected at least one value, found none")
    made = (dict(zip(chosen, values, strict=True)) for values in product(*several))
    return [Setting(**each, hardware=hardware.name) for each in made]


def hardware_of(hardware: str | PathLike[str] | Hardware | None) -> Hardware:
    """Look up hardware by its name or the path of its file. ValueError if there is none, or it is no hardware file."""
    check_type("hardware", hardware, str | PathLike | Hardware | None)
    return hardware if isinstance(hardware, Hardware) else device(str(hardware or USUAL), "hardware")
