"""Optimizers of complete matrices step as on one process, while each rank computes what it owns."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import MODELS, Case, Routed, squared_error, vectors
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from fsdp_compile.optim.matrix_step import MatrixUpdates

from .ranks import Ranks
from .same_bits import LowRank
from .training import reference_and_model, whole, mine

STEPS = 20


class Wide(nn.Module):
    """Matrices wider than high, higher than wide, of one shape several times, beside vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 41), nn.Linear(41, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 19), nn.GELU(), nn.Linear(19, 7)) for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.up(x)))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


CASES: dict[str, Case] = {
    **MODELS,
    "wide": Case(Wide, vectors, squared_error),
    "experts": Case(Routed, partial(vectors, inputs=8, outputs=8), squared_error),
    "lora": Case(LowRank, vectors, squared_error),
}


def optimizers(model: nn.Module, **options: Any) -> list[Optimizer]:
    """As people write it: Muon for matrices, AdamW for the rest."""
    params = [param for param in model.parameters() if param.requires_grad]
    matrices, rest = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    made: list[Optimizer] = [Muon(matrices, lr=0.02, **options)] if matrices else []
    return made + ([AdamW(rest, lr=0.01, eps=1e-3)] if rest else [])


def _train(rank: int, name: str, options: dict[str, Any]) -> None:
    """Two checks: from the gradients of the sharded model the bits of one process; from its own ones, 1e-6."""
    case = CASES[name]
    reference, model = reference_and_model(case)
    follower = case.build()
    follower.load_state_dict(reference.state_dict())
    of_each = [optimizers(each, **options) for each in (model, reference, follower)]
    for step in range(STEPS):
        case.loss(model, mine(case, step)).backward()
        case.loss(reference, whole(case, step)).backward()
        for each in (model, reference):
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
        for param, other in zip(model.parameters(), follower.parameters(), strict=True):
            other.grad = None if param.grad is None else param.grad.full_tensor()
        for group in (group for some in of_each for each in some for group in each.param_groups):
            group["lr"] = 0.02 / (1 + 0.1 * step)
        for each in (each for some in of_each for each in some):
            each.step()
            each.zero_grad()
        for (key, param), other in zip(model.named_parameters(), follower.parameters(), strict=True):
            full = param.full_tensor()
            assert torch.equal(full, other) or param.dim() != 2, (key, step, (full - other).abs().max())
    for (key, param), other in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        print(name, key, (param.full_tensor() - other[1]).abs().max().item())
    if any(isinstance(each, Muon) for each in of_each[0]):
        plan = next(iter(MatrixUpdates.of(of_each[0][0]).plans.values()))
        assert len(plan.matrices) == len(of_each[0][0].param_groups[0]["params"])


@pytest.mark.parametrize("name", CASES)
def test_values(two: Ranks, name: str) -> None:
    """Muon on two ranks has the bits of one process that is given the same gradients."""
    two.run(_train, name, {})
