"""Seconds of collectives and of computing. Arguments may be numbers or sympy expressions; so are the results.

One trace with symbols for batch and sequence, and a symbol for the number of ranks, answers for any scale by
substitution. Nothing here asks a device or another rank: the same input gives the same numbers everywhere.
"""

from collections.abc import Callable

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fsdp_compile.passes.cost.hardware import DEVICES, LINKS, Device, Link, device, link
from fsdp_compile.passes.cost.measured import Measured
from fsdp_compile.passes.graph.work import Number, Work, node_work

__all__ = [
    "DEVICES",
    "LINKS",
    "Device",
    "Link",
    "Measured",
    "Number",
    "Work",
    "all_gather_seconds",
    "all_reduce_seconds",
    "device",
    "launch_seconds",
    "link",
    "node_seconds",
    "node_work",
    "reduce_scatter_seconds",
    "seconds",
    "transfer_seconds",
]


def launch_seconds(world: Number, link: Link) -> Number:
    """What a gather or reduce-scatter among `world` ranks takes beside its bytes: `Workload.latency`.

    A ring makes `world - 1` steps.
    """
    return link.latency + link.hop * (world - 1)


def transfer_seconds(full_bytes: Number, world: Number, link: Link) -> Number:
    """What the bytes of a gather or reduce-scatter take: `UnitCost.gather` and `.reduce`.

    Each rank receives all but its own part, `full_bytes * (world - 1) / world`, whichever the algorithm (Chan,
    Heimlich, Purkayastha, van de Geijn: Collective communication, 2007, section 4; NCCL's rings reach it).
    """
    return full_bytes * (world - 1) / world / link.bandwidth


def all_gather_seconds(full_bytes: Number, world: Number, link: Link) -> Number:
    """Seconds of one all-gather whose result has `full_bytes`, among `world` ranks."""
    return launch_seconds(world, link) + transfer_seconds(full_bytes, world, link)


def reduce_scatter_seconds(full_bytes: Number, world: Number, link: Link) -> Number:
    """Seconds of one reduce-scatter whose input has `full_bytes`, among `world` ranks: an all-gather run backwards."""
    return all_gather_seconds(full_bytes, world, link)


def all_reduce_seconds(bytes: Number, world: Number, link: Link) -> Number:
    """Seconds of one all-reduce of `bytes`, among `world` ranks: by ring or by tree, whichever is shorter.

    A ring is a reduce-scatter and an all-gather. A double binary tree goes up and down, `2 log2(world)` steps, and
    moves all bytes twice (Sanders, Speck, Traff: Two-tree algorithms, 2009). NCCL chooses between the two likewise.
    """
    ring = link.latency + link.hop * 2 * (world - 1) + 2 * transfer_seconds(bytes, world, link)
    steps = 2 * (sympy.ceiling(sympy.log(world, 2)) if _is_symbolic(world) else (int(world) - 1).bit_length())
    tree = link.latency + link.hop * steps + 2 * bytes / link.bandwidth
    return _choose(min, sympy.Min, ring, tree)


def seconds(work: Work, dtype: torch.dtype, device: Device) -> Number:
    """Roofline: the longer of computing in `dtype` and of moving bytes.

    Raises:
        ValueError: there is something to compute and the device's table has no figure for `dtype`.
    """
    moving = (work.read_bytes + work.written_bytes) / device.bandwidth
    if work.flops == 0:
        return moving
    if dtype not in device.flops:
        known = ", ".join(map(str, device.flops))
        raise ValueError(f"dtype: expected one that device {device.name} has a figure for ({known}), found {dtype}")
    return _choose(max, sympy.Max, work.flops / (device.flops[dtype] * device.efficiency), moving)


def node_seconds(node: fx.Node, device: Device, measured: Measured | None = None) -> Number:
    """Seconds of one node: measured if the table has it, else by the roofline."""
    found = measured.of(node) if measured is not None else None
    return seconds(node_work(node), _dtype(node), device) if found is None else found


def _dtype(node: fx.Node) -> torch.dtype:
    """In which a node computes: that of its first floating-point input."""
    inputs = (leaf for each in node.all_input_nodes for leaf in tree_leaves(each.meta.get("val")))
    dtypes = (each.dtype for each in inputs if isinstance(each, torch.Tensor) and each.dtype.is_floating_point)
    return next(dtypes, torch.float32)


def _is_symbolic(*numbers: Number) -> bool:
    return any(isinstance(each, sympy.Basic) and not each.is_number for each in numbers)


def _choose(of_numbers: Callable[..., Number], of_symbols: Callable[..., Number], *values: Number) -> Number:
    """`min` or `max`, unevaluated if there are symbols: sympy would try to prove which it is, which takes long."""
    return of_symbols(*values, evaluate=False) if _is_symbolic(*values) else of_numbers(values)
