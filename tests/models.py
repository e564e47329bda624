"""Small models that all tiers train, and small modules that read their parameters in unusual ways.

    case = MODELS["gpt"]
    torch.manual_seed(0); model = case.build()
    inputs = case.batch(seed=1, size=4)          a global batch; `part` cuts out what one of several ranks sees
    case.loss(model, inputs).backward()          a mean over the batch, so the mean over ranks is the whole's

Sizes are odd, so that flat parameters have padding and shards end in the middle of parameters; kernels are few, so that
compiling takes seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model to train: how to build it, what to feed it, what to minimise."""

    build: Callable[[], nn.Module]  # draws from the global generator
    batch: Callable[[int, int], Inputs]  # (seed, size) -> tensors whose first dimension is `size`
    loss: Callable[[nn.Module, Inputs], Tensor]  # a mean over the batch, shape ()


def part(inputs: Inputs, rank: int, world_size: int) -> Inputs:
    """What `rank` sees of a global batch whose size divides by `world_size`."""
    return tuple(whole.chunk(world_size)[rank] for whole in inputs)


# --- GPT --------------------------------------------------------------------------------------------------------------

VOCABULARY, CONTEXT, WIDTH, HEADS = 35, 9, 20, 2


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each added to a normalised stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))  # (batch, time, 3, heads, width/heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width/heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens to logits; `tied` shares the token embedding with the head."""

    def __init__(self, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time)
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (batch, time, vocabulary)


def text(seed: int, size: int) -> Inputs:
    """Random tokens and the tokens that follow them, each `[size, CONTEXT]`."""
    drawn = torch.randint(VOCABULARY, (size, CONTEXT + 1), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def cross_entropy(model: nn.Module, inputs: Inputs) -> Tensor:
    """Mean cross-entropy of the logits, whose last dimension is the classes', with the targets."""
    *rest, targets = inputs
    return F.cross_entropy(model(*rest).flatten(0, -2), targets.flatten())


# --- perceptrons ------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A two-layer perceptron added to its input."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, width)
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Linear layers around a list of blocks."""

    def __init__(self, blocks: list[nn.Module], inputs: int = 7, width: int = 11, outputs: int = 5) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:  # (batch, inputs)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # (batch, outputs)


def mlp(blocks: int = 3, width: int = 11, hidden: int = 23) -> Stack:
    """A residual perceptron whose blocks are units."""
    return Stack([Residual(width, hidden) for _ in range(blocks)], width=width)


def frozen() -> Stack:
    """Blocks 0 and 2 are frozen, gradients pass only through 2; so are one layer of block 1 and the stem."""
    model = mlp(blocks=4)
    for module in (model.stem, model.blocks[0], model.blocks[1].up, model.blocks[2]):
        module.requires_grad_(False)
    return model


def vectors(seed: int, size: int, inputs: int = 7, outputs: int = 5) -> Inputs:
    """Random inputs `[size, inputs]` and targets `[size, outputs]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, inputs, generator=generator), torch.randn(size, outputs, generator=generator)


def squared_error(model: nn.Module, inputs: Inputs) -> Tensor:
    """Mean squared distance of the outputs from the targets."""
    *rest, targets = inputs
    return F.mse_loss(model(*rest), targets)


# --- convolutions -----------------------------------------------------------------------------------------------------


class ConvBlock(nn.Module):
    """A convolution, normalised within each example, added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(3, channels)

    def forward(self, x: Tensor) -> Tensor:  # (batch, channels, height, width)
        return x + F.relu(self.norm(self.conv(x)))


class Conv(nn.Module):
    """Images to logits."""

    def __init__(self, channels: int = 9, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3)
        self.blocks = nn.Sequential(ConvBlock(channels), ConvBlock(channels))
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((-2, -1)))  # (batch, classes)


def images(seed: int, size: int, classes: int = 5) -> Inputs:
    """Random images `[size, 3, 8, 8]` and classes `[size]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(classes, (size,), generator=generator)


MODELS: dict[str, Case] = {
    "gpt": Case(GPT, text, cross_entropy),
    "mlp": Case(mlp, vectors, squared_error),
    "conv": Case(Conv, images, cross_entropy),
    "tied": Case(partial(GPT, tied=True), text, cross_entropy),
    "frozen": Case(frozen, vectors, squared_error),
}


# --- parameters read in unusual ways ----------------------------------------------------------------------------------


class AttentionBlock(nn.Module):
    """`nn.MultiheadAttention` reads the parameters of its own child `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(10, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, 10)
        return x + self.attention(x, x, x, need_weights=False)[0]


class ListBlock(nn.Module):
    """Weights in an `nn.ParameterList`, by number and in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(11, 11) / 11 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weights[0]
        for weight in self.weights:
            x = x + torch.tanh(x @ weight)
        return x


class DictBlock(nn.Module):
    """Weights in an `nn.ParameterDict`, by key."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({"up": torch.randn(11, 13) / 11, "down": torch.randn(13, 11) / 13})

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weights["up"]) @ self.weights["down"]


class ReadsChild(nn.Module):
    """Uses its child's parameters and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(11, 11)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.inner.weight.t(), self.inner.bias))


def tied_blocks() -> Stack:
    """The blocks share one weight; each has a bias of its own."""
    model = mlp(blocks=3)
    for block in model.blocks[1:]:
        block.up.weight = model.blocks[0].up.weight
    return model


class End(nn.Module):
    """The first or the last stage of a language model; they share `weight`, `[vocabulary, width]`."""

    def __init__(self, weight: nn.Parameter, embeds: bool) -> None:
        super().__init__()
        self.weight, self.embeds = weight, embeds
        self.bias = nn.Parameter(torch.randn(weight.shape[1 if embeds else 0]))

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight) + self.bias if self.embeds else F.linear(x, self.weight, self.bias)


def tied_ends() -> nn.Sequential:
    """Embedding and head lie in different blocks and are one parameter."""
    weight = nn.Parameter(torch.randn(VOCABULARY, 11))
    return nn.Sequential(End(weight, True), Residual(11, 13), Residual(11, 13), End(weight, False))


def sequences(seed: int, size: int) -> Inputs:
    """Random inputs and targets, both `[size, 6, 10]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, 10, generator=generator), torch.randn(size, 6, 10, generator=generator)


MODULES: dict[str, Case] = {
    "mha": Case(lambda: nn.Sequential(AttentionBlock(), AttentionBlock()), sequences, squared_error),
    "parameter_list": Case(lambda: Stack([ListBlock(), ListBlock()]), vectors, squared_error),
    "parameter_dict": Case(lambda: Stack([DictBlock(), DictBlock()]), vectors, squared_error),
    "reads_child": Case(lambda: Stack([ReadsChild(), ReadsChild()]), vectors, squared_error),
    "tied_blocks": Case(tied_blocks, vectors, squared_error),
    "tied_ends": Case(tied_ends, text, cross_entropy),
}


# --- activation checkpointing -----------------------------------------------------------------------------------------

Checkpointing = Literal["none", "inside", "around", "pair", "reentrant"]


class CheckpointedResidual(Residual):
    """A block that recomputes its own forward: the checkpoint lies inside the unit."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedStack(Stack):
    """Recomputes its blocks, one by one or in pairs: checkpoints lie around the units."""

    def __init__(self, blocks: list[nn.Module], together: int, reentrant: bool) -> None:
        super().__init__(blocks)
        self.together, self.reentrant = together, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for first in range(0, len(self.blocks), self.together):
            x = checkpoint(self._run, first, x, use_reentrant=self.reentrant)
        return self.head(x)

    def _run(self, first: int, x: Tensor) -> Tensor:
        for block in self.blocks[first : first + self.together]:
            x = block(x)
        return x


def checkpointed(how: Checkpointing) -> Stack:
    """The same function and parameters for every `how`: where, if anywhere, activations are recomputed."""
    blocks: list[nn.Module] = [CheckpointedResidual(11, 23) if how == "inside" else Residual(11, 23) for _ in range(4)]
    if how in ("none", "inside"):
        return Stack(blocks)
    return CheckpointedStack(blocks, together=2 if how == "pair" else 1, reentrant=how == "reentrant")
