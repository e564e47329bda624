"""What the examples of frameworks train: two epochs over 64 rows, of which a step sees 8 on all ranks together."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

ROWS, BATCH, ACCUMULATE, MAX_NORM = 64, 4, 2, 0.1  # BATCH: rows of a rank


def rows() -> TensorDataset:
    """Inputs and targets."""
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :2].sin() + x[:, 2:4])


class Net(nn.Module):
    """Blocks and a head, the same for every caller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)) for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
