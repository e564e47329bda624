"""What a step computes and keeps in memory, unit by unit, in plain numbers that are priced for every cluster.

It is of one batch, one sequence length and one policy of checkpointing, and says nothing of ranks, links or seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from fsdp_compile.passes.graph.work import Work

Kernels = tuple[Work, ...]


@dataclass(frozen=True)
class UnitWork:
    """One unit, or several equal ones that follow each other.

    Attributes:
        name: its path in the model; of equal blocks, the first one's.
        parameters: how many it has.
        forward: kernels, in order.
        backward: kernels, in order, with what is computed again.
        input_bytes: what the unit before it passes to it, which is saved whatever the policy is.
        saved_bytes: what forward saves for backward, beside its input and its parameters.
        forward_bytes: the most bytes that are alive in forward beside what was saved before it and parameters.
        backward_bytes: the same in backward, without gradients of parameters.
        logits_bytes: how many of `backward_bytes` have an element for each entry of the vocabulary.
        count: how many equal ones there are.
        shapes: of its parameters, which decide on padding; (): none.
    """

    name: str
    parameters: int
    forward: Kernels
    backward: Kernels
    input_bytes: int
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    logits_bytes: int = 0
    count: int = 1
    shapes: tuple[tuple[int, ...], ...] = ()

    def checkpointed(self) -> "UnitWork":
        """Save the input alone, and compute forward again at the beginning of backward."""
        backward_bytes = max(self.backward_bytes, self.forward_bytes)
        backward = (*self.forward, *self.backward)
        return replace(self, backward=backward, saved_bytes=0, backward_bytes=backward_bytes)


@dataclass(frozen=True)
class StepWork:
    """One forward and backward of a model, on one rank.

    Attributes:
        model: its name.
        parameters: how many it has.
        begin: what comes before the first block: an embedding.
        blocks: in order; a model without repeated blocks has none.
        end: what comes after the last one: the product with the vocabulary, and the loss.
        tokens: of the batch.
    """

    model: str
    parameters: int
    begin: UnitWork
    blocks: tuple[UnitWork, ...]
    end: UnitWork
    tokens: int

    @property
    def units(self) -> Iterator[UnitWork]:
        """All of them, repeated ones as often as they are."""
        yield self.begin
        for block in self.blocks:
            for _ in range(block.count):
                yield block
        yield self.end

    @property
    def model_flops(self) -> int:
        """Operations of the model: 6 for each parameter and token, and those of attention, not halved (PaLM)."""
        attention = [each.full_flops for unit in self.units for each in unit.forward if each.kind == "attention"]
        return 6 * self.parameters * self.tokens + 3 * sum(attention)

    @property
    def recomputed_flops(self) -> int:
        """Operations of the forward that backward repeats, counted as in `model_flops`.

        Of a product in forward, backward has two: more of them are repeated ones.
        """
        forward = backward = repeated = 0
        for unit in self.units:
            forward += sum(each.flops for each in unit.forward if not each.kind.startswith("attention"))
            backward += sum(each.flops for each in unit.backward if not each.kind.startswith("attention"))
            repeated += sum(each.full_flops for each in unit.backward if each.kind == "attention")
        return max(0, backward - 2 * forward) + repeated

    def checkpointed(self, policy: str) -> "StepWork":
        """With "full", every block is checkpointed; with "selective N", every N-th; otherwise as it was traced."""
        if policy in ("none", "selective op"):
            return self
        if policy == "full":
            return replace(self, blocks=tuple(block.checkpointed() for block in self.blocks))
        every = int(policy.removeprefix("selective "))
        singles = [replace(block, count=1) for block in self.blocks for _ in range(block.count)]
        blocks = [block if at % every else block.checkpointed() for at, block in enumerate(singles, 1)]
        return replace(self, blocks=tuple(blocks))

    def in_float8(self) -> "StepWork":
        """With the blocks' products of weights in float8, and kernels that cast what they read."""
        return replace(self, blocks=tuple(
            replace(block, forward=tuple(_in_float8(block.forward)), backward=tuple(_in_float8(block.backward)))
            for block in self.blocks
        ))  # fmt: skip


def _in_float8(kernels: Kernels) -> Iterator[Work]:
    for each in kernels:
        if each.kind == "product" and each.dtype != "float32":
            yield Work(read_bytes=each.read_bytes, written_bytes=each.read_bytes // 2)
            yield replace(each, dtype="float8")
        else:
            yield each


# --- batches by substitution ------------------------------------------------------------------------------------------

# All numbers are affine in the size of the batch: a product has a row for each token, a chain bytes for each of them,
# and beside these there are parameters. Two traces give the line, and any batch is a point of it: the same integers as
# a trace of that batch would have.

BATCHES = (2, 3)
"""Sizes at which models are traced: 1 is special to many operators."""


class NotAffine(ValueError):
    """The works of two batches differ in more than numbers."""


def at_batch(first: Any, second: Any, batch: int) -> Any:
    """The work of `batch`, or a part of it, from those of the batches in `BATCHES`.

    Raises:
        NotAffine: the two differ in their structure.
    """
    if type(first) is type(second) is int:
        return first + (second - first) * (batch - BATCHES[0])
    if type(first) is type(second) is tuple and len(first) == len(second):
        return tuple(at_batch(*each, batch) for each in zip(first, second, strict=True))
    if type(first) is type(second) and isinstance(first, (StepWork, UnitWork, Work)):
        return type(first)(**{each.name: at_batch(getattr(first, each.name), getattr(second, each.name), batch)
                              for each in fields(first)})  # fmt: skip
    if first != second:
        raise NotAffine(f"batch: {first!r} becomes {second!r} with another batch")
    return first
