"""The plan of a sharded model's compiled step, and a report on it, without running it.

    model -> joint graph, traced by Dynamo and AOTAutograd -> workload: tasks and units with their costs -> plan

Neither other ranks nor the device are needed: a process group of the backend "fake" stands for the ranks; costs come
from the figures of the link and of the device that the configuration names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile.comm.collectives import STARTS
from fsdp_compile.comm.formats import ratio
from fsdp_compile.config import CompileConfig
from fsdp_compile.explain.batch import Batch
from fsdp_compile.explain.matrices import costs_of_matrices, muon_of
from fsdp_compile.explain.predict import update_of
from fsdp_compile.explain.prediction import Setting
from fsdp_compile.explain.ranks import sharded
from fsdp_compile.explain.report import Report
from fsdp_compile.explain.scheduled import Message, Scheduled
from fsdp_compile.passes import PASSES
from fsdp_compile.passes._torch import reset_dynamo
from fsdp_compile.passes.cost.hardware import link
from fsdp_compile.passes.graph.analyze import GraphInfo, analyze
from fsdp_compile.passes.graph.nodes import tag_of, tagged
from fsdp_compile.passes.graph.prices import ALL_REDUCES, group_of, hardware_at, prices_of
from fsdp_compile.passes.graph.work import node_work, size_of
from fsdp_compile.passes.inductor import compile_with
from fsdp_compile.passes.joint.reshard_by_cost import budget_of_step
from fsdp_compile.passes.pipeline import GraphContext, Pass
from fsdp_compile.passes.plan.plan import verify
from fsdp_compile.passes.plan.schedule import search_plan
from fsdp_compile.passes.plan.workload import Workload


def explain_sharded(
    model: nn.Module | Callable[[], nn.Module],
    shard: Callable[[nn.Module], nn.Module],
    batch: Callable[[nn.Module], Batch],
    config: CompileConfig,
    world_size: int | None,
    optimizer: str | None = None,
    clip: bool = False,
) -> Report:
    """Plan a step of `model`, and report on it: as `explain_plan`, whose arguments and errors these are, but for two.

    Args:
        shard: shards it, or a copy of it, if it is not sharded; called with a process group initialized.
        batch: given the model, returns the arguments of a forward.
    """
    if optimizer is None and clip:
        raise ValueError("clip: expected an optimizer beside it, for without one there is no update, found none")
    updated: dict[str, Any] = {"optimizer": optimizer or "none", "clip": clip}
    Setting(1, **updated)  # refuses names that are unknown, before anything is traced
    with sharded(model, shard, world_size) as made:
        workload, setting, flops, links = read_step(made, *batch(made), config)
        parameters = sum(each.numel() for each in made.parameters())
        trained = sum(each.numel() for each in made.parameters() if each.requires_grad)
        hardware = hardware_at(next(made.parameters()).device, config.device)
        between = link(config.link or "")
        costs = costs_of_matrices(muon_of(made), between, hardware) if optimizer == "muon" else ()
    if config.device not in (None, "cpu"):  # on that device, though not here, one launch serves several units
        workload = replace(workload, can_coalesce=True)
    setting, shards = replace(setting, hardware=hardware.name, **updated), setting.shard_size or setting.world_size
    if optimizer is not None:
        links["update"] = update_of(trained / shards, setting, hardware)
    plan = search_plan(workload, budget_of_step(workload, config.budget)).plan
    verify(workload, plan, config.budget)
    # What lives beside gathered and packed buffers counts as activations.
    step = Scheduled(workload, plan, config.budget, shards=shards, matrices=tuple(times for _, times in costs), **links)
    tokens = setting.batch * setting.sequence
    found = step.predict(type(made).__name__, parameters, setting, hardware, tokens, (flops, flops))
    return Report((found,), step)


class _GraphRead(Exception):
    """Raised to end a compilation once its joint graph has been read."""


def read_step(
    model: nn.Module, inputs: Sequence[object], named: Mapping[str, Any], config: CompileConfig
) -> tuple[Workload, Setting, int, dict[str, Any]]:
    """Of a sharded model's joint graph: the step, the setting, its operations, and what `Scheduled` has of links.

    Raises:
        ValueError: it has no sharded parameters.
    """
    found = list[tuple[Workload, Setting, int, dict[str, Any]]]()

    def read_graph(context: GraphContext) -> None:
        prices = prices_of(context.graph, config)
        info = prices.read(context.graph, "joint") if prices else analyze(context.graph, joint=True)
        gathers = tagged(context.graph, "gather")
        dtypes = {each.meta["val"].dtype for each in gathers}
        tensors = [each for each in inputs if isinstance(each, torch.Tensor) and each.dim()]
        tokens = bool(tensors) and not tensors[0].is_floating_point() and tensors[0].dim() > 1
        is_hybrid = any(unit.replicate for unit in info.workload.units)
        setting = Setting(
            dist.get_world_size(),
            batch=max(1, tensors[0].shape[0]) if tensors else 1,
            sequence=tensors[0].shape[1] if tokens else 1,
            strategy="HYBRID_SHARD" if is_hybrid else "FULL_SHARD",
            shard_size=max((group_of(each).size() for each in gathers), default=1) if is_hybrid else None,
            precision="bf16" if torch.bfloat16 in dtypes else "fp16" if torch.float16 in dtypes else "fp32",
            network=config.link,
        )
        flops = sum(node_work(node).flops for node in context.graph.nodes)
        links: dict[str, Any] = {"messages": messages_of(info)}
        if prices is not None:
            starts = tagged(context.graph, "gather", "reduce")
            replicated = [each for each in starts if each.target in ALL_REDUCES]
            links["levels"] = prices.level(set(starts).difference(replicated)), prices.level(replicated)
            links["sources"] = tuple(prices.sources())
        found.append((info.workload, setting, flops, links))
        raise _GraphRead

    passes = PASSES[0], Pass("read_graph", "joint", read_graph)  # behind `insert_collectives`
    backend = partial(compile_with, passes=passes, config=config)
    reset_dynamo()
    try:
        torch.compile(model, backend=backend, fullgraph=True)(*inputs, **named)
    except Exception:
        if not found:
            raise
    reset_dynamo()
    if not found:
        raise ValueError("model: expected sharded parameters in its graph, found none")
    return found[0]


def messages_of(info: GraphInfo) -> dict[str, Message]:
    """What the collectives of a graph send in formats."""
    found: dict[str, Message] = {}
    starts = {f"gather {name}": gather.starts for name, gather in info.gathers.items()}
    for name, reduce in info.reduces.items():
        starts[f"reduce {name}"] = [reduce.start[-1]]
        starts[f"replicate {name}"] = [node for node in (*reduce.wait, *reduce.end) if node.target in STARTS]
    for name, nodes in starts.items():
        formats = [tag_of(node).wire for node in nodes]
        if any(formats):
            sizes = [max(size_of(node), size_of(node.all_input_nodes[0])) for node in nodes]
            parts = [ratio(format, node.meta["val"].dtype) for format, node in zip(formats, nodes, strict=True)]
            sent = sum(size * part for size, part in zip(sizes, parts, strict=True))
            found[name] = Message(" ".join(dict.fromkeys(formats)), sum(sizes), round(sent))
    return found
