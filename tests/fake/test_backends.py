"""Backends of torch.compile that are not ours, and operators that hold a graph of their own."""

import pytest
import torch
from models import mlp
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from fsdp_compile import fully_shard
from fsdp_compile.core import flat_collectives


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_without_our_passes_what_is_gathered_stays_and_a_warning_says_so(backend: str) -> None:
    """FULL_SHARD in a graph that no pass of ours has seen keeps what its forward gathered; the first run warns."""
    flat_collectives._warn_of_other_backend.cache_clear()
    with pytest.warns(UserWarning, match="stays in memory until backward, and no communication is hidden"):
        torch.compile(fully_shard(mlp()), backend=backend)(torch.randn(2, 7))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.project(x).view(2, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return flex_attention(queries, keys, values, score_mod=lambda score, b, h, i, j: score + (i - j)).sum()


@torch.no_grad()  # on the CPU it has no backward
def test_operators_with_a_subgraph_are_priced() -> None:
    """Inductor compiles a sharded model with `flex_attention`, whose `score_mod` is a graph in an argument."""
    assert torch.compile(fully_shard(nn.Sequential(_Attention())))(torch.randn(2, 16, 32)).shape == ()
