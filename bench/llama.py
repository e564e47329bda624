"""Steps shaped like Llama 3's, in the closed form of `runs/transformers.py`, as workloads for the planner.

bf16, gradients reduced in fp32, AdamW's states in fp32, activation checkpoints around blocks, 8192 tokens a sequence.
Embedding, each block and head are units, and one task per direction each.
"""

from collections.abc import Sequence

from bench.runs.transformers import Run, Transformer, work_of
from fsdp_compile.passes.cost.hardware import Hardware, Link
from fsdp_compile.passes.cost.roofline import launch_seconds, transfer_seconds
from fsdp_compile.passes.graph.prices import work_seconds
from fsdp_compile.passes.graph.work import Work
from fsdp_compile.passes.plan.workload import Task, UnitCost, Workload

SEQUENCE = 8192


class Shape(Transformer):
    """Dimensions as in the published configurations."""

    @property
    def units(self) -> dict[str, int]:
        """Parameters of each unit."""
        blocks = {f"blocks.{number}": self.block_parameters for number in range(self.layers)}
        embedding = self.vocabulary * self.hidden
        return {"embedding": embedding, **blocks, "head": self.other_parameters - embedding}


def _llama(name: str, layers: int, hidden: int, heads: int, inner: int) -> Shape:
    return Shape(name, layers, hidden, heads, 8, hidden // heads, inner, 128256, gated=True, rms=True, fused_qkv=False,
                 rotary=True, tied=False)  # fmt: skip


MODELS = {
    "8B": _llama("8B", 32, 4096, 32, 14336),
    "70B": _llama("70B", 80, 8192, 64, 28672),
    "405B": _llama("405B", 126, 16384, 128, 53248),
}


def workload(shape: Shape, batch: int, world: int, link: Link, device: Hardware, keep: bool | None = None) -> Workload:
    """One step of `batch` sequences on each of `world` ranks; `keep` is the units' choice to stay for backward."""

    def cost(name: str, size: int) -> UnitCost:
        gather, reduce = (transfer_seconds(size * each, world, link) for each in (2, 4))
        return UnitCost(name, gather, reduce, 2 * size, 4 * size, keep_unsharded=keep)

    def task(number: int, direction: str, kernels: Sequence[Work], live: int) -> Task:
        backward = direction == "backward"
        reads = () if backward and number == 0 else (number,)  # the gradient of an embedding does not read it
        seconds = sum(work_seconds(each, device) for each in kernels)
        return Task(f"{units[number].name} {direction}", seconds, live, reads, (number,) if backward else ())

    units = tuple(cost(*each) for each in shape.units.items())
    work = list(work_of(shape, Run(batch, SEQUENCE, "full", compiled=True, compiled_loss=True)).units)
    live, forward, backward = 12 * sum(shape.units.values()) // world, [], []
    for number, each in enumerate(work):
        live += each.input_bytes
        forward.append(task(number, "forward", each.forward, live + each.forward_bytes))
        backward.append(task(number, "backward", each.backward, live + each.backward_bytes))
    return Workload((*forward, *reversed(backward)), len(units), units, launch_seconds(world, link))
