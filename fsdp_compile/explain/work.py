"""What a step computes and keeps in memory, unit by unit, in plain numbers: what is priced for every cluster.

    StepWork     the units of a model, in order: what comes before its blocks, the blocks, what comes after them
    UnitWork     kernels of one unit's forward and backward, bytes that forward saves, bytes that are alive beside these

It is of one batch, one sequence length and one policy of checkpointing, and says nothing of ranks, links or seconds.
Where a model has many equal blocks, they are one `UnitWork` that is repeated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from fsdp_compile.passes.cost.hardware import Hardware
from fsdp_compile.passes.cost.roofline import attention_seconds, chain_seconds, product_seconds


@dataclass(frozen=True)
class Product:
    """`batch` matrix products of [rows, inner] and [inner, columns].

    Attributes:
        moved: bytes of all matrices.
        dtype: name of their dtype.
        weight: whether one of them is a parameter, or a gradient of one: those can be in float8.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    moved: int
    dtype: str = "bfloat16"
    weight: bool = True

    @property
    def flops(self) -> int:
        """Operations."""
        return 2 * self.batch * self.rows * self.inner * self.columns

    def seconds(self, hardware: Hardware) -> float:
        """How long it takes there."""
        return product_seconds(self.flops, self.moved, self.inner, self.dtype, hardware)


@dataclass(frozen=True)
class Attention:
    """A fused attention, or its backward.

    Attributes:
        batch: sequences.
        heads: of queries.
        queries: tokens of a sequence.
        keys: tokens that each could see.
        width: elements of a head of queries and keys.
        causal: whether a token sees none that follow it, so that half is computed.
        backward: whether this is the backward, which computes five products in place of two.
        dtype: name of the dtype.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    causal: bool
    backward: bool
    dtype: str = "bfloat16"

    @property
    def full_flops(self) -> int:
        """Operations of the model, as if every token saw all others: four products of backward, none of them twice."""
        return (8 if self.backward else 4) * self.batch * self.heads * self.queries * self.keys * self.width

    @property
    def flops(self) -> int:
        """Operations that run."""
        products = 5 if self.backward else 2
        return products * 2 * self.batch * self.heads * self.queries * self.keys * self.width // (1 + self.causal)

    def seconds(self, hardware: Hardware) -> float:
        """How long it takes there."""
        return attention_seconds(self.flops, self.keys, self.backward, self.dtype, hardware)


@dataclass(frozen=True)
class Chain:
    """A kernel that reads and writes memory and computes no products.

    Attributes:
        moved: bytes read and written.
        fused: whether it is a chain of operators that was compiled, or one operator that runs eagerly.
    """

    moved: int
    fused: bool = True

    @property
    def flops(self) -> int:
        """None that count."""
        return 0

    def seconds(self, hardware: Hardware) -> float:
        """How long it takes there."""
        return chain_seconds(self.moved, self.fused, hardware)


Kernel = Product | Attention | Chain


@dataclass(frozen=True)
class UnitWork:
    """One unit.

    Attributes:
        name: its path in the model; of equal blocks, the first one's.
        parameters: how many it has.
        forward: kernels, in order.
        backward: kernels, in order, with what is computed again.
        input_bytes: what the unit before it passes to it, which is saved whatever the policy is.
        saved_bytes: what forward saves for backward, beside its input and its parameters.
        forward_bytes: the most bytes that are alive in forward beside what was saved before it and parameters.
        backward_bytes: the most bytes that are alive in backward beside what was saved before it and parameters;
            gradients of parameters are not among them.
        logits_bytes: how many of `backward_bytes` have an element for each entry of the vocabulary.
        count: how many equal ones follow each other.
    """

    name: str
    parameters: int
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    input_bytes: int
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    logits_bytes: int = 0
    count: int = 1

    def checkpointed(self) -> "UnitWork":
        """The unit with its forward computed again at the beginning of its backward: only its input is saved."""
        return replace(
            self,
            backward=(*self.forward, *self.backward),
            saved_bytes=0,
            backward_bytes=max(self.backward_bytes, self.forward_bytes),
        )


@dataclass(frozen=True)
class StepWork:
    """One forward and backward of a model, on one rank.

    Attributes:
        model: its name.
        parameters: how many it has.
        begin: what comes before the first block: an embedding.
        blocks: in order; a model without repeated blocks has none.
        end: what comes after the last one: the product with the vocabulary, and the loss.
        tokens: of one batch.
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
        attention = [each.full_flops for unit in self.units for each in unit.forward if isinstance(each, Attention)]
        return 6 * self.parameters * self.tokens + 3 * sum(attention)

    @property
    def recomputed_flops(self) -> int:
        """Operations of the forward that backward repeats, counted as in `model_flops`.

        Of a product in forward, backward has two: more of them are repeated ones.
        """
        units = list(self.units)
        forward, backward = (
            sum(each.flops for unit in units for each in kernels(unit) if isinstance(each, Product))
            for kernels in (lambda unit: unit.forward, lambda unit: unit.backward)
        )
        repeated = (each for unit in units for each in unit.backward if isinstance(each, Attention))
        return max(0, backward - 2 * forward) + sum(each.full_flops for each in repeated if not each.backward)

    def checkpointed(self, policy: str) -> "StepWork":
        """With "full", every block is checkpointed; with "selective N", every N-th."""
        if policy == "full":
            return replace(self, blocks=tuple(block.checkpointed() for block in self.blocks))
        every = int(policy.removeprefix("selective "))
        blocks: list[UnitWork] = []
        index = 0
        for block in self.blocks:
            for _ in range(block.count):
                index += 1
                blocks.append(replace(block.checkpointed() if index % every == 0 else block, count=1))
        return replace(self, blocks=tuple(blocks))

    def in_float8(self) -> "StepWork":
        """With the blocks' products of weights in float8, and kernels that cast what they read."""
        return replace(self, blocks=tuple(_in_float8(block) for block in self.blocks))


def _in_float8(unit: UnitWork) -> UnitWork:
    def cast(kernels: tuple[Kernel, ...]) -> Iterator[Kernel]:
        for each in kernels:
            if isinstance(each, Product) and each.weight and each.dtype != "float32":
                read = each.rows * each.inner + each.inner * each.columns
                yield Chain(each.batch * read * 3)  # two bytes are read and one is written
                yield replace(each, dtype="float8")
            else:
                yield each

    return replace(unit, forward=tuple(cast(unit.forward)), backward=tuple(cast(unit.backward)))


# --- batches by substitution ------------------------------------------------------------------------------------------

# All numbers of a batch are affine in its size: a product has a row for each token, a chain bytes for each of them, and
# beside these there are parameters. Two traces give the line, and any batch is a point of it: the same integers as a
# trace of that batch would have.

BATCHES = (2, 3)
"""Sizes at which models are traced: 1 is special to many operators."""

T = TypeVar("T")


class NotAffine(ValueError):
    """The works of two batches differ in more than numbers that are affine in the batch."""


def at_batch(first: StepWork, second: StepWork, batch: int) -> StepWork:
    """The work of `batch`, from those of the batches in `BATCHES`.

    Raises:
        NotAffine: the two differ in their structure.
    """
    return _point(first, second, batch)


def _point(first: T, second: T, batch: int) -> T:
    if type(first) is not type(second):
        raise NotAffine(f"batch: expected equal structures, found {type(first).__name__} and {type(second).__name__}")
    if isinstance(first, (str, bool)):
        if first != second:
            raise NotAffine(f"batch: expected equal structures, found {first} and {second}")
        return first
    if isinstance(first, int):
        return first + (second - first) * (batch - BATCHES[0])  # type: ignore[operator,return-value]  # both are int
    if isinstance(first, tuple):
        return _points(first, second, batch)
    values = {each.name: _point(getattr(first, each.name), getattr(second, each.name), batch) for each in fields(first)}  # type: ignore[arg-type]  # a dataclass
    return type(first)(**values)


def _points(first: Any, second: Any, batch: int) -> Any:
    if len(first) != len(second):
        raise NotAffine(f"batch: expected as many kernels, found {len(first)} and {len(second)}")
    return tuple(_point(one, other, batch) for one, other in zip(first, second, strict=True))


def seconds_of(kernels: tuple[Kernel, ...], hardware: Hardware) -> float:
    """How long kernels take one after the other."""
    return sum(each.seconds(hardware) for each in kernels)
