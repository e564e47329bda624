"""Seconds of collectives and of computing, by their bytes and operations.

Nothing here asks a device or another rank: the same input gives the same numbers everywhere.
"""

from fsdp_compile.passes.cost.hardware import Device, Link


def launch_seconds(world: int, link: Link) -> float:
    """What an all-gather or reduce-scatter among `world` ranks takes beside its bytes: `Workload.latency`.

    A ring makes `world - 1` steps.
    """
    return link.latency + link.hop * (world - 1)


def transfer_seconds(full_bytes: float, world: int, link: Link) -> float:
    """What the bytes of an all-gather or reduce-scatter take: `UnitCost.gather` and `.reduce`.

    Each rank receives all but its own part, `full_bytes * (world - 1) / world`, whichever the algorithm (Chan,
    Heimlich, Purkayastha, van de Geijn: Collective communication, 2007, section 4; NCCL's rings reach it).
    """
    return full_bytes * (world - 1) / world / link.bandwidth


def all_reduce_seconds(full_bytes: float, world: int, link: Link) -> float:
    """Seconds of one all-reduce of `full_bytes`, among `world` ranks: by ring or by tree, whichever is shorter.

    A ring is a reduce-scatter and an all-gather. A double binary tree goes up and down, `2 log2(world)` steps, and
    moves all bytes twice (Sanders, Speck, Traff: Two-tree algorithms, 2009). NCCL chooses between the two likewise.
    """
    ring = link.latency + link.hop * 2 * (world - 1) + 2 * transfer_seconds(full_bytes, world, link)
    tree = link.latency + link.hop * 2 * (world - 1).bit_length() + 2 * full_bytes / link.bandwidth
    return min(ring, tree)


def compute_seconds(flops: float, moved_bytes: float, dtype: str, device: Device) -> float:
    """Roofline: the longer of computing `flops` in `dtype` and of moving bytes from and to memory.

    (Williams, Waterman, Patterson: Roofline, 2009.)

    Raises:
        ValueError: there is something to compute and the device's table has no figure for `dtype`.
    """
    moving = moved_bytes / device.bandwidth
    if not flops:
        return moving
    if dtype not in device.flops:
        known = ", ".join(device.flops)
        raise ValueError(f"dtype: expected one that device {device.name} has a figure for ({known}), found {dtype}")
    return max(flops / (device.flops[dtype] * device.efficiency), moving)
