"""Activations that are computed again have the same bits, random ones too."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from joint import JointPasses
from models import MODELS, MODULES
from torch import Tensor, nn

from fsdp_compile import fully_shard

from .ranks import Ranks
from .training import local, mine, shard


class Block(nn.Module):
    """Attention with dropout, and a gated perceptron with dropout."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        x = x + nn.functional.dropout(self.out(y), 0.3)
        h = self.norm2(x)
        return x + nn.functional.dropout(self.down(nn.functional.silu(self.gate(h)) * self.up(h)), 0.1)


class Net(nn.Module):
    """Two of these, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def _train(backend: Any, reshard: Any, steps: int = 3) -> list[Tensor]:
    """Losses, gradients and parameters."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fully_shard(Net(), reshard_after_forward=reshard)
    run = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    seen: list[Tensor] = []
    for _ in range(steps):
        loss = run(torch.randn(64, 24, 12))
        loss.backward()
        seen += [loss.detach(), *(local(param.grad).clone() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [local(param).detach().clone() for param in model.parameters()]


def _bytes(backend: JointPasses) -> int:
    return sum(shape.numel() for shape in backend.saved)


def _equal_bits(rank: int, options: dict[str, Any], reshard: Any) -> None:
    kept, again = JointPasses(), JointPasses(options=options)
    before, after = _train(kept, reshard), _train(again, reshard)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    if options["activations"] == "offload":  # on the CPU copies are made too, of large activations of all but one block
        assert (
            again.texts[0].count("fsdp_flat.to_host.default") == again.texts[0].count("fsdp_flat.from_host.default") > 0
        )
    else:
        assert _bytes(again) < 0.7 * _bytes(kept), (_bytes(again), _bytes(kept))
    assert again.texts[0].count("aten.mm") == kept.texts[0].count("aten.mm")  # the partitioner repeats, not the pass


def _equal_bits_of(rank: int, name: str) -> None:
    case = {**MODELS, **MODULES}[name]
    results = []
    for options in ({}, {"activations": "recompute"}, {"activations": "auto", "link": "custom:1e-6,1e6"}):
        torch._dynamo.reset()
        model = shard(case, reshard_after_forward="auto")
        loss = case.loss(torch.compile(model, backend=JointPasses(options=options), fullgraph=True), mine(case, 0))
        loss.backward()
        results.append([loss.detach(), *(local(param.grad) for param in model.parameters() if param.grad is not None)])
    for others in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], others, strict=True))


LATE = pytest.mark.nightly


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*MODELS, *MODULES])
def test_equal_bits_of_all_models(two: Ranks, name: str) -> None:
    """So they have in models that read parameters in unusual ways, or whose blocks are no blocks."""
    two.run(_equal_bits_of, name)


@pytest.mark.parametrize(
    ("options", "reshard"),
    [
        ({"activations": "recompute"}, True),
        pytest.param({"activations": "offload", "link": "custom:1e-6,1e6", "device": "h100"}, True, marks=LATE),
        pytest.param({"activations": "recompute"}, False, marks=LATE),
        pytest.param({"activations": "recompute", "link": "custom:1e-6,1e6"}, "auto", marks=LATE),
    ],
    ids=str,
)
def test_equal_bits(two: Ranks, options: dict[str, Any], reshard: Any) -> None:
    """Three steps of AdamW with dropout have the same bits whether activations are kept or computed again; fewer
    bytes are saved.
    """
    two.run(_equal_bits, options, reshard)


def _unequal(rank: int, options: dict[str, Any]) -> list[Any]:
    """What a rank communicates in backward, whose batch has 512 times as many rows on the first rank."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend, model = JointPasses(options=options), fully_shard(Net(), reshard_after_forward="auto")
    run = torch.compile(model, backend=backend, fullgraph=True)
    run(torch.randn(1 if rank else 512, 24, 12)).backward()
    return backend.backward


@pytest.mark.nightly
@pytest.mark.parametrize("activations", ["auto", "recompute", "keep"])
def test_ranks_with_other_batches_follow_one_choice(two: Ranks, activations: str) -> None:
    """Units that stay unsharded, and what is computed again, are chosen by the first rank for all of them."""
    first, second = two.run(_unequal, {"activations": activations, "link": "custom:1e-6,1e9"})
    assert first == second and first
