"""One compilation serves all of training, and it is the same program on every rank."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from models import MODELS

from ..ranks import Ranks, on_ranks
from ..training import OPTIMIZERS, backward, executor, mine, shard

STEPS = 20


@pytest.mark.parametrize(
    ("name", "how"),
    [("tied", "aot_eager")]
    + [pytest.param(name, "aot_eager", marks=pytest.mark.nightly) for name in MODELS if name != "tied"]
    + [pytest.param("mlp", "inductor", marks=pytest.mark.nightly)],
)
@on_ranks(2)
def test_one_compilation(name: str, how: str) -> None:
    """Twenty steps need one full graph, with fresh batches and both ways to clear gradients."""
    case = MODELS[name]
    model = shard(case)
    run, optimizer = executor(model, how), OPTIMIZERS["adamw"](model.parameters())
    for step in range(STEPS):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            backward(run, case, mine(case, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 4 < 2)


@contextmanager
def _printed() -> Iterator[list[str]]:
    """The graphs that our passes print inside, one text after each pass."""
    texts: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    log, handler = logging.getLogger("fsdp_compile.graphs"), Collect()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield texts
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _graphs(rank: int, name: str, how: str) -> list[str]:
    case = MODELS[name]
    model = shard(case)
    with (
        _printed() as texts,
        torch._inductor.config.patch(fx_graph_cache=False),  # a hit would skip the passes
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        backward(executor(model, how), case, mine(case, 0))
    dist.barrier()
    return texts


@pytest.mark.nightly  # ranks compare their graphs: test_check_ranks.py has this every day
@pytest.mark.parametrize(("name", "how"), [("frozen", "inductor"), ("mlp", "backend")])
def test_all_ranks_print_the_same_graphs(two: Ranks, name: str, how: str) -> None:
    """Joint, forward and backward graphs hold nothing that depends on the rank, after any pass."""
    first, *others = two.run(_graphs, name, how)
    assert any("joint graph" in text for text in first) and any("forward graph" in text for text in first)
    assert any("reduce_scatter" in text for text in first) and any("all_gather" in text for text in first)
    assert all(texts == first for texts in others)
