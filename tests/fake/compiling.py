"""Helpers that compile sharded models on a fake group."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from generated import Program, programs
from models import MODELS, MODULES, Case, checkpointed, squared_error, vectors
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from fsdp_compile import ShardingStrategy, fully_shard
from fsdp_compile.passes.inductor import fsdp_compile_backend
from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.plan.workload import Workload
from fsdp_compile.passes.post_grad.plan_by_rule import plan_log
from fsdp_compile.passes.printed import graph_log


@contextmanager
def printed_graphs() -> Iterator[list[str]]:
    """What the logger `fsdp_compile.graphs` prints while the block runs."""
    graphs: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: graphs.append(record.getMessage())
    graph_log.addHandler(handler)
    graph_log.setLevel(logging.DEBUG)
    try:
        yield graphs
    finally:
        graph_log.removeHandler(handler)
        graph_log.setLevel(logging.NOTSET)


class Recorder(CustomGraphPass):
    """Somebody else's pass: calls `see` with each graph and changes nothing."""

    def __init__(self, see: Callable[[fx.Graph], Any], key: str | None = "recorder") -> None:
        self.see, self.key = see, key

    def __call__(self, graph: fx.Graph) -> None:
        self.see(graph)

    def uuid(self) -> str | None:
        return self.key


def step(model: Callable[..., Tensor], inputs: Tensor) -> None:
    """A forward and a backward."""
    model(inputs).square().mean().backward()


def small() -> nn.Sequential:
    """Two units of one linear layer each."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


# --- generated code of models with several units ----------------------------------------------------------------------

CASES = {
    **MODELS,
    "recomputed": Case(partial(checkpointed, "around"), vectors, squared_error),
    **{name: MODULES[name] for name in ("mha", "tied_ends")},
}
BACKENDS = {"default": "inductor", "backend": fsdp_compile_backend}
DAILY = {("gpt", "default"), ("mlp", "backend"), ("frozen", "default"), ("conv", "backend")}


def pairs(*names: str) -> pytest.MarkDecorator:
    """Parametrize by `name` and `backend`: all pairs, of which those in `DAILY` are not nightly."""
    every = [(name, backend) for name in names or ("mlp", "gpt", "recomputed") for backend in BACKENDS]
    late = [pytest.param(*pair, marks=() if pair in DAILY else pytest.mark.nightly) for pair in every]
    return pytest.mark.parametrize(("name", "backend"), late)


def compiled(
    name: str, backend: Any, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, **options: Any
) -> tuple[Program, Program]:
    """The programs of forward and backward."""
    torch.manual_seed(0)
    model = fully_shard(CASES[name].build(), sharding_strategy=strategy)
    model = torch.compile(model, fullgraph=True, backend=backend, **options)
    inputs = CASES[name].batch(1, 4)
    return programs(lambda: CASES[name].loss(model, inputs))


Planned = dict[str, tuple[Plan, Workload]]  # by direction: the plan and what it was made for


@cache
def planned(name: str, backend: str, **options: str) -> tuple[tuple[Program, Program], Planned]:
    """The same with their plans, compiled once for all tests."""
    found: Planned = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_log, "debug", lambda _, way, plan, extra: found.update({way: (plan, extra["workload"])}))
        return compiled(name, BACKENDS[backend], options=options), found


def cached(name: str, backend: str) -> tuple[Program, Program]:
    """The programs that are compiled once for all tests."""
    return planned(name, backend)[0]
