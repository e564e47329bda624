"""Units in which the loops of parameters and gradients are alike: what an overwritten buffer may get wrong."""

import torch
from models import Case, seeded
from torch import Tensor, nn


class Scaled(nn.Module):
    """Elementwise with one example: a gradient has the loops of what reads its parameter, and waits for no product."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.rand(width))
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x * self.scale))) * self.scale + x * self.shift


class Mirrored(nn.Module):
    """Reads its parameters in other places than where their gradients go, and twice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.square = nn.Parameter(0.2 * torch.randn(width, width))
        self.norm = nn.LayerNorm(width)
        self.above, self.below = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))  # of one gradient

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x * self.weight.flip(0)) * self.weight
        y = y + (y @ self.square) @ self.square.t()
        return torch.tanh(self.norm(y) + self.above + self.below) + y * (self.square * self.weight).sum(1)


def awkward(pairs: int = 2) -> Case:
    """Pairs of such units between two linear layers."""

    def build() -> nn.Module:
        units = (make() for _ in range(pairs) for make in (Scaled, Mirrored))
        return nn.Sequential(nn.Linear(8, 8), *units, nn.Linear(8, 1))

    def batch(seed: int, size: int) -> tuple[Tensor]:
        return (torch.randn(size, 8, generator=seeded(seed)),)

    return Case(build, batch, lambda model, inputs: model(inputs[0]).square().mean())
