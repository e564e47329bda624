"""What collectives and computing cost in seconds: numbers in, numbers out, the same on every rank.

hardware    links and devices with their figures, each with where they come from
roofline    seconds of a collective by its bytes and ranks, and of computing by its operations and bytes
profile     measured seconds in place of estimated ones
"""

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_compile.core.text_files import read_json
from fsdp_compile.passes.plan.plan import PlanError
from fsdp_compile.passes.plan.workload import Task, Workload


@dataclass(frozen=True)
class Link:
    """What connects the ranks of one group.

    Attributes:
        name: as `link()` takes it.
        latency: seconds of a launch, whatever it moves and among however many ranks.
        bandwidth: bytes per second that one rank sends and at the same time receives.
        source: where the figures come from.
        hop: seconds that each step of a ring or tree adds to a launch.

    Raises:
        ValueError: a figure is no finite number, or below what it can be.
    """

    name: str
    latency: float
    bandwidth: float
    source: str
    hop: float = 0.0

    def __post_init__(self) -> None:
        _expect_finite(f"link {self.name}", {"latency": self.latency, "hop": self.hop})
        _expect_finite(f"link {self.name}", {"bandwidth": self.bandwidth}, above_zero=True)


@dataclass(frozen=True)
class Device:
    """What computes.

    Attributes:
        name: as `device()` takes it.
        flops: peak floating-point operations per second of matrix products, by the dtype's name.
        bandwidth: bytes per second between the device and its memory.
        memory: bytes of its memory; None: of the machine, whichever it is.
        source: where the figures come from.
        efficiency: the part of `flops` that large matrix products reach.

    Raises:
        ValueError: a figure is no finite number above 0.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: int | None
    source: str
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        figures = {f"flops of {dtype}": flops for dtype, flops in self.flops.items()}
        figures |= {"bandwidth": self.bandwidth, "efficiency": self.efficiency}
        figures |= {} if self.memory is None else {"memory": self.memory}
        _expect_finite(f"device {self.name}", figures, above_zero=True)


def _expect_finite(of: str, figures: Mapping[str, float], above_zero: bool = False) -> None:
    for name, value in figures.items():
        if not _is_finite(value) or (value == 0 and above_zero):
            least = "above" if above_zero else "of at least"
            raise ValueError(f"{of}, {name}: expected a finite number {least} 0, found {value!r}")


def _is_finite(value: object) -> bool:
    """Whether `value` is a finite int or float of at least 0. A bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


_NCCL = "NCCL 2.27: tuning.cc (ring, Simple: 8.4 us, 3.4 us a step by NVLink, 14 us by network), topo.h "
_MATMUL = "; efficiency: the largest measured matrix product, stas00/ml-engineering, compute/accelerator"
_NODE_HOP = (7 * 3.4e-6 + 14e-6) / 8  # of a ring over nodes of 8: seven steps within one, one to the next

LINKS = {
    each.name: each
    for each in (
        Link("h100-nvlink", 8.4e-6, 18 * 20.6e9, _NCCL + "(18 links of 20.6 GB/s)", hop=3.4e-6),
        Link("a100-nvlink", 8.4e-6, 12 * 20e9, _NCCL + "(12 links of 20 GB/s)", hop=3.4e-6),
        Link("h200", 8.4e-6, 18 * 20.6e9, _NCCL + "(18 links of 20.6 GB/s, as H100)", hop=3.4e-6),
        Link(
            "h100-ib400",
            8.4e-6,
            18 * 20.6e9,
            _NCCL + "; nodes of 8 with an adapter of 400 Gb/s each: 8 x 48.5 GB/s carry the rings from node to node "
            "(48.5: SimAI, calbusbw.h), so the 18 links within a node limit them",
            hop=_NODE_HOP,
        ),
        Link(
            "h100-ib400-single",
            8.4e-6,
            48.5e9,
            _NCCL + "; one rank of a node, one adapter of 400 Gb/s: 48.5 GB/s (SimAI, calbusbw.h)",
            hop=14e-6,
        ),
        Link(
            "cpu-gloo",
            100e-6,
            1e9,
            "two processes of one machine, gathers of 4 KB and 16 MB: a rough figure",
        ),
    )
}

DEVICES = {
    each.name: each
    for each in (
        Device(
            "h100",
            {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12},
            3.35e12,
            80 * 10**9,
            "NVIDIA H100 SXM data sheet, without sparsity" + _MATMUL,
            efficiency=0.80,
        ),
        Device(
            "a100",
            {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
            2.039e12,
            80 * 10**9,
            "NVIDIA A100 80 GB SXM data sheet, without sparsity" + _MATMUL,
            efficiency=0.86,
        ),
        Device(
            "h200",
            {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12},
            4.8e12,
            141 * 10**9,
            "NVIDIA H200 SXM data sheet, without sparsity" + _MATMUL,
            efficiency=0.80,
        ),
        Device(
            "cpu",
            {"float32": 70e9, "bfloat16": 1.2e12, "float64": 35e9},
            6e9,
            None,
            "one thread of a Xeon with AMX, torch.mm of 1024 x 1024 and a copy of 128 MiB: an order of magnitude only; "
            "a profile knows better",
        ),
    )
}


def link(text: "str | Link") -> Link:
    """A link by its name in `LINKS`, or `custom:<latency in s>,<bandwidth in bytes/s>`.

    Raises:
        ValueError: neither of them.
    """
    if isinstance(text, Link):
        return text
    if text.startswith("custom:"):
        return _custom(text)
    if text not in LINKS:
        raise ValueError(f"link: expected one of {', '.join(LINKS)} or custom:LATENCY,BANDWIDTH (seconds, bytes per "
                         f"second), found {text!r}")  # fmt: skip
    return LINKS[text]


def _custom(text: str) -> Link:
    try:
        latency, bandwidth = map(float, text.removeprefix("custom:").split(","))
    except ValueError:
        latency, bandwidth = -1.0, 0.0
    if not (0 <= latency < math.inf and 0 < bandwidth < math.inf):
        raise ValueError(f"link: expected custom:LATENCY,BANDWIDTH in seconds and bytes per second, as in "
                         f"custom:2e-5,1e9, found {text!r}")  # fmt: skip
    return Link(text, latency, bandwidth, "the caller")


def device(text: "str | Device") -> Device:
    """A device by its name in `DEVICES`. ValueError if there is none of that name."""
    if isinstance(text, Device):
        return text
    if text not in DEVICES:
        raise ValueError(f"device: expected one of {', '.join(DEVICES)}, found {text!r}")
    return DEVICES[text]


# --- roofline: nothing here asks a device or another rank -------------------------------------------------------------


def launch_seconds(world: int, link: Link) -> float:
    """What an all-gather or reduce-scatter among `world` ranks takes beside its bytes: `Workload.latency`.

    A ring makes `world - 1` steps.
    """
    return link.latency + link.hop * (world - 1)


def transfer_seconds(full_bytes: float, world: int, link: Link) -> float:
    """What the bytes of an all-gather or reduce-scatter take: `UnitCost.gather` and `.reduce`.

    Each rank receives all but its own part, `full_bytes * (world - 1) / world`, whichever the algorithm (Chan,
    Heimlich, Purkayastha, van de Geijn: Collective communication, 2007, section 4; NCCL's rings reach it).
    """
    return full_bytes * (world - 1) / world / link.bandwidth


def all_reduce_seconds(full_bytes: float, world: int, link: Link) -> float:
    """Seconds of one all-reduce of `full_bytes`, among `world` ranks: by ring or by tree, whichever is shorter.

    A ring is a reduce-scatter and an all-gather. A double binary tree goes up and down, `2 log2(world)` steps, and
    moves all bytes twice (Sanders, Speck, Traff: Two-tree algorithms, 2009). NCCL chooses between the two likewise.
    """
    ring = link.latency + link.hop * 2 * (world - 1) + 2 * transfer_seconds(full_bytes, world, link)
    tree = link.latency + link.hop * 2 * (world - 1).bit_length() + 2 * full_bytes / link.bandwidth
    return min(ring, tree)


def compute_seconds(flops: float, moved_bytes: float, dtype: str, device: Device) -> float:
    """Roofline: the longer of computing `flops` in `dtype` and of moving bytes from and to memory.

    (Williams, Waterman, Patterson: Roofline, 2009.)

    Raises:
        ValueError: there is something to compute and the device's table has no figure for `dtype`.
    """
    moving = moved_bytes / device.bandwidth
    if not flops:
        return moving
    if dtype not in device.flops:
        known = ", ".join(device.flops)
        raise ValueError(f"dtype: expected one that device {device.name} has a figure for ({known}), found {dtype}")
    return max(flops / (device.flops[dtype] * device.efficiency), moving)


# --- profile ----------------------------------------------------------------------------------------------------------

# What post_grad/plan_pass.py recorded, for another graph: seconds by stretch, that is all that computes from one
# matrix product to the next. A plan cuts stretches into tasks, and other plans cut them elsewhere, but none makes other
# stretches: what was measured under one plan serves another. The tasks of a stretch share its seconds in proportion to
# their estimates.

Profile = dict[str, list[float]]  # by `graph_name`, the seconds of each stretch
MOST_SECONDS = 1_000_000  # of a stretch: twelve days, so that no sum overflows
_GRAPH_NAME = re.compile(r"(?:forward|backward|inference) of ([0-9]{1,9}) products")


def graph_name(direction: str, stretches: Sequence[int]) -> str:
    """What profiles call a graph: its direction, and how many matrix products begin a stretch of it."""
    return f"{direction} of {max(stretches, default=0)} products"


def with_profile(workload: Workload, stretches: Sequence[int], direction: str, path: str) -> Workload:
    """`workload`, of a graph in one direction, with the seconds that were measured.

    Args:
        workload: the graph's, with estimated seconds.
        stretches: the stretch of each task: 0 before the first matrix product, each product begins one.
        direction: "forward" or "backward".
        path: of the profile.

    Raises:
        PlanError: the profile is none, or lacks a graph of this direction and as many products.
    """
    profile, name = _load(path), graph_name(direction, stretches)
    if name not in profile:
        raise _not_measured(path, repr(name), profile)
    return replace(workload, tasks=tuple(_share(workload.tasks, stretches, profile[name])))


def step_with_profile(workload: Workload, stretches: Sequence[int], path: str) -> Workload:
    """`workload`, of a whole step, with the seconds that were measured in each direction.

    Matrix products that backward repeats are not in the graph of the step before it is split in two. Where the
    numbers of products differ, the whole direction is one stretch, as measured in the graph whose number is nearest.

    Raises:
        PlanError: the profile is none, or lacks a direction.
    """
    profile, split, tasks = _load(path), workload.backward, list[Task]()
    before = stretches[split - 1] if split else 0
    for direction, part, numbers in (
        ("forward", workload.tasks[:split], list(stretches[:split])),
        ("backward", workload.tasks[split:], [each - before for each in stretches[split:]]),
    ):
        graphs = [seconds for name, seconds in profile.items() if name.startswith(direction)]
        if not graphs:
            raise _not_measured(path, f"a {direction}", profile)
        expected = max(numbers, default=0) + 1
        seconds = min(graphs, key=lambda each: abs(len(each) - expected))
        if len(seconds) != expected:
            numbers, seconds = [0] * len(numbers), [sum(seconds)]
        tasks += _share(part, numbers, seconds)
    return replace(workload, tasks=tuple(tasks))


def _share(tasks: Sequence[Task], stretches: Sequence[int], seconds: Sequence[float]) -> list[Task]:
    """`tasks` with the seconds of their stretches, in proportion to what each had; equally where none had any."""
    estimated, count = [0.0] * len(seconds), [0] * len(seconds)
    for task, stretch in zip(tasks, stretches, strict=True):
        estimated[stretch] += task.seconds
        count[stretch] += 1
    return [
        replace(
            task,
            seconds=seconds[stretch]
            * (task.seconds / estimated[stretch] if estimated[stretch] else 1 / count[stretch]),
        )
        for task, stretch in zip(tasks, stretches, strict=True)
    ]


def _load(path: str) -> Profile:
    """The profile in a file that anybody may have written."""
    try:
        table = read_json(Path(path))
    except ValueError as error:
        raise PlanError(f"profile: expected {path} to be JSON as TaskProfile.save writes it, found {error}") from None
    if type(table) is not dict:
        raise PlanError(f"profile: expected {path} to be an object of seconds by graph, found {reprlib.repr(table)}")
    for name, seconds in table.items():
        where, graph = f"profile: {path}, {reprlib.repr(name)}", _GRAPH_NAME.fullmatch(name)
        if graph is None:
            raise PlanError(f"{where}: expected the name of a graph, such as 'forward of 10 products', found another")
        if type(seconds) is not list or len(seconds) != int(graph[1]) + 1:
            raise PlanError(f"{where}: expected a list of {int(graph[1]) + 1} seconds, one more than products, found "
                            f"{reprlib.repr(seconds)}")  # fmt: skip
        for stretch, each in enumerate(seconds):
            if not _is_finite(each) or each > MOST_SECONDS:
                raise PlanError(f"{where}, number {stretch} of its list: expected seconds from 0 to {MOST_SECONDS:,}, "
                                f"found {reprlib.repr(each)}")  # fmt: skip
    return {name: list(map(float, seconds)) for name, seconds in table.items()}


def _not_measured(path: str, expected: str, profile: Profile) -> PlanError:
    return PlanError(f"profile: expected {path} to have {expected}, found {', '.join(profile) or 'nothing'}; measure "
                     "this model with these inputs again")  # fmt: skip
