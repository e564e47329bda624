"""A small GPT over bytes: 10.8 M parameters by default, pre-norm blocks, causal attention, its loss inside."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model; `tied` shares the token embedding with the head, `checkpointing` recomputes every block."""

    vocab: int = 256
    context: int = 128
    layers: int = 6
    heads: int = 6
    dim: int = 384
    tied: bool = True
    checkpointing: bool = False


class Attention(nn.Module):
    """Causal self-attention; no bias on q, k, v, because the true gradient of the key's is zero."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (batch, time, 3, heads, dim/heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, dim/heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, dim/heads)
        return self.proj(y.transpose(1, 2).flatten(2))  # (batch, time, dim)


class MLP(nn.Module):
    """Two linear layers, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.proj = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.up(x)))  # (batch, time, 4 dim) inside


class Block(nn.Module):
    """Attention and MLP, each added to a normalised stream; the unit that `fully_shard` finds by itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.checkpointing = config.checkpointing
        self.attention_norm, self.attention = nn.LayerNorm(config.dim), Attention(config)
        self.mlp_norm, self.mlp = nn.LayerNorm(config.dim), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        # The region is inside forward: a sharding unit around the block gathers outside it, not again in the replay.
        return checkpoint(self._body, x, use_reentrant=False) if self.checkpointing else self._body(x)

    def _body(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # (batch, time, dim)


class GPT(nn.Module):
    """Tokens to logits or, given targets, to the mean cross-entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.scale = math.sqrt(config.dim)  # small weights suit the head, the stream wants larger ones
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Parameter(torch.empty(config.context, config.dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        self.init_weights()

    def init_weights(self) -> None:
        """GPT-2's: normal with deviation 0.02, less where a block adds to the stream, so its variance stays at one."""
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.layers))
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.scale * self.tokens(tokens) + self.positions[: tokens.shape[1]]  # (batch, time, dim)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (batch, time, vocab)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())  # ()


def make() -> GPT:
    """The default one, for commands such as `fsdp-compile compare examples/gpt.py:make`."""
    return GPT(GPTConfig())
