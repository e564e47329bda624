"""What the nodes and collectives of one graph cost, by the configuration; planning asks nobody else."""

from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fsdp_compile.comm.collectives import ALL_REDUCE, ALL_REDUCE_IN_PLACE, GROUP_ARGUMENT
from fsdp_compile.config import CompileConfig
from fsdp_compile.passes._torch import group_named, hint_of
from fsdp_compile.passes.cost.hardware import DEVICES, Device, device, link
from fsdp_compile.passes.cost.roofline import all_reduce_seconds, compute_seconds, launch_seconds, transfer_seconds
from fsdp_compile.passes.graph.liveness import size_of
from fsdp_compile.passes.graph.reading import Costs
from fsdp_compile.passes.graph.tags import tagged
from fsdp_compile.passes.graph.work import node_work

_FLOPS_PER_BYTE = {"cpu": 12.0, "cuda": 240.0}
"""What a device computes while it moves a byte (machines.py): the CPU in float32, an H100 in bfloat16."""


def costs_of(graph: fx.Graph, config: CompileConfig) -> Costs | None:
    """Costs by `config.link` and `config.device`; None without a link.

    Raises:
        ValueError: a name is unknown.
    """
    starts = tagged(graph, "gather", "reduce")
    if config.link is None or not starts:
        return None
    wire = link(config.link)
    computer = device(config.device) if config.device else _device_of(starts[0].meta["val"].device)

    def of_node(node: fx.Node) -> float:
        work = node_work(node)
        moved = _number(work.read_bytes + work.written_bytes)
        return compute_seconds(_number(work.flops), moved, _dtype_of(node), computer)

    def of_collective(start: fx.Node) -> float:
        world = group_named(start.args[GROUP_ARGUMENT[start.target]]).size()  # type: ignore[arg-type,index]  # fx
        if start.target in (ALL_REDUCE, ALL_REDUCE_IN_PLACE):
            return all_reduce_seconds(size_of(start), world, wire) - wire.latency
        full = max(size_of(start), size_of(start.args[0]))  # type: ignore[arg-type]  # fx arguments are untyped
        return transfer_seconds(full, world, wire)

    world = max(group_named(start.args[GROUP_ARGUMENT[start.target]]).size() for start in starts)  # type: ignore[arg-type,index]  # fx
    return Costs(of_node, of_collective, launch_seconds(world, wire))


def shares(graph: fx.Graph) -> Costs:
    """Where no link is named: what a task takes beside others, in no unit, on this kind of device."""
    starts = tagged(graph, "gather", "reduce")
    kind = starts[0].meta["val"].device.type if starts else "cpu"
    flops_per_byte = _FLOPS_PER_BYTE.get(kind, _FLOPS_PER_BYTE["cuda"])

    def of_node(node: fx.Node) -> float:
        work = node_work(node)
        return _number(work.flops + flops_per_byte * (work.read_bytes + work.written_bytes))

    return Costs(of_node, lambda start: 0.0, memory=False)


def _device_of(where: torch.device) -> Device:
    if where.type == "cpu":
        return DEVICES["cpu"]
    name = torch.cuda.get_device_name(where).lower()
    found = [each for key, each in DEVICES.items() if key in name]
    if not found:
        raise ValueError(f"device: expected one of {', '.join(DEVICES)} to be named, found none that {name!r} is")
    return found[0]


def _dtype_of(node: fx.Node) -> str:
    """In which dtype a node computes: that of its first floating-point input."""
    inputs = (leaf for each in node.all_input_nodes for leaf in tree_leaves(each.meta.get("val")))
    dtypes = (each.dtype for each in inputs if isinstance(each, torch.Tensor) and each.dtype.is_floating_point)
    return str(next(dtypes, torch.float32)).removeprefix("torch.")


def _number(value: Any) -> float:
    """A number for an expression in symbols: that of the sizes it was traced with."""
    return float(hint_of(value)) if isinstance(value, sympy.Basic) else float(value)
