"""Batches of any size, and whole steps, under torch.compile."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from models import MLP, AnyLength, Case, cross_entropy, mlp, squared_error, text, vectors
from torch import Tensor, nn

from ..ranks import NIGHTLY, on_ranks
from ..training import build, local, mine, shard


@contextmanager
def _compiled_already() -> Iterator[None]:
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


# --- sizes ------------------------------------------------------------------------------------------------------------


def _cut(inputs: tuple[Tensor, ...], batch: int, time: int) -> tuple[Tensor, ...]:
    """The first `batch` rows; of texts, the first `time` tokens."""
    rows = (each[:batch] if each.is_floating_point() else each[:batch, :time] for each in inputs)
    return tuple(each.clone(memory_format=torch.contiguous_format) for each in rows)


# of a batch and its texts; the second rank begins in the middle
SIZES = ((2, 9), (3, 7), (4, 5), (3, 8), (5, 9), (2, 2), (4, 3), (5, 6), (3, 4), (2, 6), (4, 9), (5, 3))


CASES = {"gpt": Case(AnyLength, text, cross_entropy), "mlp": MLP}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "how", "dynamic"),
    [
        ("gpt", "aot_eager", True),
        ("gpt", "aot_eager", None),
        ("mlp", "inductor", True),
    ],
)
@on_ranks(2)
def test_sizes_vary(rank: int, name: str, how: str, dynamic: bool | None) -> None:
    """Batch and length may change from step to step, and differ between ranks: one graph with the gradients of eager
    steps, or, by itself, a second one at the first change.
    """
    case = CASES[name]
    eager, model = shard(case), shard(case)
    run = torch.compile(model, backend=how, fullgraph=True, dynamic=dynamic)
    first = 1 if dynamic else 2  # sizes that say what varies
    for number in range(len(SIZES)):
        batch, time = SIZES[(number + 6 * rank) % len(SIZES)]
        inputs = _cut(case.batch(10 * rank + number, 5), batch, time)
        with nullcontext() if number < first else _compiled_already():
            losses = [case.loss(each, inputs) for each in (run, eager)]
            for loss in losses:
                loss.backward()
        torch.testing.assert_close(losses[0], losses[1])
    for (name, ours), (_, theirs) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        torch.testing.assert_close(local(ours.grad), local(theirs.grad), rtol=1e-4, atol=1e-6, msg=name)


# --- steps ------------------------------------------------------------------------------------------------------------


ONE = Case(lambda: mlp(1), vectors, squared_error)
MOMENTUM = 0.9 if NIGHTLY else 0.0  # the step that makes state is traced once more


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: tuple[Tensor, ...]) -> Tensor:
    loss = MLP.loss(model, inputs)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@on_ranks(2)
def test_a_compiled_step() -> None:
    """`torch.compile(train_step)` trains as the loop does, in as many graphs as without sharding, and no more later.

    Dynamo breaks the graph at the call of backward, within which it compiles nothing of this package.
    """
    graphs = []
    for model, eager, backend in ((build(ONE), build(ONE), "eager"), (shard(ONE), shard(ONE), "aot_eager")):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=MOMENTUM) for each in (model, eager)]
        step = torch.compile(_train_step, backend=backend)
        for seed in range(3):
            with nullcontext() if seed < 2 else _compiled_already():
                losses = [
                    step(model, optimizers[0], mine(MLP, seed)),
                    _train_step(eager, optimizers[1], mine(MLP, seed)),
                ]
            torch.testing.assert_close(*losses)
            for (name, ours), (_, theirs) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
                assert ours.grad is None and theirs.grad is None
                torch.testing.assert_close(local(ours), local(theirs), rtol=1e-5, atol=1e-6, msg=name)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1], graphs
