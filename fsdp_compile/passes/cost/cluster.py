"""Seconds of collectives over a cluster with two levels of links: inside a node, and between nodes.

Note [Two levels of links]
A ring through all ranks enters each node once and leaves it once. Inside a node it takes the fast links, and between
nodes the adapters: there are as many rings as ranks of a node, so that all adapters carry one. Each node receives what
its ranks together lack, `full x (nodes - 1) / nodes`, through all of its adapters; each rank receives
`full x (world - 1) / world` through its fast links. The two happen at the same time, so the slower one counts. A launch
takes a hop for each step of the ring, most of which stay inside of nodes.
"""

from dataclasses import dataclass, replace
from typing import Literal

from fsdp_compile.passes.cost.hardware import Hardware, Link
from fsdp_compile.passes.cost.roofline import all_reduce_seconds, launch_seconds, transfer_seconds

Level = Literal["node", "network"]


@dataclass(frozen=True)
class Group:
    """Ranks that take part in one collective.

    Attributes:
        size: how many they are.
        per_node: how many of them are on one node.
        hardware: what connects them.
    """

    size: int
    per_node: int
    hardware: Hardware

    @property
    def nodes(self) -> int:
        """Over how many nodes they are spread."""
        return -(-self.size // self.per_node)

    @property
    def level(self) -> Level:
        """Which links limit it."""
        return "network" if self.nodes > 1 else "node"

    @property
    def launch(self) -> float:
        """Seconds of an all-gather or reduce-scatter beside its bytes."""
        node, network = self.hardware.node, self.hardware.network
        if self.nodes == 1:
            return launch_seconds(self.size, node)
        inside = self.nodes * (self.per_node - 1)
        return max(node.latency, network.latency) + inside * node.hop + (self.nodes - 1) * network.hop

    def transfer(self, full_bytes: float) -> float:
        """Seconds of the bytes of an all-gather or reduce-scatter."""
        inside = transfer_seconds(full_bytes, self.size, self.hardware.node) if self.per_node > 1 else 0.0
        if self.nodes == 1:
            return inside
        rings = replace(self.hardware.network, bandwidth=self.hardware.network.bandwidth * self.per_node)
        return max(inside, transfer_seconds(full_bytes, self.nodes, rings))

    def all_reduce(self, full_bytes: float) -> float:
        """Seconds of an all-reduce: by a ring, or by a tree over nodes, whichever is shorter."""
        if self.size == 1:
            return 0.0
        if self.nodes == 1:
            return all_reduce_seconds(full_bytes, self.size, self.hardware.node)
        ring = self.launch * 2 + 2 * self.transfer(full_bytes)
        node = Group(self.per_node, self.per_node, self.hardware)
        inside = 2 * (node.launch + node.transfer(full_bytes)) if self.per_node > 1 else 0.0
        between = all_reduce_seconds(full_bytes / self.per_node, self.nodes, self.hardware.network)
        return min(ring, inside + between)


def custom_network(link: Link, hardware: Hardware) -> Hardware:
    """`hardware` with another link between nodes."""
    return replace(hardware, network=link)
