"""What nodes, collectives and an optimizer's update cost on the hardware that the configuration names."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from fsdp_compile.comm._torch import group_named
from fsdp_compile.comm.collectives import ALL_REDUCE, ALL_REDUCE_IN_PLACE, GROUP_ARGUMENT
from fsdp_compile.config import CompileConfig
from fsdp_compile.passes.cost.hardware import Hardware, device, link, reported_device
from fsdp_compile.passes.cost.roofline import all_reduce_seconds, launch_seconds, transfer_seconds, update_seconds
from fsdp_compile.passes.graph.node_costs import node_seconds, node_work, size_of
from fsdp_compile.passes.graph.nodes import tagged


@dataclass(frozen=True)
class Costs:
    """What things cost.

    Attributes:
        node: seconds that a node computes.
        collective: seconds that a link needs for what this node starts, without latency.
        latency: seconds that each launch takes beside that.
        memory: whether bytes are counted too.
        moving: seconds that the device takes to read or write so many bytes, in one kernel of an optimizer.
        norm: seconds of the all-reduce of a number.
        step: seconds from the last update to the next forward.
        compare: seconds of the message by which ranks compare what they know of prefetched gathers; 0: it does not go
            over the link.
        host_bandwidth: bytes per second between the device and the memory of its host; None: there is no such copy.
    """

    node: Callable[[fx.Node], float]
    collective: Callable[[fx.Node], float]
    latency: float = 0.0
    memory: bool = True
    moving: Callable[[float], float] = lambda moved: 0.0
    norm: float = 0.0
    step: float = 0.0
    compare: float = 0.0
    host_bandwidth: float | None = None


_FLOPS_PER_BYTE = {"cpu": 12.0, "cuda": 240.0}
"""How much a device computes while it moves a byte (passes/cost): the CPU in float32, an H100 in bfloat16."""


def costs_of(graph: fx.Graph, config: CompileConfig) -> Costs | None:
    """Costs of nodes and collectives by `config.link` and `config.device`; None without a link.

    Raises:
        ValueError: a name is unknown.
    """
    starts = tagged(graph, "gather", "reduce")
    if config.link is None or not starts:
        return None
    wire = link(config.link)
    computer = device(config.device) if config.device else _device_of(starts[0].meta["val"].device)

    def of_node(node: fx.Node) -> float:
        return node_seconds(node, computer)

    def of_collective(start: fx.Node) -> float:
        if start.target in (ALL_REDUCE, ALL_REDUCE_IN_PLACE):
            return all_reduce_seconds(size_of(start), _world_size(start), wire) - wire.latency
        full = max(size_of(start), size_of(start.args[0]))  # type: ignore[arg-type]  # fx arguments are untyped
        return transfer_seconds(full, _world_size(start), wire)

    def moving(moved: float) -> float:
        return max(update_seconds(moved, computer), computer.kernel_seconds)

    world = max(map(_world_size, starts))
    norm = all_reduce_seconds(4, world, wire)
    # Ranks compare what they know by a message on the host, where a GPU's link is another one.
    on_cpu = starts[0].meta["val"].device.type == "cpu" and config.device in (None, "cpu")
    return Costs(
        of_node,
        of_collective,
        launch_seconds(world, wire),
        moving=moving,
        norm=norm,
        step=computer.step_seconds,
        compare=norm if on_cpu else 0.0,
        host_bandwidth=computer.host_bandwidth,
    )


def relative_costs(graph: fx.Graph) -> Costs:
    """Costs where no link is named: how long a task takes relative to others, in no unit, on this kind of device."""
    starts = tagged(graph, "gather", "reduce")
    kind = starts[0].meta["val"].device.type if starts else "cpu"
    flops_per_byte = _FLOPS_PER_BYTE.get(kind, _FLOPS_PER_BYTE["cuda"])

    def of_node(node: fx.Node) -> float:
        work = node_work(node)
        return work.flops + flops_per_byte * (work.read_bytes + work.written_bytes)

    return Costs(of_node, lambda start: 0.0, memory=False)


def _world_size(start: fx.Node) -> int:
    return group_named(start.args[GROUP_ARGUMENT[start.target]]).size()  # type: ignore[arg-type,index]  # fx arguments are untyped


def _device_of(where: torch.device) -> Hardware:
    if where.type == "cpu":
        return device("cpu")
    return reported_device(torch.cuda.get_device_name(where), torch.cuda.get_device_properties(where).total_memory)
