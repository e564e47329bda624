"""Seconds of collectives and kernels from plain numbers, the same on every rank.

collectives    seconds by bytes and ranks, over one link or over a cluster
operations     seconds of single kernels on one device

Note [How operations are priced]
    product      2 m k n / (peak x efficiency), times (1 + ramp / k) for the beginning and end of each tile's loop, or
                 the bytes of its matrices over the bandwidth, if that is longer
    attention    operations, half of them if it is causal, / (peak x efficiency), times (1 + ramp / length)
    chain        bytes read and written / (bandwidth x efficiency): a fused kernel, or a less efficient eager one
    kernel       takes at least `kernel_seconds`; a block takes `layer_seconds` more in each direction

Note [How collectives are priced]
A ring through all ranks enters each node once and leaves it once. Inside a node it takes the fast links, and between
nodes the adapters: there are as many rings as ranks of a node, so that all adapters carry one. What the ranks of a node
have passes the adapters of all others on its way, so each ring moves `full x (world - 1) / world` over every one of its
links. Fast links and adapters work at the same time, so the slower ones count. A launch takes a hop for each step of
the ring, most of which stay inside of nodes.

NCCL has protocols that wait less at each step and reach less bandwidth, and takes the one that is fastest for the size
of the message. Between nodes a ring reaches only a part of the bandwidth (`Link.ramp`) unless each rank has much to
send: its steps come one after the other. `python -m bench links` compares with a table of NCCL's own prices.
"""

import logging
import math
import re
from functools import cache
from itertools import pairwise
from typing import Literal

from fsdp_compile.passes.cost.hardware import Hardware, Link, Protocol

log = logging.getLogger("fsdp_compile")

# --- collectives: nothing here asks a device or another rank ----------------------------------------------------------


Level = Literal["node", "network"]


def level_of(world: int, link: Link, ranks_per_node: int) -> Level:
    """The links that a collective takes; `ranks_per_node` is that of the device, for links that do not say."""
    return "network" if world > min(world, link.ranks_per_node or ranks_per_node) else "node"


def launch_seconds(world: int, link: Link) -> float:
    """Seconds of an all-gather or reduce-scatter of next to nothing: `Workload.latency`."""
    return _ring(0, world, link)


def transfer_seconds(full_bytes: float, world: int, link: Link) -> float:
    """Seconds of an all-gather or reduce-scatter beside those of its launch: `UnitCost.gather` and `.reduce`.

    Each rank receives all but its own part, `full_bytes * (world - 1) / world`, whichever the algorithm (Chan,
    Heimlich, Purkayastha, van de Geijn: Collective communication, 2007, section 4; NCCL's rings reach it).
    """
    return _ring(full_bytes, world, link) - launch_seconds(world, link)


def all_reduce_seconds(full_bytes: float, world: int, link: Link) -> float:
    """Seconds of an all-reduce of `full_bytes` among `world` ranks, by ring or by tree, whichever is shorter.

    A ring is a reduce-scatter and an all-gather. A double binary tree over nodes, whose ranks are chains, goes up and
    down, `2 log2(nodes)` steps, and moves all bytes twice (Sanders, Speck, Traff: Two-tree algorithms, 2009). NCCL
    chooses between the two likewise.
    """
    nodes, between = _nodes(world, link)
    steps = 2 * (math.ceil(world / nodes) - 1), 2 * (nodes - 1).bit_length()
    tree = _fastest(between, world / nodes, steps, (2 * full_bytes, 2 * full_bytes), full_bytes / world)
    return min(_ring(full_bytes, world, link, 2), tree)


def _ring(full_bytes: float, world: int, link: Link, times: int = 1) -> float:
    """Seconds of so many rounds in a ring."""
    nodes, link = _nodes(world, link)
    steps = times * (world - nodes), times * (nodes - 1)
    sent = times * full_bytes * (world - 1) / world
    return _fastest(link, world / nodes, steps, (sent, sent if nodes > 1 else 0.0), full_bytes / world)


def _nodes(world: int, link: Link) -> tuple[int, Link]:
    """How many nodes the link connects, and the link; each rank is a node if all are connected alike."""
    if link.inside is None or link.ranks_per_node is None:
        return world, link
    return (world, link.inside) if world <= link.ranks_per_node else (math.ceil(world / link.ranks_per_node), link)


def _fastest(
    link: Link, ranks_per_node: float, steps: tuple[int, int], sent: tuple[float, float], own_bytes: float
) -> float:
    """Seconds by the fastest protocol; `steps` and bytes `sent` are those within nodes and those between nodes."""
    near, found = link.inside, list[float]()
    for each in (Protocol(link.latency, link.hop, near.hop if near else 0.0, 1.0, math.inf), *link.protocols):
        moving = sent[1] / min(link.bandwidth * each.part * ranks_per_node, each.most)
        if near is not None and steps[0]:
            moving = max(moving, sent[0] / (near.bandwidth * each.part))
        found.append(each.latency + steps[0] * each.inside + steps[1] * each.hop + moving / _part(own_bytes, link))
    return min(found)


def _part(own_bytes: float, link: Link) -> float:
    """The part of the bandwidth that a ring reaches if each rank has so many bytes: between two of its points."""
    points = link.ramp or ((1.0, 1.0),)
    for (size, part), (next_size, next_part) in pairwise(points):
        if size <= own_bytes <= next_size:
            return part + (next_part - part) * math.log(own_bytes / size) / math.log(next_size / size)
    return points[0 if own_bytes < points[0][0] else -1][1]


# --- operations: see Note [How operations are priced] -----------------------------------------------------------------


@cache
def figure_for(dtype: str, hardware: Hardware) -> tuple[str, float]:
    """The dtype that products in `dtype` are priced as, and its operations per second before any efficiency.

    Where `hardware` has no figure for it: one of the same size, else of the next larger one, in which it would compute,
    else that of the largest, and less in proportion.
    """
    if dtype in hardware.peak:
        return dtype, hardware.peak[dtype]
    size = _bits_of(dtype)
    known = min(hardware.peak, key=lambda each: (_bits_of(each) < size, abs(_bits_of(each) - size)))
    log.warning("device %s has no figure for products in %s: priced by that for %s", hardware.name, dtype, known)
    return known, hardware.peak[known] * min(1.0, _bits_of(known) / size)


def _bits_of(dtype: str) -> int:
    found = re.search("[0-9]+", dtype)
    return int(found[0]) if found else 8


def product_seconds(flops: float, moved_bytes: float, inner: float, dtype: str, hardware: Hardware) -> float:
    """Seconds of one matrix product in `dtype` that sums over `inner` elements."""
    known, peak = figure_for(dtype, hardware)
    efficiency = hardware.product_efficiency * (hardware.float8_efficiency if known == "float8" else 1.0)
    computing = flops / (peak * efficiency) * (1 + hardware.product_ramp / max(inner, 1))
    return max(computing, moved_bytes / hardware.bandwidth, hardware.kernel_seconds)


def attention_seconds(flops: float, length: float, backward: bool, dtype: str, hardware: Hardware) -> float:
    """Seconds of attention over `length` keys; `flops` leaves out what is masked."""
    efficiency = hardware.attention_efficiency / (hardware.attention_backward if backward else 1.0)
    computing = flops / (figure_for(dtype, hardware)[1] * efficiency) * (1 + hardware.attention_ramp / max(length, 1))
    return max(computing, hardware.kernel_seconds)


def chain_seconds(moved_bytes: float, fused: bool, hardware: Hardware) -> float:
    """Seconds of one kernel without products: a fused chain, or an eager operator."""
    efficiency = hardware.chain_efficiency if fused else hardware.eager_efficiency
    return max(moved_bytes / (hardware.bandwidth * efficiency), hardware.kernel_seconds)


def update_seconds(moved_bytes: float, hardware: Hardware) -> float:
    """Seconds of the optimizer's update that reads and writes so many bytes."""
    return moved_bytes / (hardware.bandwidth * hardware.update_efficiency)
