"""Work of decoder-only transformers in closed form, for runs of which only the sizes are known.

The kernels are those that tracing finds in such a model (`tests/fake/test_foresight.py` compares the two): products and
attention to the last number, the bytes of chains as eager operators or Inductor's fused loops move them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fsdp_compile.explain.unit_work import StepWork, UnitWork
from fsdp_compile.passes.graph.work import Kind, Work


@dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder-only transformer."""

    name: str
    layers: int  # blocks
    hidden: int  # width between blocks
    heads: int
    kv_heads: int
    head: int  # width of a head
    inner: int  # width inside the MLP
    vocabulary: int
    gated: bool = False  # the MLP multiplies two projections (SwiGLU), three matrices in all
    rms: bool = False  # norms are RMSNorm, without biases; otherwise LayerNorm
    norm_biases: bool = False  # of LayerNorms
    biases: bool = False  # of linear layers
    fused_qkv: bool = True  # one product makes queries, keys and values
    rotary: bool = False
    positions: int = 0  # entries of a table of learned positions
    tied: bool = True  # embedding and output share one matrix
    fused_loss: bool = False  # one kernel makes the loss from logits in two bytes
    moves: float = 1.0  # how many times the bytes of their operators the eager kernels of a block move

    @property
    def qkv(self) -> tuple[int, int]:
        """Widths of all queries, and of all keys or values."""
        return self.heads * self.head, self.kv_heads * self.head

    @property
    def products(self) -> list[tuple[int, int]]:
        """(inner, columns) of the products with a block's weights, in order."""
        queries, keys = self.qkv
        widths = (queries + 2 * keys,) if self.fused_qkv else (queries, keys, keys)
        first = [(self.hidden, width) for width in widths]
        up = [(self.hidden, self.inner)] * (2 if self.gated else 1)
        return [*first, (queries, self.hidden), *up, (self.inner, self.hidden)]

    @property
    def block_parameters(self) -> int:
        norms = 2 * self.hidden * (2 if self.norm_biases else 1)
        biases = sum(columns for _, columns in self.products) if self.biases else 0
        return sum(inner * columns for inner, columns in self.products) + norms + biases

    @property
    def other_parameters(self) -> int:
        tables = self.vocabulary * (1 if self.tied else 2) + self.positions
        return self.hidden * (tables + 1 + self.norm_biases)

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.other_parameters


@dataclass(frozen=True)
class Run:
    """How a transformer is run; names are those of `Setting`."""

    batch: int
    sequence: int
    checkpointing: str = "none"
    compiled: bool = False
    compiled_loss: bool = False
    width: int = 2  # bytes of an activation
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def product(self, rows: int, inner: int, columns: int) -> Work:
        read, written = rows * inner + inner * columns, rows * columns
        flops = 2 * rows * inner * columns
        return Work(flops, self.width * read, self.width * written, "product", inner, self.dtype)

    def chains(self, moved: Iterable[int]) -> list[Work]:
        """Kernels that move so many bytes each."""
        return [Work(read_bytes=each, kind="chain" if self.compiled else "operator") for each in moved]

    def of_weight(self, inner: int, columns: int) -> tuple[Work, Work, Work]:
        """The product with a weight, and in backward the gradients of the weight and of the input."""
        sizes = (self.tokens, inner, columns), (inner, self.tokens, columns), (self.tokens, columns, inner)
        forward, weight, given = (self.product(*each) for each in sizes)
        return forward, weight, given


def work_of(model: Transformer, run: Run) -> StepWork:
    """One forward and backward of `model`."""
    block = _block(model, run)
    work = StepWork(model.name, model.parameters, _begin(model, run), (block,), _end(model, run), run.tokens)
    return work if run.checkpointing in ("none", "selective op") else work.checkpointed(run.checkpointing)


def _block(model: Transformer, run: Run) -> UnitWork:
    tokens, width = run.tokens, run.width
    attend = [_attention(model, run, backward) for backward in (False, True)]
    products = [run.of_weight(*sizes) for sizes in model.products]
    mixing = len(model.products) - (4 if model.gated else 3)
    chains, chains_backward = map(run.chains, _chains(model, run))
    forward = [each[0] for each in products]
    forward = [*forward[:mixing], attend[0], *forward[mixing:], *chains]
    backward = [*(each for three in reversed(products) for each in three[1:]), attend[1], *chains_backward]
    saved = everything = _saved(model, run)
    if run.checkpointing == "selective op":  # outputs of attention and of every second product are saved
        backward = [*(each[0] for each in products[1::2]), *chains, *backward]
        columns = model.qkv[0] + sum(columns for _, columns in model.products[:-1:2])  # none reads the last one
        saved = width * tokens * columns + 4 * tokens * model.heads
    # Beside what is saved, the widest gradients are alive; of what is computed again, all that backward reads is.
    widest = width * tokens * max(model.inner * (3 if model.gated else 2), 2 * sum(model.qkv))
    return UnitWork(
        "blocks.0",
        model.block_parameters,
        tuple(forward),
        tuple(backward),
        input_bytes=width * tokens * model.hidden,
        saved_bytes=saved,
        forward_bytes=saved + widest,
        backward_bytes=max(saved, everything) + widest,
        count=model.layers,
    )


def _attention(model: Transformer, run: Run, backward: bool) -> Work:
    """Causal: of two products, or five in backward, half is computed."""
    flops = (5 if backward else 2) * run.batch * model.heads * run.sequence**2 * model.head
    kind: Kind = "attention backward" if backward else "attention"
    return Work(flops, kind=kind, inner=run.sequence, dtype=run.dtype, causal=True)


def _chains(model: Transformer, run: Run) -> tuple[list[int], list[int]]:
    """Bytes of the kernels beside products and attention: of forward, and of backward."""
    unit = run.tokens * run.width  # bytes of one column
    hidden, inner, rotated = unit * model.hidden, unit * model.inner, unit * sum(model.qkv)
    if run.compiled:  # a norm is fused with the residual sum before it
        forward = [2 * hidden, 4 * hidden, 3 * inner if model.gated else 2 * inner]
        backward = [4 * hidden, 5 * hidden, (6 if model.gated else 3) * inner]
        forward += [2 * rotated] if model.rotary else []
        backward += [2 * rotated] if model.rotary else []
        return forward, backward
    norm, norm_backward = ([18 * hidden], [30 * hidden]) if model.rms else ([2 * hidden], [3 * hidden, 2 * hidden])
    residual, summed = [3 * hidden], [3 * hidden]
    gate = [2 * inner, 3 * inner] if model.gated else [2 * inner]
    gate_backward = [3 * inner, 3 * inner, 3 * inner] if model.gated else [3 * inner]
    turn = [10 * rotated] if model.rotary else []
    split = [2 * (rotated + unit * model.qkv[1])] if model.fused_qkv else [3 * hidden, 3 * hidden]
    forward = [*norm, *turn, *residual, *norm, *gate, *residual]
    backward = [*norm_backward, *turn, *split, *summed, *norm_backward, *gate_backward, *summed]
    if model.biases:
        backward += [unit * columns for _, columns in model.products]
    return [round(model.moves * each) for each in forward], [round(model.moves * each) for each in backward]


def _saved(model: Transformer, run: Run) -> int:
    """Bytes that a forward without checkpointing saves, beside its input."""
    queries, keys = model.qkv
    columns = queries + 2 * keys + queries + model.hidden  # queries, keys, values; what attention returns; the sum
    columns += 2 * model.hidden + model.inner * (3 if model.gated else 2)  # what products read, and the activation
    if not run.compiled:
        columns += (7 * model.hidden if model.rms else 0) + (model.inner if model.gated else 0)  # in float32; silu
    return run.width * run.tokens * columns + 4 * run.tokens * model.heads


def _begin(model: Transformer, run: Run) -> UnitWork:
    hidden, table = run.tokens * run.width * model.hidden, run.width * model.hidden * model.vocabulary
    return UnitWork(
        "embedding",
        model.hidden * (model.vocabulary + model.positions),
        tuple(run.chains([2 * hidden, 3 * hidden] if model.positions else [2 * hidden])),
        tuple(run.chains([3 * hidden, table])),
        input_bytes=8 * run.tokens,
        saved_bytes=0,
        forward_bytes=hidden,
        backward_bytes=2 * hidden,
    )


def _end(model: Transformer, run: Run) -> UnitWork:
    tokens, width = run.tokens, run.width
    hidden, logits = tokens * width * model.hidden, tokens * model.vocabulary
    forward, weight, given = run.of_weight(model.hidden, model.vocabulary)
    norm = 18 if model.rms and not run.compiled_loss else 2
    if model.fused_loss:
        chains, chains_backward, alive, saved = [2 * logits], [4 * logits], 2 * logits, 2 * logits
    elif run.compiled_loss:
        chains, chains_backward, alive, saved = [4 * logits], [4 * logits], 4 * logits, 2 * logits
    else:  # a cast to float32, log_softmax, its backward, and the cast of that
        chains, chains_backward = [6 * logits, 8 * logits], [4 * logits, 12 * logits, 6 * logits]
        alive, saved = 12 * logits, 4 * logits
    outside = replace(run, compiled=run.compiled_loss).chains
    return UnitWork(
        "output",
        model.other_parameters - model.hidden * (model.vocabulary + model.positions),
        (*outside([norm * hidden]), forward, *outside(chains)),
        (*outside(chains_backward), weight, given, *outside([(norm + 1) * hidden])),
        input_bytes=hidden,
        saved_bytes=saved + hidden,
        forward_bytes=hidden + max(alive, (2 + 8 * (not model.fused_loss and not run.compiled_loss)) * logits),
        backward_bytes=2 * hidden + alive,
        logits_bytes=alive,
    )
