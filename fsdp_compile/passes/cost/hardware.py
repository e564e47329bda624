"""Links and devices with their figures, each with where the figures come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """What connects the ranks of one group.

    Attributes:
        name: as `link()` takes it.
        latency: seconds of a launch, whatever it moves and among however many ranks.
        bandwidth: bytes per second that one rank sends and at the same time receives.
        source: where the figures come from.
        hop: seconds that each step of a ring or tree adds to a launch.
    """

    name: str
    latency: float
    bandwidth: float
    source: str
    hop: float = 0.0


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
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: int | None
    source: str
    efficiency: float = 1.0


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
    if not (0 <= latency < float("inf") and bandwidth > 0):
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
