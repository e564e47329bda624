"""Ranks that are about to run different compiled graphs get an error that shows where they differ, and never hang."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Ordered
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fsdp_compile import ShardingStrategy, fully_shard
from fsdp_compile.comm.waits import state_of
from fsdp_compile.passes.inductor import fsdp_compile_backend

from ..ranks import on_ranks
from .test_compare_ranks import comparisons
from .test_order import _watching

X = torch.ones(2, 4)


def _evaluate(order: tuple[int, ...], timeout: float = 60.0, **options: Any) -> Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fully_shard(Ordered(order, width=4), auto_wrap_policy={nn.Linear}, **options)
    run = torch.compile(model, fullgraph=True, backend=fsdp_compile_backend, options={"check_ranks_timeout": timeout})
    with torch.no_grad():
        return run(X)


SAID = r"compiled graph: expected the same collectives in the same order on all ranks, found after "


@on_ranks(2)
def test_different_graphs(rank: int) -> None:
    """Another order, another model, a unit less on one rank: all ranks raise before the first collective, with the
    first difference; the group stays usable."""
    another_order = SAID + (
        r"1 equal ones rank 0: gather layers.1, 64 bytes of float32, group 0; "
        r"rank 1: gather layers.2, 64 bytes of float32, group 0; compile the same model"
    )
    with pytest.raises(RuntimeError, match=another_order):
        _evaluate([(0, 1, 2), (0, 2, 1)][rank])
    fewer = SAID + r"1 equal ones rank 0: the end of the graph of model \d+; rank 1: gather layers.2, "
    with pytest.raises(RuntimeError, match=fewer):
        _evaluate([(0,), (0, 2)][rank])
    _evaluate((0, 1, 2))


@on_ranks(2)
def test_a_rank_that_does_not_come(rank: int) -> None:
    """The others raise when the time is up and say what they were about to run; so does the rank when it comes."""
    before = time.monotonic()
    missing = (
        r"compiled forward: .* no sign of rank 1 for 1 s, while rank 0 was about to run Ordered with .* and \d+ more"
    )
    os.environ["FSDP_COMPILE_CHECK_RANKS_TIMEOUT"] = ["1", "60"][rank]
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has raised"])
    with pytest.raises(RuntimeError, match=missing):
        _evaluate((2, 1))
    store.set("rank 0 has raised", "")
    del os.environ["FSDP_COMPILE_CHECK_RANKS_TIMEOUT"]
    assert time.monotonic() - before < 50
    _evaluate((2, 1))


OTHERS = (
    r"ranks communicate different things: rank (0 began a comparison, compiled graph: gather layers.2, .*, and rank 1 "
    r"{other} instead|1 began {other}, and rank 0 a comparison, compiled graph: gather layers.2, .* instead)"
    r"|expected all of them to run the same program, found rank 0: compiled graph \(gather layers.2, .*; rank 1: order "
    r"of models \(the forward of model \d+, ...\)"
)
GRAPH = r"the compiled graph of gather layers.0, 64 bytes of float32, group 0 and 1 more collectives \(\w{12}\)"


@on_ranks(2)
def test_a_new_graph_meets_something_else(rank: int) -> None:
    """One rank runs a new graph, the other eagerly or a graph that has run before: both raise within seconds."""
    for other, expected in (("eager", r"the all-gather of .*"), ("graph", GRAPH)):
        torch._dynamo.reset()
        model: Any = fully_shard(Ordered((0, 1), width=4), auto_wrap_policy={nn.Linear}, process_group=dist.new_group())
        run = torch.compile(model, fullgraph=True, backend=fsdp_compile_backend)
        with torch.no_grad():
            run(X)
            model(X)
            model.order = (2, 1) if rank == 0 else (0, 1)
            before = time.monotonic()
            with _watching(), pytest.raises(RuntimeError, match=OTHERS.replace("{other}", expected)):
                (run if rank == 0 or other == "graph" else model)(X)
        assert time.monotonic() - before < 20


@on_ranks(2)
def test_waits_after_an_error(rank: int) -> None:
    """Who has caught that ranks communicate different things may go on in other groups, where ranks may be late: for a
    comparison, an operator, a backward."""
    fully_shard(nn.Linear(4, 4))(X)  # the world's group is told of errors in others
    param = next(iter(fully_shard(nn.Linear(4, 4), process_group=dist.new_group()).parameters()))
    with _watching(), pytest.raises(RuntimeError, match="ranks communicate different things"):
        param.full_tensor() if rank == 0 else param.norm()  # type: ignore[attr-defined]  # a sharded tensor
    model = fully_shard(nn.Linear(4, 4))

    def late(call: Callable[[], Any]) -> None:
        time.sleep(0.6 * rank)
        with _watching():  # which look for a difference three times meanwhile
            call()

    late(lambda: model(X))  # a comparison comes first
    late(lambda: model.weight.norm())
    late(model(X).sum().backward)


def _forget() -> None:
    torch._dynamo.reset()
    state_of(dist.group.WORLD).forget()


def _products() -> nn.Module:
    """Forward and backward are matrix products alone: no kernel to build."""
    layers = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    return fully_shard(layers, auto_wrap_policy={nn.Linear})


@on_ranks(2)
def test_once_for_each_graph() -> None:
    """Forward and backward are compared at their first run and at no other, also when they come from the cache."""
    _forget()
    run = torch.compile(_products(), fullgraph=True)
    with comparisons() as compare:
        for _ in range(3):
            run(X).square().mean().backward()
            assert compare.call_count == 3, "expected one comparison of the model, and one for each graph, at step 0"
    _forget()
    counters.clear()
    run = torch.compile(_products(), fullgraph=True)
    with comparisons() as compare:
        run(X).square().mean().backward()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1 and not counters["inductor"]["fxgraph_cache_miss"]
    assert compare.call_count == 3, "expected graphs from the cache to be compared"


@pytest.mark.nightly
@on_ranks(4)
def test_only_ranks_of_the_groups_take_part(rank: int) -> None:
    """Groups that share no rank may run different graphs; with hybrid sharding all ranks have one text."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    order = (0, 1, 2) if rank < 2 else (2, 0)
    _evaluate(order, process_group=groups[rank // 2])
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    both = (groups[rank // 2], replicas[rank % 2])
    with comparisons() as compare:
        _evaluate((0, 1), process_group=both, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        texts = {call.args[1] for call in compare.call_args_list if call.args[3].name == "compiled graph"}
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, texts)
    assert len(texts) == 1 and all(each == texts for each in found)
