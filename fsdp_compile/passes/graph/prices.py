"""Seconds of a step: one source for what computes, one for what connects ranks, and what was recorded before both.

work_seconds, node_seconds   of one kernel, or of a part of one
Prices                       of kernels, messages and updates; and a graph read with its seconds
prices_of                    the prices of a graph, if a link is named
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import fx

from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.collectives import ALL_REDUCE, ALL_REDUCE_IN_PLACE, GROUP_ARGUMENT
from fsdp_compile.comm.formats import ratio
from fsdp_compile.comm.groups import shared_name
from fsdp_compile.config import CompileConfig
from fsdp_compile.passes.cost.hardware import Hardware, Link, device, link, reported_device
from fsdp_compile.passes.cost.roofline import (
    Level,
    all_reduce_seconds,
    attention_seconds,
    chain_seconds,
    launch_seconds,
    level_of,
    product_seconds,
    transfer_seconds,
)
from fsdp_compile.passes.graph.analyze import GraphInfo, analyze
from fsdp_compile.passes.graph.nodes import tag_of, tagged
from fsdp_compile.passes.graph.work import Costs, Work, node_work, size_of

ALL_REDUCES = (ALL_REDUCE, ALL_REDUCE_IN_PLACE)


def work_seconds(work: Work, hardware: Hardware) -> float:
    """Seconds of `work` as one kernel: Note [How operations are priced]."""
    if work.kind in ("chain", "operator"):
        return chain_seconds(work.moved_bytes, work.kind == "chain", hardware)
    if work.kind.startswith("attention"):
        return attention_seconds(work.flops, work.inner, "backward" in work.kind, work.dtype, hardware)
    return product_seconds(work.flops, work.moved_bytes, work.inner or math.inf, work.dtype, hardware)


def node_seconds(node: fx.Node, hardware: Hardware) -> float:
    """Seconds that `node` computes on `hardware`; values that pass between loops take none."""
    work = node_work(node)
    if not work.flops:  # a part of a kernel, which alone takes some least time
        return work.moved_bytes / (hardware.bandwidth * hardware.chain_efficiency)
    return work_seconds(work, hardware)


@dataclass(frozen=True)
class Prices:
    """Seconds of all that a step computes and sends.

    Attributes:
        device: what computes.
        groups: how many ranks communicate, and what connects them, by the name of their group.
        latency: seconds of a launch; what one of a group takes beside these counts with its messages.
    """

    device: Hardware
    groups: Mapping[str, tuple[int, Link]]
    latency: float

    def node(self, node: fx.Node) -> float:
        """Seconds that a node computes."""
        return node_seconds(node, self.device)

    def message(self, group: str, full: float, sent: float | None = None, is_all_reduce: bool = False) -> float:
        """Seconds of a collective beside `latency`.

        Args:
            group: the name of the ranks.
            full: bytes of what is gathered or reduced.
            sent: bytes of the same in a format, which is made and read beside what computes; None: it is sent in full.
            is_all_reduce: otherwise an all-gather or a reduce-scatter.
        """
        ranks = self.groups[group]
        size = full if sent is None else sent
        coding = 0.0 if sent is None else chain_seconds(full + sent, True, self.device)
        if is_all_reduce:
            return max(0.0, all_reduce_seconds(size, *ranks) - self.latency) + coding
        return transfer_seconds(size, *ranks) + (launch_seconds(*ranks) - self.latency) + coding

    def collective(self, start: fx.Node) -> float:
        """Seconds of the collective that a node starts, beside `latency`."""
        wire, full = tag_of(start).wire, max(size_of(start), size_of(start.args[0]))  # type: ignore[arg-type]  # fx arguments are untyped
        sent = full * ratio(wire, start.meta["val"].dtype) if wire else None
        return self.message(group_of(start).group_name, full, sent, start.target in ALL_REDUCES)

    def read(self, graph: fx.Graph, direction: str) -> GraphInfo:
        """Return `graph` as tasks and units with their seconds.

        Args:
            graph: a graph.
            direction: what it is, as in `GraphContext`.
        """
        costs = Costs(self.node, self.collective, self.latency)
        return analyze(graph, costs, direction == "joint")

    def level(self, starts: Iterable[fx.Node]) -> Level:
        """The widest links that the collectives take which these nodes start."""
        per_node, ranks = int(self.device.ranks_per_node), (self.groups[group_of(each).group_name] for each in starts)
        return "network" if "network" in {level_of(*each, per_node) for each in ranks} else "node"

    def sources(self) -> Iterator[str]:
        """Where the seconds come from, a line each."""
        links = {each.name: each for _, each in self.groups.values()}
        for name, each in links.items():
            yield f"link      {name}: {each.origin}, {each.source.partition(';')[0]}"
        counted = Counter(source.origin for source in self.device.sources.values())
        yield f"device    {self.device.name}: {', '.join(f'{times} {origin}' for origin, times in counted.items())}"


def prices_of(graph: fx.Graph, config: CompileConfig) -> Prices | None:
    """Return the prices of a graph on `config.link` and `config.device`; None without a link, or if it sends nothing.

    Raises:
        ValueError: a name is unknown.
    """
    starts = tagged(graph, "gather", "reduce")
    if config.link is None or not starts:
        return None
    groups = {str(each.group_name): (each.size(), _link_of(each, config.link)) for each in map(group_of, starts)}
    latency = min(launch_seconds(*ranks) for ranks in groups.values())
    return Prices(hardware_at(starts[0].meta["val"].device, config.device), groups, latency)


def hardware_at(where: torch.device, named: str | Hardware | None = None) -> Hardware:
    """The hardware that is named, or the hardware file of a device that is here. ValueError if there is none."""
    if named:
        return device(named)
    if where.type == "cpu":
        return device("cpu")
    return reported_device(torch.cuda.get_device_name(where), torch.cuda.get_device_properties(where).total_memory)


def group_of(start: fx.Node) -> dist.ProcessGroup:
    """The ranks that take part in what a collective node starts."""
    return group_named(start.args[GROUP_ARGUMENT[start.target]])  # type: ignore[arg-type,index]  # fx arguments are untyped


def _link_of(group: dist.ProcessGroup, text: str) -> Link:
    """The link between the ranks of `group`, which may have fewer of a node than there are."""
    wire = link(text, group=shared_name(group))
    if wire.ranks_per_node is None:
        return wire
    each = Counter(rank // wire.ranks_per_node for rank in dist.get_process_group_ranks(group))
    return replace(wire, ranks_per_node=max(each.values()))
