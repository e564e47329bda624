"""What computes and what connects it: the figures of hardware files.

A hardware file is JSON. The package has one for each of some GPUs in `data/`, and `data/links.json` for what connects
them; `fsdp-compile calibrate` writes one for a machine that is at hand. Each number has its origin ("measured",
"fitted", "assumed", "data sheet") and its source. Planner, `reshard="auto"` and predictions read the same files.
"""

import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from fsdp_compile.config import read_json

FORMAT = 1
Origin = Literal["measured", "fitted", "assumed", "data sheet"]
ORIGINS = get_args(Origin)
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Source:
    """How a number is known, and where it comes from."""

    origin: Origin
    source: str


@dataclass(frozen=True)
class Link:
    """What connects the ranks of one group.

    Attributes:
        name: as `link()` takes it.
        latency: seconds of a launch, whatever it moves and among however many ranks.
        bandwidth: bytes per second that one rank sends and at the same time receives.
        source: where the figures come from.
        hop: seconds that each step of a ring or tree adds to a launch.
        origin: how the figures are known.

    Raises:
        ValueError: a figure is no finite number, or below what it can be.
    """

    name: str
    latency: float
    bandwidth: float
    source: str
    hop: float = 0.0
    origin: Origin = "assumed"

    def __post_init__(self) -> None:
        expect_finite(f"link {self.name}", {"latency": self.latency, "hop": self.hop})
        expect_finite(f"link {self.name}", {"bandwidth": self.bandwidth}, above_zero=True)


@dataclass(frozen=True)
class Hardware:
    """A device, how its ranks are connected, and how much of the data sheet programs reach.

    Attributes:
        name: as `device()` takes it.
        peak: floating-point operations per second of matrix products, by the dtype's name; "float8" among them.
        bandwidth: bytes per second between the device and its memory.
        memory: bytes that programs can use; None: of the machine, whichever it is.
        node: what connects the ranks of one node.
        network: what connects nodes, for each rank.
        ranks_per_node: how many ranks a node has.
        product_efficiency: part of the peak that large matrix products reach.
        product_ramp: elements of the inner dimension that a product's beginning and end count as.
        float8_efficiency: the same part, of products in float8, relative to `product_efficiency`.
        attention_efficiency: part of the peak that the forward of attention reaches on long sequences.
        attention_backward: how much less efficient its backward is: a ratio.
        attention_ramp: tokens of the sequence that attention's beginning and end count as.
        chain_efficiency: part of the bandwidth that fused chains reach.
        eager_efficiency: the same of eager kernels, by the bytes that their operators have to move.
        update_efficiency: the same of the optimizer's update.
        kernel_seconds: what any kernel takes at least.
        layer_seconds: what a block takes beside its kernels, in each direction.
        step_seconds: what a step takes beside all that.
        contention: seconds that computing loses for each second in which a collective runs beside it.
        fragments: bytes that the allocator holds beside those that are alive, as a part of these.
        host_bandwidth: bytes per second that one device copies to or from pinned memory of its host; None: it has no
            memory beside the host's, or the figure is not known.
        sources: origin and source of each of these, by name.

    Raises:
        ValueError: a figure is no finite number, or below what it can be, and is named.
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
    host_bandwidth: float | None = None
    sources: Mapping[str, Source] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        where = f"hardware {self.name}"
        expect_finite(where, {f"peak of {dtype}": flops for dtype, flops in self.peak.items()}, above_zero=True)
        for name in UNITS:
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                expect_finite(where, {name: value}, above_zero=name in _ABOVE_ZERO)
        if self.ranks_per_node != int(self.ranks_per_node):
            raise ValueError(f"{where}, ranks_per_node: expected a whole number, found {self.ranks_per_node!r}")

    def figures(self) -> Iterator[tuple[str, float, str, Source]]:
        """Name, value, unit and source of each number."""
        unknown = Source("assumed", "no source is given")
        for dtype, value in self.peak.items():
            yield f"peak.{dtype}", value, "flop/s", self.sources.get("peak", unknown)
        for name, unit in UNITS.items():
            if getattr(self, name) is not None:
                yield name, getattr(self, name), unit, self.sources.get(name, unknown)
        for level, each in (("node", self.node), ("network", self.network)):
            source = Source(each.origin, each.source)
            for name, unit in _LINK_UNITS.items():
                yield f"{level}.{name}", getattr(each, name), unit, source


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
    "host_bandwidth": "bytes/s",
}
_LINK_UNITS = {"latency": "s", "hop": "s", "bandwidth": "bytes/s"}
_MAY_BE_NONE = {"memory", "host_bandwidth"}
_ABOVE_ZERO = {
    "bandwidth", "memory", "ranks_per_node", "product_efficiency", "float8_efficiency", "attention_efficiency",
    "attention_backward", "chain_efficiency", "eager_efficiency", "update_efficiency", "host_bandwidth",
}  # fmt: skip


def expect_finite(of: str, figures: Mapping[str, float], above_zero: bool = False) -> None:
    """Raise ValueError, naming the figure, unless all are finite numbers of at least 0, or above it."""
    for name, value in figures.items():
        if not is_finite(value) or (value == 0 and above_zero):
            least = "above" if above_zero else "of at least"
            raise ValueError(f"{of}, {name}: expected a finite number {least} 0, found {reprlib.repr(value)}")


def is_finite(value: object) -> bool:
    """Whether `value` is a finite int or float of at least 0. A bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


# --- files ------------------------------------------------------------------------------------------------------------


def link(text: "str | Link") -> Link:
    """A link by its name in `data/links.json`, or `custom:<latency in s>,<bandwidth in bytes/s>`.

    Raises:
        ValueError: neither of them.
    """
    if isinstance(text, Link):
        return text
    if text.startswith("custom:"):
        return _custom(text)
    if text not in links():
        raise ValueError(f"link: expected one of {', '.join(links())} or custom:LATENCY,BANDWIDTH (seconds, bytes per "
                         f"second), found {text!r}")  # fmt: skip
    return links()[text]


def _custom(text: str) -> Link:
    try:
        latency, bandwidth = map(float, text.removeprefix("custom:").split(","))
    except ValueError:
        latency, bandwidth = -1.0, 0.0
    if not (0 <= latency < math.inf and 0 < bandwidth < math.inf):
        raise ValueError(f"link: expected custom:LATENCY,BANDWIDTH in seconds and bytes per second, as in "
                         f"custom:2e-5,1e9, found {text!r}")  # fmt: skip
    return Link(text, latency, bandwidth, "the caller")


@cache
def links() -> dict[str, Link]:
    """The links that the package knows, by name."""
    table = _table(DATA / "links.json")
    return {name: _link(f"hardware file links.json, {name}", name, each) for name, each in table["links"].items()}


def device(text: "str | Hardware") -> Hardware:
    """A device by the name of a file in `data/`, or by the path of a hardware file.

    Names of GPUs that differ in memory may leave that out: "h100" is "h100-80".

    Raises:
        ValueError: there is none of that name, or the file is no hardware file.
    """
    if isinstance(text, Hardware):
        return text
    name = _SHORT.get(text, text)
    if name in devices():
        return devices()[name]
    if text.endswith(".json"):
        return read_hardware(Path(text))
    raise ValueError(f"device: expected one of {', '.join(devices())} or a file of JSON, found {text!r}")


_SHORT = {"h100": "h100-80", "a100": "a100-80"}


@cache
def devices() -> dict[str, Hardware]:
    """The hardware that the package has a file for, by name."""
    paths = sorted(path for path in DATA.glob("*.json") if path.name != "links.json")
    return {path.stem: read_hardware(path) for path in paths}


def reported_device(name: str, memory: int) -> Hardware:
    """The device that calls itself `name`, such as "NVIDIA H100 80GB HBM3", and has so many bytes of memory.

    Of several files for GPUs of that name, it is the one whose memory is nearest.

    Raises:
        ValueError: there is no file for it.
    """
    words = set(re.split("[^a-z0-9]+", name.lower()))
    named = [each for key, each in devices().items() if key.partition("-")[0] in words]
    if not named:
        raise ValueError(f"device: expected one of {', '.join(devices())} or a file of JSON to be named, as there is "
                         f"none for {name!r}")  # fmt: skip
    return min(named, key=lambda each: abs((each.memory or 0) - memory))


def read_hardware(path: Path) -> Hardware:
    """The hardware in a file, which anybody may have written.

    Raises:
        ValueError: it cannot be read, has another version, lacks a field or has an unknown one, or a number is not
            finite or below what it can be; the message names the field.
    """
    where, table = f"hardware file {path.name}", _table(path)
    known = {each.name for each in fields(Hardware)} - {"sources"} | {"format"}
    _expect_fields(where, table, {"format", "name", "peak", "bandwidth", "memory", "node", "network"}, known)
    if type(table["name"]) is not str:
        raise ValueError(f"{where}, name: expected text, found {reprlib.repr(table['name'])}")
    sources: dict[str, Source] = {}
    values: dict[str, Any] = {"name": table["name"]}
    for name in set(UNITS) & table.keys():
        values[name], sources[name] = _figure(f"{where}, {name}", table[name], may_be_none=name in _MAY_BE_NONE)
    peak, sources["peak"] = _figure(f"{where}, peak", table["peak"], of=dict)
    expect_finite(f"{where}, peak", peak, above_zero=True)
    values["peak"] = {dtype: float(flops) for dtype, flops in peak.items()}
    for level in ("node", "network"):
        given = table[level]
        values[level] = link(given) if isinstance(given, str) else _link(f"{where}, {level}", level, given)
    try:
        return Hardware(**values, sources=sources)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


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


def _expect_fields(where: str, table: Any, required: set[str], known: set[str]) -> None:
    if type(table) is not dict:
        raise ValueError(f"{where}: expected an object, found {reprlib.repr(table)}")
    if missing := sorted(required - table.keys()):
        raise ValueError(f"{where}, {missing[0]}: expected it, found no such field")
    if unknown := sorted(table.keys() - known):
        raise ValueError(f"{where}: expected fields among {', '.join(sorted(known))}, found {unknown[0]!r}")


def _figure(where: str, given: Any, may_be_none: bool = False, of: type | None = None) -> tuple[Any, Source]:
    """A number, or an object of numbers, and its source."""
    _expect_fields(where, given, {"value", "origin", "source"}, {"value", "origin", "source"})
    value, origin, source = given["value"], given["origin"], given["source"]
    if origin not in ORIGINS or type(source) is not str or not source:
        raise ValueError(f"{where}: expected an origin ({', '.join(ORIGINS)}) and a source in words, found "
                         f"{reprlib.repr(origin)} and {reprlib.repr(source)}")  # fmt: skip
    if of is not None and type(value) is not of:
        raise ValueError(f"{where}: expected an object of numbers, found {reprlib.repr(value)}")
    if of is None and not is_finite(value) and not (may_be_none and value is None):
        raise ValueError(f"{where}: expected a finite number of at least 0, found {reprlib.repr(value)}")
    return value, Source(origin, source)


def _link(where: str, name: str, given: Any) -> Link:
    _expect_fields(where, given, {"latency", "bandwidth", "origin", "source"},
                   {"latency", "hop", "bandwidth", "origin", "source"})  # fmt: skip
    for figure in _LINK_UNITS.keys() & given.keys():
        if not is_finite(given[figure]):
            raise ValueError(f"{where}, {figure}: expected a finite number of at least 0, found "
                             f"{reprlib.repr(given[figure])}")  # fmt: skip
    if given["origin"] not in ORIGINS or type(given["source"]) is not str:
        raise ValueError(f"{where}, origin: expected one of {', '.join(ORIGINS)}, and a source, found "
                         f"{reprlib.repr(given['origin'])}")  # fmt: skip
    return Link(name, given["latency"], given["bandwidth"], given["source"], given.get("hop", 0.0), given["origin"])


def to_json(hardware: Hardware) -> str:
    """The text of a hardware file, which `read_hardware` reads as `hardware` again."""
    unknown = Source("assumed", "no source is given")

    def figure(name: str, value: Any) -> dict[str, Any]:
        source = hardware.sources.get(name, unknown)
        return {"value": value, "origin": source.origin, "source": source.source}

    def connected(each: Link) -> dict[str, Any]:
        return {**{name: getattr(each, name) for name in _LINK_UNITS}, "origin": each.origin, "source": each.source}

    table: dict[str, Any] = {"format": FORMAT, "name": hardware.name, "peak": figure("peak", dict(hardware.peak))}
    table |= {name: figure(name, getattr(hardware, name)) for name in UNITS}
    table |= {"node": connected(hardware.node), "network": connected(hardware.network)}
    return json.dumps(table, indent=1) + "\n"


def with_figures(hardware: Hardware, source: Source, **figures: Any) -> Hardware:
    """`hardware` with other numbers, all from one source."""
    return replace(hardware, **figures, sources={**hardware.sources, **dict.fromkeys(figures, source)})
