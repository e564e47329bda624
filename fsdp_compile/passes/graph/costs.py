"""Seconds of the nodes of a graph, on the hardware that the configuration names.

work_seconds, node_seconds   of one kernel, or of a part of one
costs_of                     of nodes, collectives and the optimizer's update, if a link is named
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import fx

from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.collectives import ALL_REDUCE, ALL_REDUCE_IN_PLACE, GROUP_ARGUMENT
from fsdp_compile.comm.formats import FORMATS, ratio
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
    update_seconds,
)
from fsdp_compile.passes.graph.nodes import (
    is_product,
    tag_of,
    tagged,
)
from fsdp_compile.passes.graph.work import Costs, Work, node_work, size_of

_ALL_REDUCES = (ALL_REDUCE, ALL_REDUCE_IN_PLACE)


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
class StepCosts(Costs):
    """Prices of a graph, and of what happens beside it.

    Attributes:
        update_seconds: seconds of one kernel of an optimizer that moves so many bytes.
        norm: seconds of the all-reduce of a number.
        host_gap: seconds from the last update to the next forward.
        rank_check_seconds: seconds of the message by which ranks compare their prefetched gathers; 0: it does not go
            over the link.
        host_bandwidth: bytes per second between the device and the memory of its host; None: there is no such copy.
        levels: the links that gathers and reduces take, and those of all-reduces over replicas.
    """

    update_seconds: Callable[[float], float] = lambda moved: 0.0
    norm: float = 0.0
    host_gap: float = 0.0
    rank_check_seconds: float = 0.0
    host_bandwidth: float | None = None
    levels: tuple[Level, Level] = ("node", "node")


def costs_of(graph: fx.Graph, config: CompileConfig) -> StepCosts | None:
    """Return the costs of nodes and collectives on `config.link` and `config.device`; None without a link.

    Raises:
        ValueError: a name is unknown.
    """
    starts = tagged(graph, "gather", "reduce")
    if config.link is None or not starts:
        return None
    where = starts[0].meta["val"].device
    computer = device(config.device) if config.device else hardware_at(where)

    def of_node(node: fx.Node) -> float:
        return node_seconds(node, computer)

    groups = {_group_of(start): _link_of(_group_of(start), config.link) for start in starts}
    latency = min(launch_seconds(group.size(), used) for group, used in groups.items())

    def of_collective(start: fx.Node) -> float:
        group, wire = _group_of(start), tag_of(start).wire
        full = max(size_of(start), size_of(start.args[0]))  # type: ignore[arg-type]  # fx arguments are untyped
        sent = full * ratio(wire, start.meta["val"].dtype)
        coding = chain_seconds(full + sent, True, computer) if wire in FORMATS else 0.0
        if start.target in _ALL_REDUCES:
            return max(0.0, all_reduce_seconds(sent, group.size(), groups[group]) - latency) + coding
        launch = launch_seconds(group.size(), groups[group])
        return transfer_seconds(sent, group.size(), groups[group]) + launch - latency + coding

    def level(over_replicas: bool) -> Level:
        those = {_group_of(start) for start in starts if (start.target in _ALL_REDUCES) == over_replicas}
        levels = {level_of(group.size(), groups[group], int(computer.ranks_per_node)) for group in those}
        return "network" if "network" in levels else "node"

    def of_update(moved: float) -> float:
        return max(update_seconds(moved, computer), computer.kernel_seconds)

    norm = max(all_reduce_seconds(4, group.size(), used) for group, used in groups.items())
    # Ranks compare what they know by a message on the host, where a GPU's link is another one.
    on_cpu = where.type == "cpu" and (config.device or "cpu").partition(":")[0] == "cpu"
    return StepCosts(
        of_node,
        of_collective,
        latency,
        update_seconds=of_update,
        norm=norm,
        host_gap=computer.step_seconds,
        rank_check_seconds=norm if on_cpu else 0.0,
        host_bandwidth=computer.host_bandwidth,
        levels=(level(False), level(True)),
    )


def hardware_at(where: torch.device) -> Hardware:
    """The hardware file of a device that is here. ValueError if there is none."""
    if where.type == "cpu":
        return device("cpu")
    return reported_device(torch.cuda.get_device_name(where), torch.cuda.get_device_properties(where).total_memory)


def group_size(start: fx.Node) -> int:
    """How many ranks take part in what a collective node starts."""
    return _group_of(start).size()


def _group_of(start: fx.Node) -> dist.ProcessGroup:
    return group_named(start.args[GROUP_ARGUMENT[start.target]])  # type: ignore[arg-type,index]  # fx arguments are untyped


def _link_of(group: dist.ProcessGroup, text: str) -> Link:
    """The link between the ranks of `group`, which may have fewer of a node than there are."""
    wire = link(text, group=shared_name(group))
    if wire.ranks_per_node is None:
        return wire
    each = Counter(rank // wire.ranks_per_node for rank in dist.get_process_group_ranks(group))
    return replace(wire, ranks_per_node=max(each.values()))


def stretches_of(tasks: Sequence[Sequence[fx.Node]]) -> list[int]:
    """The stretch of each task, as profiles count them: 0 before the first matrix product; each product begins one."""
    return list(accumulate(int(is_product(nodes[0])) for nodes in tasks))
