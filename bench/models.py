"""The models that systems train, and what they are fed."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

Inputs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, what it is fed and how much of it a step is."""

    build: Callable[[], nn.Module]  # returns its loss when called with a batch
    blocks: Callable[[nn.Module], Sequence[nn.Module]]  # that become units, besides the root
    batch: Callable[[int, int], Inputs]  # (step, rank) -> this rank's part
    per_step: int  # tokens that a rank trains on in one step
    ends: tuple[str, list[str]] = ("tokens", ["norm", "head"])  # modules before and after the blocks


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    return list(model.get_submodule("blocks").children())


def help_text() -> Tensor:
    """Bytes of the help texts that every Python carries, 1-D."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


def gpt(batch: int = 4, context: int = 128, **shape: int) -> Workload:
    """The example's GPT, 10.9 M parameters, on English text. Untied: SimpleFSDP unties weights silently."""
    config = replace(GPTConfig(tied=False, context=context), **shape)
    text = help_text()

    def draw(step: int, rank: int) -> Inputs:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        at = torch.randint(len(text) - config.context, (batch, 1), generator=generator)
        window = text[at + torch.arange(config.context + 1)].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    return Workload(lambda: GPT(config), blocks_of, draw, batch * config.context)


class Float8(torch.autograd.Function):
    """x @ w.T with `w` rounded to float8 with one scale, as in float8 training; backward uses the rounded one too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = 448.0 / weight.abs().amax().clamp(min=1e-12)
        rounded = (weight * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x, rounded, scale)
        return x @ (rounded.to(x.dtype) / scale.to(x.dtype)).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, rounded, scale = ctx.saved_tensors
        return grad @ (rounded.to(x.dtype) / scale.to(x.dtype)), (grad.flatten(0, -2).t() @ x.flatten(0, -2)).float()


class Float8Linear(nn.Linear):
    """A linear layer with that product, in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        x = Float8.apply(x.bfloat16(), self.weight)
        return x if self.bias is None else x + self.bias.bfloat16()


def in_float8(blocks: Sequence[nn.Module]) -> None:
    """Let the linear layers of blocks multiply in float8."""
    for layer in (module for block in blocks for module in block.modules()):
        if type(layer) is nn.Linear:
            layer.__class__ = Float8Linear


class LlamaBlock(nn.Module):
    """Grouped-query attention and a gated MLP in the shapes of Llama 3 8B: 218 M parameters."""

    def __init__(self, dim: int = 4096, heads: int = 32, kv_heads: int = 8, hidden: int = 14336) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q = rotate(self.wq(h).unflatten(-1, (self.heads, -1)).transpose(1, 2), cos, sin)  # (batch, heads, time, d)
        k = rotate(self.wk(h).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2), cos, sin)
        v = self.wv(h).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: `cos`, `sin` are (time, d / 2)."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).type_as(x)


class Llama(nn.Module):
    """Tokens and targets to the mean cross-entropy."""

    def __init__(self, layers: int, vocab: int, context: int, **shape: int) -> None:
        super().__init__()
        blocks = [LlamaBlock(**shape) for _ in range(layers)]
        dim, head_dim = blocks[0].wq.in_features, blocks[0].head_dim
        self.blocks = nn.ModuleList(blocks)
        self.tokens, self.norm = nn.Embedding(vocab, dim), nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        speeds = 500_000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(context), speeds)  # (context, head_dim / 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def llama(layers: int = 4, context: int = 4096, batch: int = 1, vocab: int = 128_256, **shape: int) -> Workload:
    """Llama 3 8B with fewer blocks, on random tokens: four blocks and both ends are 1.9 G parameters."""

    def draw(step: int, rank: int) -> Inputs:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        window = torch.randint(vocab, (batch, context + 1), generator=generator)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    return Workload(lambda: Llama(layers, vocab, context, **shape), blocks_of, draw, batch * context)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt": gpt,
    "gpt_few_tokens": lambda: gpt(batch=1, context=8),  # activations are nothing beside parameters
    "gpt_small": lambda: gpt(batch=2, context=32, layers=2, heads=2, dim=64),
    "llama": llama,
}
