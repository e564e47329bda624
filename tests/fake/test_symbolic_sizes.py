"""Batches and texts of any length: one graph, gradients in place, and a plan that holds for all of them."""

from unittest import mock

import pytest
import torch
from generated import Program
from models import MLP, AnyLength, cross_entropy, mlp, text
from tiers import NIGHTLY
from torch import nn
from torch._inductor.utils import run_and_get_code

from fsdp_compile import fully_shard
from fsdp_compile.passes import PASSES, GraphContext, Pass, _torch, backend
from fsdp_compile.passes.plan.plan import PlanError, simulate, verify
from fsdp_compile.passes.post_grad.plan_by_cost import read_graph

LINK = {"link": "h100-ib400", "device": "h100"}
LENGTHS = (7, 9, 3, 5, 8, 2, 4, 6, 9, 3, 8, 7)


def compiled(how: str) -> tuple[nn.Module, Program, Program]:
    """The model, and the programs of forward and backward with which it trained on twelve lengths."""
    model = fully_shard(AnyLength(layers=1))
    run = torch.compile(model, fullgraph=True, dynamic=how == "dynamic" or None, backend=backend(**LINK))

    def train() -> None:
        for length in LENGTHS:
            tokens, targets = (each[:, :length].contiguous() for each in text(0, 3))
            if how == "marked":
                torch._dynamo.mark_dynamic(tokens, 1, min=2, max=9)
            cross_entropy(run, (tokens, targets)).backward()

    with torch._dynamo.config.patch(error_on_recompile=True):
        _, codes = run_and_get_code(train)
    forward, backward = map(Program, codes)
    return model, forward, backward


def test_one_graph_with_gradients_in_place() -> None:
    """Twelve lengths run one forward and one backward. Nothing is copied; gradients are computed into their places."""
    _, forward, backward = compiled("marked")
    assert forward.parameter_moves() == backward.parameter_moves() == []
    assert backward.products_into_packs()


def _train(size: int, *before_order: Pass, most: int | None = 64, blocks: int = 3, **options: int) -> None:
    """Compile for batches of 2 to `most`, or of any number."""
    at = [each.name for each in PASSES].index("order")
    passes = (*PASSES[:at], *before_order, *PASSES[at:])
    run = torch.compile(fully_shard(mlp(blocks)), fullgraph=True, backend=backend(passes, **LINK, **options))
    x, target = MLP.batch(0, size)
    torch._dynamo.mark_dynamic(x, 0, **({} if most is None else {"min": 2, "max": most}))
    MLP.loss(run, (x, target)).backward()


def test_a_plan_holds_for_all_sizes() -> None:
    """What is planned and verified at one size passes at each other one, and counts as many bytes as the largest.

    By day at every ninth size.
    """
    every = 1 if NIGHTLY else 9
    seen = []

    def verify_all(context: GraphContext) -> None:
        peak, peaks = simulate(context.workload, context.plan).peak, []
        for size in (*range(2, 64, every), 64):
            with mock.patch.object(_torch, "size_range", lambda _, size=size: _torch.SizeRange(size, size, size)):
                read_graph(context)
            verify(context.workload, context.plan, peak)
            peaks.append(simulate(context.workload, context.plan).peak)
        assert peaks == sorted(peaks) and peaks[0] < peaks[-1] == peak
        seen.append(context.direction)

    _train(5, Pass("verify_all", "post_grad", verify_all), blocks=2, budget=1 << 30)
    assert seen == ["forward", "backward"]


def test_a_budget_counts_the_largest_size() -> None:
    """A budget that the size at hand would keep, and the largest would not, is refused with that size."""
    with pytest.raises(PlanError, match=r"^budget: .*; counted for args\[0\].size\(\)\[0\] = 64"):
        _train(2, budget=12_000)


def test_a_size_without_bound_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing bounds a size, a budget can only count that of tracing time, and a warning says so."""
    _train(5, most=None, blocks=1, budget=1 << 30)
    assert "bytes are counted for args[0].size()[0] = 5, as nothing says how large it may be" in caplog.text
