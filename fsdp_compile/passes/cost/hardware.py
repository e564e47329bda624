"""Devices and links, and the hardware files that describe them.

A hardware file is JSON. `data/` has one for each known GPU, and `links.json` for the links between GPUs;
`fsdp-compile calibrate` writes one for this machine. Each number has an origin ("measured", "fitted", "assumed", "data
sheet") and a source. Planner, `reshard="auto"` and predictions read the same files.
"""

import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fsdp_compile.config import MEASURED, read_json

FORMAT = 1
Origin = Literal["measured", "fitted", "assumed", "data sheet"]
ORIGINS = get_args(Origin)
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Source:
    """How a number is known, and where it comes from."""

    origin: Origin
    source: str


_UNKNOWN = Source("assumed", "no source is given")


class Protocol(NamedTuple):
    """How a library sends small messages: it waits less for each one, and reaches less bandwidth.

    Attributes:
        latency: seconds of a launch.
        hop: seconds of each step over this link.
        inside: seconds of each step within a node.
        part: of the bandwidths of links.
        most: bytes per second of all ranks of a node at most.
    """

    latency: float
    hop: float
    inside: float
    part: float
    most: float


@dataclass(frozen=True)
class Link:
    """The connection between the ranks of one group. Note [How collectives are priced] says how it is used.

    Attributes:
        name: as `link()` takes it.
        latency: seconds of a launch, whatever it moves and among however many ranks.
        bandwidth: bytes per second that one rank sends and at the same time receives.
        source: where the figures come from.
        hop: seconds that each step of a ring or tree adds to a launch.
        origin: how the figures are known.
        protocols: those for small messages; the other figures are of the one for large messages.
        ramp: (bytes that each rank has, the part of the bandwidth that is reached with them), in order; none: all.
        inside: the link within nodes, of one between nodes; None: it connects all ranks alike.
        ranks_per_node: the ranks of one node; None: those of the device.

    Raises:
        ValueError: a figure is not a finite number, or is out of range.
    """

    name: str
    latency: float
    bandwidth: float
    source: str
    hop: float = 0.0
    origin: Origin = "assumed"
    protocols: tuple[Protocol, ...] = ()
    ramp: tuple[tuple[float, float], ...] = ()
    inside: "Link | None" = None
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        where, figures = f"link {self.name}", {name: value for name, value, _ in self.figures()}
        expect_finite(where, {name: value for name, value in figures.items() if not name.endswith(_ABOVE_ZERO)})
        expect_finite(where, {name: value for name, value in figures.items() if name.endswith(_ABOVE_ZERO)}, True)
        sizes, parts = [size for size, _ in self.ramp], [part for _, part in self.ramp]
        if sizes != sorted({*sizes}) or any(part > 1 for part in parts):
            raise ValueError(
                f"{where}, ramp: expected pairs of increasing bytes and of parts up to 1, found {self.ramp}"
            )

    def figures(self) -> Iterator[tuple[str, float, str]]:
        """Name, value and unit of each number."""
        for name, unit in _LINK_UNITS.items():
            yield name, getattr(self, name), unit
        for count, protocol in enumerate(self.protocols, 1):
            for name, unit in _PROTOCOL_UNITS.items():
                yield f"protocol {count}.{name}", getattr(protocol, name), unit
        for count, (size, part) in enumerate(self.ramp, 1):
            yield f"ramp {count}.bytes", size, "bytes"
            yield f"ramp {count}.part", part, ""


@dataclass(frozen=True)
class Hardware:
    """A device, its links, and how much of the data sheet's figures programs reach.

    Attributes:
        name: as `device()` takes it.
        peak: floating-point operations per second of matrix products, by the dtype's name; "float8" among them.
        bandwidth: bytes per second between the device and its memory.
        memory: bytes that programs can use; None: the memory of the machine.
        node: link between the ranks of one node.
        network: link between nodes, for each rank.
        ranks_per_node: ranks of a node.
        product_efficiency: fraction of the peak that large matrix products reach.
        product_ramp: elements of the inner dimension that a product's beginning and end count as.
        float8_efficiency: the same for products in float8, relative to `product_efficiency`.
        attention_efficiency: fraction of the peak that the forward of attention reaches on long sequences.
        attention_backward: how much less efficient its backward is: a ratio.
        attention_ramp: tokens of the sequence that attention's beginning and end count as.
        chain_efficiency: fraction of the bandwidth that fused chains reach.
        eager_efficiency: the same for eager kernels, by the bytes that their operators have to move.
        update_efficiency: the same for the optimizer's update.
        kernel_seconds: the least time of a kernel.
        layer_seconds: time of a block beside its kernels, in each direction.
        step_seconds: time of a step beside its blocks.
        contention: seconds that computing loses for each second in which a collective runs beside it.
        fragments: bytes that the allocator holds beside those that are alive, as a fraction of these.
        sources: origin and source of each of these, by name.

    Raises:
        ValueError: a figure is not a finite number, or is out of range; the message names it.
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: int | None
    node: Link
    network: Link
    ranks_per_node: int = 8
    product_efficiency: float = 1.0
    product_ramp: float = 0.0
    float8_efficiency: float = 0.7
    attention_efficiency: float = 1.0
    attention_backward: float = 1.0
    attention_ramp: float = 0.0
    chain_efficiency: float = 1.0
    eager_efficiency: float = 1.0
    update_efficiency: float = 1.0
    kernel_seconds: float = 0.0
    layer_seconds: float = 0.0
    step_seconds: float = 0.0
    contention: float = 0.0
    fragments: float = 0.0
    sources: Mapping[str, Source] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        where = f"hardware {self.name}"
        expect_finite(where, {f"peak of {dtype}": flops for dtype, flops in self.peak.items()}, above_zero=True)
        for name in UNITS:
            value = getattr(self, name)
            if value is not None or name != "memory":
                expect_finite(where, {name: value}, above_zero=name not in _MAY_BE_ZERO)
        if self.ranks_per_node != int(self.ranks_per_node):
            raise ValueError(f"{where}, ranks_per_node: expected a whole number, found {self.ranks_per_node!r}")

    def figures(self) -> Iterator[tuple[str, float, str, Source]]:
        """Name, value, unit and source of each number."""
        for dtype, value in self.peak.items():
            yield f"peak.{dtype}", value, "flop/s", self.sources.get("peak", _UNKNOWN)
        for name, unit in UNITS.items():
            if getattr(self, name) is not None:
                yield name, getattr(self, name), unit, self.sources.get(name, _UNKNOWN)
        for level, each in (("node", self.node), ("network", self.network)):
            for name, value, unit in each.figures():
                yield f"{level}.{name}", value, unit, Source(each.origin, each.source)

    def connect(self, ranks_per_node: int) -> Link:
        """The link of a group that has so many ranks on each of its nodes."""
        return replace(self.network, inside=self.node, ranks_per_node=ranks_per_node)


UNITS = {
    "bandwidth": "bytes/s",
    "memory": "bytes",
    "ranks_per_node": "ranks",
    "product_efficiency": "",
    "product_ramp": "elements",
    "float8_efficiency": "",
    "attention_efficiency": "",
    "attention_backward": "",
    "attention_ramp": "tokens",
    "chain_efficiency": "",
    "eager_efficiency": "",
    "update_efficiency": "",
    "kernel_seconds": "s",
    "layer_seconds": "s",
    "step_seconds": "s",
    "contention": "",
    "fragments": "",
}
_LINK_UNITS = {"latency": "s", "hop": "s", "bandwidth": "bytes/s"}
_PROTOCOL_UNITS = {"latency": "s", "hop": "s", "inside": "s", "part": "", "most": "bytes/s"}
_ABOVE_ZERO = ("bandwidth", "part", "most", "bytes")
_MAY_BE_ZERO = ("product_ramp", "attention_ramp", "kernel_seconds", "layer_seconds", "step_seconds", "contention",
                "fragments")  # fmt: skip


def expect_finite(of: str, figures: Mapping[str, float], above_zero: bool = False) -> None:
    """Raise ValueError, naming the figure, unless all are finite numbers of at least 0, or above it."""
    for name, value in figures.items():
        if not is_finite(value) or (value == 0 and above_zero):
            least = "above" if above_zero else "of at least"
            raise ValueError(f"{of}, {name}: expected a finite number {least} 0, found {reprlib.repr(value)}")


def is_finite(value: object) -> bool:
    """Whether `value` is a finite int or float of at least 0, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


# --- files ------------------------------------------------------------------------------------------------------------


def link(text: "str | Link", what: str = "link", group: str | None = None) -> Link:
    """Return a link by its name in `data/links.json`, or by `custom:<latency in s>,<bandwidth in bytes/s>`.

    `measured:<group>=<latency>,<bandwidth>;...` has figures for each group.

    Args:
        text: the name.
        what: the name of the argument, for errors.
        group: the name of a group; None: the first one, as for texts that name no group.

    Raises:
        ValueError: `text` is none of them, or has no figures for `group`.
    """
    if isinstance(text, Link):
        return text
    if text.startswith(("custom:", MEASURED)):
        made: dict[str, Link] = {}
        source = Source("measured", "its ranks") if text.startswith(MEASURED) else Source("assumed", "the caller")
        try:
            for each in text.partition(":")[2].split(";"):
                name, _, figures = each.rpartition("=")
                latency, bandwidth = map(float, figures.split(","))
                made[name] = Link(text, latency, bandwidth, source.source, origin=source.origin)
        except ValueError:
            raise ValueError(f"{what}: expected custom:LATENCY,BANDWIDTH in seconds and bytes per second, as in "
                             f"custom:2e-5,1e9, found {text!r}") from None  # fmt: skip
        if group is not None and group not in made and "" not in made:
            raise ValueError(f"{what}: expected figures for group {group}, found those for {', '.join(made)}")
        return made.get(group or "", next(iter(made.values())))
    if text not in links():
        raise ValueError(f"{what}: expected one of {', '.join(links())} or custom:LATENCY,BANDWIDTH (seconds, bytes "
                         f"per second), found {text!r}")  # fmt: skip
    return links()[text]


def measured_text(figures: Mapping[str, tuple[float, float]]) -> str:
    """The text by which `link` finds latency and bandwidth of each group, by its name."""
    several = (f"{name}={latency:g},{bandwidth:g}" for name, (latency, bandwidth) in figures.items())
    return MEASURED + ";".join(several)


@cache
def links() -> dict[str, Link]:
    """The links that the package knows, by name."""
    table = _table(DATA / "links.json")["links"]
    made = {name: _link(name, each) for name, each in table.items() if "like" not in each}
    for name, each in table.items():
        if "like" in each:
            base, figures = made[each["like"]], {key: each[key] for key in each.keys() - {"like", "inside", "source"}}
            source, inside = f"{each['source']}; {base.name}: {base.source}", made.get(each.get("inside"))
            made[name] = replace(base, name=name, source=source, inside=inside, **figures)
    return {name: made[name] for name in table}


def device(text: "str | Hardware", what: str = "device") -> Hardware:
    """Return a device by the name of a file in `data/`, or by the path of a hardware file.

    "h100" and "a100" are the variants with 80 GB. `<name>:<speed>`, such as "cpu:0.7", is so many times as fast.

    Raises:
        ValueError: there is no device of that name, or the file is no hardware file.
    """
    if isinstance(text, Hardware):
        return text
    name, _, speed = text.partition(":")
    name = f"{name}-80" if name in ("h100", "a100") else name
    if name in devices() and not speed:
        return devices()[name]
    if name in devices():
        try:
            return _scaled(devices()[name], float(speed))
        except ValueError:
            raise ValueError(f"{what}: expected a speed above 0 behind {name}:, found {speed!r}") from None
    if text.endswith(".json"):
        return read_hardware(Path(text))
    raise ValueError(f"{what}: expected one of {', '.join(devices())} or a file of JSON, found {text!r}")


def _scaled(hardware: Hardware, speed: float) -> Hardware:
    """A device that does all in `1 / speed` of the time; its links stay. ValueError if that is no number above 0."""
    expect_finite("speed", {"": speed}, above_zero=True)
    shorter = {name: getattr(hardware, name) / speed for name in ("kernel_seconds", "layer_seconds", "step_seconds")}
    peak = {dtype: flops * speed for dtype, flops in hardware.peak.items()}
    bandwidth, source = hardware.bandwidth * speed, Source("measured", "a product and a copy")
    return with_figures(hardware, source, peak=peak, bandwidth=bandwidth, **shorter)


@cache
def devices() -> dict[str, Hardware]:
    """The devices that the package has a file for, by name."""
    paths = sorted(path for path in DATA.glob("*.json") if path.name != "links.json")
    return {path.stem: read_hardware(path) for path in paths}


def reported_device(name: str, memory: int) -> Hardware:
    """Return the device that reports `name`, such as "NVIDIA H100 80GB HBM3" or "cpu", and so many bytes of memory.

    If several files match the name, the one whose memory is nearest.

    Raises:
        ValueError: no file matches.
    """
    words = set(re.split("[^a-z0-9]+", name.lower()))
    named = [each for key, each in devices().items() if key.partition("-")[0] in words]
    if not named:
        raise ValueError(f"device: expected one of {', '.join(devices())} or a file of JSON to be named, as there is "
                         f"none for {name!r}")  # fmt: skip
    return min(named, key=lambda each: abs((each.memory or 0) - memory))


def read_hardware(path: Path) -> Hardware:
    """Read a hardware file, which anybody may have written.

    Raises:
        ValueError: the file cannot be read, has another version, lacks a field or has an unknown one, or a number is
            not finite or out of range; the message names the field.
    """
    table = _table(path)
    try:
        optional = {each.name for each in fields(Hardware)} - {"sources"} | {"host_bandwidth"}  # which older files have
        _expect_fields("", table, {"format", "name", "peak", "bandwidth", "memory", "node", "network"}, optional)
        if type(table["name"]) is not str:
            raise ValueError(f"name: expected text, found {reprlib.repr(table['name'])}")
        values: dict[str, Any] = {"name": table["name"]}
        sources: dict[str, Source] = {}
        for name in ["peak", *(name for name in UNITS if name in table)]:
            _expect_fields(f"{name}, ", table[name], {"value", "origin", "source"})
            values[name], sources[name] = table[name]["value"], _source(name, table[name])
        if type(values["peak"]) is not dict:
            raise ValueError(f"peak: expected an object of numbers, found {reprlib.repr(values['peak'])}")
        for level in ("node", "network"):
            values[level] = link(table[level]) if isinstance(table[level], str) else _link(level, table[level])
        return Hardware(**values, sources=sources)
    except ValueError as error:
        raise ValueError(f"hardware file {path.name}: {error}") from None


def _table(path: Path) -> dict[str, Any]:
    """The JSON object in a file of this format."""
    try:
        table = read_json(path)
    except ValueError as error:
        raise ValueError(f"hardware file {path.name}: expected JSON, found {error}") from None
    if type(table) is not dict or table.get("format") != FORMAT or isinstance(table.get("format"), bool):
        given = table.get("format") if type(table) is dict else table
        raise ValueError(f"hardware file {path.name}, format: expected {FORMAT}, found {reprlib.repr(given)}")
    return table


def _expect_fields(where: str, table: Any, required: Set[str], optional: Set[str] = frozenset()) -> None:
    if type(table) is not dict:
        raise ValueError(f"{where}expected an object, found {reprlib.repr(table)}")
    if missing := sorted(required - table.keys()):
        raise ValueError(f"{where}{missing[0]}: this field is missing")
    if unknown := sorted(table.keys() - required - optional):
        raise ValueError(f"{where}expected fields among {', '.join(sorted(required | optional))}, found {unknown[0]!r}")


def _source(where: str, given: dict[str, Any]) -> Source:
    origin, source = given["origin"], given["source"]
    if origin not in ORIGINS or type(source) is not str or not source:
        raise ValueError(f"{where}: expected an origin ({', '.join(ORIGINS)}) and a source in words, found "
                         f"{reprlib.repr(origin)} and {reprlib.repr(source)}")  # fmt: skip
    return Source(origin, source)


def _link(name: str, given: Any) -> Link:
    _expect_fields(f"{name}, ", given, {"latency", "bandwidth", "origin", "source"}, {"hop", "protocols", "ramp"})
    source, protocols, ramp = _source(name, given), given.get("protocols", []), given.get("ramp", [])
    for key, several in ("protocols", protocols), ("ramp", ramp):
        if type(several) is not list:
            raise ValueError(f"{name}, {key}: expected a list, found {reprlib.repr(several)}")
    for each in protocols:
        _expect_fields(f"{name}, protocols, ", each, _PROTOCOL_UNITS.keys())
    for each in ramp:
        if type(each) is not list or len(each) != 2:
            raise ValueError(f"{name}, ramp: expected pairs of bytes and a part, found {reprlib.repr(each)}")
    return Link(name, given["latency"], given["bandwidth"], source.source, given.get("hop", 0.0), source.origin,
                tuple(Protocol(**each) for each in protocols), tuple((size, part) for size, part in ramp))  # fmt: skip


def to_json(hardware: Hardware) -> str:
    """Return the text of a hardware file, which `read_hardware` reads as an equal `hardware`."""

    def figure(name: str, value: Any) -> dict[str, Any]:
        source = hardware.sources.get(name, _UNKNOWN)
        return {"value": value, "origin": source.origin, "source": source.source}

    def connected(each: Link) -> dict[str, Any]:
        several = {"protocols": [protocol._asdict() for protocol in each.protocols], "ramp": [*map(list, each.ramp)]}
        shown = {**{name: getattr(each, name) for name in _LINK_UNITS}, "origin": each.origin, "source": each.source}
        return shown | {name: values for name, values in several.items() if values}

    table: dict[str, Any] = {"format": FORMAT, "name": hardware.name, "peak": figure("peak", dict(hardware.peak))}
    table |= {name: figure(name, getattr(hardware, name)) for name in UNITS}
    table |= {"node": connected(hardware.node), "network": connected(hardware.network)}
    return json.dumps(table, indent=1) + "\n"


def with_figures(hardware: Hardware, source: Source, **figures: Any) -> Hardware:
    """Return `hardware` with other numbers, all from one source."""
    return replace(hardware, **figures, sources={**hardware.sources, **dict.fromkeys(figures, source)})
