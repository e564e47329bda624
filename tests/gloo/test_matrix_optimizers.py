"""Optimizers of complete matrices step as on one process, while each rank computes what it owns."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, Case, Routed, squared_error, vectors
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from fsdp_compile import compile_step, fully_shard
from fsdp_compile.optim.matrix_step import MatrixUpdates

from .ranks import Ranks
from .same_bits import LowRank
from .test_compile_step import loss_of
from .training import assert_bitwise, local, mine, reference_and_model, shard, whole

NIGHTLY = pytest.mark.nightly
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


# --- compile_step -----------------------------------------------------------------------------------------------------


def _ten_lines(rank: int) -> None:
    torch.manual_seed(0)
    model = fully_shard(MODELS["mlp"].build())
    matrices, rest = [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2]
    muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(muon, T_max=20)
    step = compile_step(model, [muon, adamw], F.mse_loss, clip_norm=1.0, backend="aot_eager")
    losses = []
    for _ in range(10):
        inputs, target = mine(MODELS["mlp"], 0)
        losses.append(step(inputs, target=target).item())
        schedule.step()
    assert losses[-1] < 0.7 * losses[0]
    assert all(not any(p.grad is not None for p in each) for each in (matrices, rest))


def test_ten_lines(two: Ranks) -> None:
    """Muon for matrices and AdamW for the rest train as one step, in ten lines."""
    two.run(_ten_lines)


def _follow(rank: int, name: str, steps: int, options: dict[str, Any], backend: str, order: str) -> None:
    """One model is trained by `compile_step`, another by an eager loop: bit for bit equal at each step."""
    case = CASES[name]
    models = [shard(case, reduction_order=order) for _ in range(2)]
    stepping = [optimizers(model) for model in models]
    step: Any = compile_step(models[0], stepping[0], loss_of, backend=backend, **options)
    clip = options.get("clip_norm")
    for number in range(steps):
        for group in (group for some in stepping for each in some for group in each.param_groups):
            group["lr"] = 0.02 / (1 + 0.1 * number)
        inputs, target = mine(case, number)
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            step(inputs, target=target)
        loss_of(models[1](inputs), target).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(models[1].parameters(), clip)
        for each in stepping[1]:
            each.step()
            each.zero_grad()
        assert_bitwise(*models, f"{name}, step {number}")
        for one, other in zip(*stepping, strict=True):
            for param, twin in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
                for key, value in one.state[param].items():
                    assert torch.equal(local(value), local(other.state[twin][key])), (name, key, number)


@pytest.mark.parametrize(
    ("name", "options", "order"),
    [
        ("wide", {"clip_norm": 0.5}, "any"),
        ("gpt", {"update_in_backward": True}, "any"),
        pytest.param("gpt", {"clip_norm": 0.5}, "tree", marks=NIGHTLY),
        pytest.param("wide", {"regional": True, "update_in_backward": True}, "tree", marks=NIGHTLY),
        pytest.param("experts", {"accumulate": 1}, "tree", marks=NIGHTLY),
    ],
)
def test_compile_step(two: Ranks, name: str, options: dict[str, Any], order: str) -> None:
    """`compile_step` with Muon and AdamW has the bits of the eager loop, also where it updates in backward."""
    two.run(_follow, name, 4, options, "aot_eager", order)
