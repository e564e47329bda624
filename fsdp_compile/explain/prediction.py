"""From a sharded model to the plan that its compiled step would follow, without running it.

    model -> joint graph, traced by Dynamo and AOTAutograd -> workload: tasks and units with their costs -> plan

Neither other ranks nor the device are needed: a process group of the backend "fake" stands for the ranks; costs come
from the figures of the link and of the device that the configuration names.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile.config import CompileConfig
from fsdp_compile.core.sharding import sharding_of
from fsdp_compile.explain._torch import FakeStore, FakeTensorMode, reset_dynamo
from fsdp_compile.explain.report import Report, report
from fsdp_compile.passes import PASSES
from fsdp_compile.passes.graph.reading import read
from fsdp_compile.passes.inductor import compile_with
from fsdp_compile.passes.pipeline import GraphContext, Pass
from fsdp_compile.passes.plan.search import search_plan
from fsdp_compile.passes.plan.workload import Workload
from fsdp_compile.passes.post_grad.plan_pass import costs_of


def predict(
    model: nn.Module | Callable[[], nn.Module],
    shard: Callable[[nn.Module], nn.Module],
    example_inputs: Sequence[Any],
    config: CompileConfig,
    world_size: int | None,
) -> Report:
    """The plan of a step of `model`, and what the step takes.

    Args:
        model: a model, or a function that makes one, whose tensors get no memory.
        shard: shards it, or a copy of it, if it is not sharded; called with a process group initialized.
        example_inputs: positional arguments of a forward.
        config: names the link, and perhaps the device and the budget in bytes.
        world_size: the number of ranks, where no process group is initialized.

    Raises:
        PlanError: no plan fits into the budget.
        ValueError: `world_size` is missing or does not fit, or the model's graph has no sharded parameters.
    """
    exists = isinstance(model, nn.Module)
    with _process_group(world_size), nullcontext() if exists else _fake_tensors():
        made = model if isinstance(model, nn.Module) else model()
        sharded = made if sharding_of(made) else shard(copy.deepcopy(made) if exists else made)
        workload = _workload_of(sharded, example_inputs, config)
    if config.device not in (None, "cpu"):  # on that device, though not here, one launch serves several units
        workload = replace(workload, can_coalesce=True)
    return report(workload, search_plan(workload, config.budget).plan, config.budget)


@contextmanager
def _process_group(world_size: int | None) -> Iterator[None]:
    """A process group of `world_size` ranks: the one that is initialized, or else a fake one meanwhile."""
    if dist.is_initialized():
        if world_size not in (None, dist.get_world_size()):
            raise ValueError(
                f"world_size: expected {dist.get_world_size()}, as the process group has, found {world_size}"
            )
        yield
        return
    if world_size is None:
        raise ValueError("world_size: expected the number of ranks, as no process group is initialized, found None")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _fake_tensors() -> Iterator[None]:
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        # Flat parameters note the address of their shard, and never read through it here.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


class _WorkloadRead(Exception):
    """Ends a compilation whose joint graph has been read."""


def _workload_of(model: nn.Module, inputs: Sequence[Any], config: CompileConfig) -> Workload:
    workloads: list[Workload] = []

    def read_workload(context: GraphContext) -> None:
        workloads.append(read(context.graph, costs_of(context.graph, config), joint=True).workload)
        raise _WorkloadRead

    insert = next(each for each in PASSES if each.name == "insert_collectives")
    backend = partial(compile_with, passes=(insert, Pass("read_workload", "joint", read_workload)), config=config)
    reset_dynamo()
    try:
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    except Exception:
        if not workloads:
            raise
    reset_dynamo()
    if not workloads:
        raise ValueError("model: expected sharded parameters in its graph, found none")
    return workloads[0]
