"""Steps shaped like Llama 3's: dimensions as in the published configurations, costs as graphs have them.

bf16, gradients reduced in fp32, AdamW's states in fp32, activation checkpoints around blocks, 8192 tokens a sequence.
Embedding, each block and head are units, and one task per direction each.
"""

from dataclasses import dataclass

from fsdp_compile.passes.cost.hardware import Hardware, Link
from fsdp_compile.passes.cost.roofline import (
    attention_seconds,
    chain_seconds,
    launch_seconds,
    product_seconds,
    transfer_seconds,
)
from fsdp_compile.passes.plan.workload import Task, UnitCost, Workload

SEQUENCE = 8192


@dataclass(frozen=True)
class Shape:
    """Widths, and how many of what."""

    dim: int
    layers: int
    heads: int
    hidden: int
    kv_heads: int = 8
    vocab: int = 128256

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """The matrices of a block: queries, keys, values, output; gate, up, down."""
        kv = self.dim // self.heads * self.kv_heads
        attention = ((self.dim, self.dim), (self.dim, kv), (self.dim, kv), (self.dim, self.dim))
        return (*attention, (self.dim, self.hidden), (self.dim, self.hidden), (self.hidden, self.dim))

    @property
    def units(self) -> dict[str, int]:
        """Parameters of each unit."""
        block = sum(rows * columns for rows, columns in self.products) + 2 * self.dim
        blocks = {f"blocks.{number}": block for number in range(self.layers)}
        return {"embedding": self.vocab * self.dim, **blocks, "head": (self.vocab + 1) * self.dim}


MODELS = {
    "8B": Shape(4096, 32, 32, 14336),
    "70B": Shape(8192, 80, 64, 28672),
    "405B": Shape(16384, 126, 128, 53248),
}


def workload(shape: Shape, batch: int, world: int, link: Link, device: Hardware, keep: bool | None = None) -> Workload:
    """One step of `batch` sequences on each of `world` ranks; `keep` is the units' choice to stay for backward."""
    tokens, sizes = batch * SEQUENCE, list(shape.units.values())
    states = 12 * sum(sizes) // world
    units = tuple(_unit(name, size, world, link, keep) for name, size in shape.units.items())
    times = [_embedding(shape, tokens, device), *[_block(shape, tokens, device)] * shape.layers]
    times.append(_head(shape, tokens, device))
    saved = 2 * tokens * shape.dim  # a block's input
    inside = [0, *[_activations(shape, tokens)] * shape.layers, 6 * tokens * shape.vocab]  # logits in bf16 and fp32
    tasks, last = [], len(units) - 1
    for number, unit in enumerate(units):
        tasks.append(
            Task(f"{unit.name} forward", times[number][0], states + saved * number + inside[number], (number,))
        )
    for number in range(last, -1, -1):
        live = states + saved * number + inside[number]
        reads = (number,) if number else ()  # the gradient of an embedding does not read it
        tasks.append(Task(f"{units[number].name} backward", times[number][1], live, reads, (number,)))
    return Workload(tuple(tasks), len(units), units, launch_seconds(world, link))


def _unit(name: str, size: int, world: int, link: Link, keep: bool | None) -> UnitCost:
    gather, reduce = (transfer_seconds(size * each, world, link) for each in (2, 4))
    return UnitCost(name, gather, reduce, 2 * size, 4 * size, keep_unsharded=keep)


def _activations(shape: Shape, tokens: int) -> int:
    """Bytes that a block saves for its backward once it is computed again."""
    return 2 * tokens * (sum(columns for _, columns in shape.products) + 2 * shape.dim)


def _product(device: Hardware, tokens: int, rows: int, columns: int) -> float:
    moved = 2 * (tokens * rows + rows * columns + tokens * columns)
    return product_seconds(2 * tokens * rows * columns, moved, rows, "bfloat16", device)


def _attention(shape: Shape, tokens: int, backward: bool, device: Hardware) -> float:
    """Two products in forward and five in backward, over half of all pairs of tokens."""
    flops = (5 if backward else 2) * tokens * SEQUENCE * shape.dim
    return attention_seconds(flops, SEQUENCE, backward, "bfloat16", device)


def _block(shape: Shape, tokens: int, device: Hardware) -> tuple[float, float]:
    """Forward, and backward that computes forward again and all products twice more."""
    products = sum(_product(device, tokens, *each) for each in shape.products)
    moved = 2 * tokens * (2 * 2 * shape.dim + 2 * 3 * shape.dim + 3 * shape.hidden)  # norms, sums, gate
    forward = products + _attention(shape, tokens, False, device) + chain_seconds(moved, True, device)
    again = 2 * products + _attention(shape, tokens, True, device) + chain_seconds(2 * moved, True, device)
    return forward, forward + again


def _embedding(shape: Shape, tokens: int, device: Hardware) -> tuple[float, float]:
    """A look-up; and a gradient that is zeros but for what it is given."""
    moved = 4 * tokens * shape.dim
    return chain_seconds(moved, True, device), chain_seconds(moved + 4 * shape.vocab * shape.dim, True, device)


def _head(shape: Shape, tokens: int, device: Hardware) -> tuple[float, float]:
    product = _product(device, tokens, shape.dim, shape.vocab)
    loss = chain_seconds(10 * tokens * shape.vocab, True, device)  # bf16 to fp32, read once more
    return product + loss, 2 * product + loss
