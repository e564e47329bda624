"""The plan of a sharded model's compiled step, and a report on it, without running it.

    model -> joint graph, traced by Dynamo and AOTAutograd -> workload: tasks and units with their costs -> plan

Neither other ranks nor the device are needed: a process group of the backend "fake" stands for the ranks; costs come
from the figures of the link and of the device that the configuration names.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile.config import CompileConfig, StepUpdate
from fsdp_compile.core.sharding import sharding_of
from fsdp_compile.explain.predict import MOST_TOP, UPDATE_MOVES, by_kind, constants_of
from fsdp_compile.explain.prediction import BlockChoice, Memory, Prediction, Scheduled, Setting
from fsdp_compile.explain.report import Report
from fsdp_compile.passes import PASSES
from fsdp_compile.passes._torch import FakeTensorMode, fake_store, reset_dynamo
from fsdp_compile.passes.cost.hardware import Hardware, device
from fsdp_compile.passes.graph.costs import costs_of, node_work
from fsdp_compile.passes.graph.nodes import tagged
from fsdp_compile.passes.inductor import compile_with
from fsdp_compile.passes.joint.choose_memory import choose_policies, read_blocks
from fsdp_compile.passes.pipeline import GraphContext, Pass
from fsdp_compile.passes.plan.memory import KEEP, Options, Result
from fsdp_compile.passes.plan.plan import Plan, verify
from fsdp_compile.passes.plan.workload import Workload


def update_of(optimizer: str | None, clip: bool) -> StepUpdate | None:
    """The update of an optimizer by its name. ValueError if the name is unknown, or nothing can be clipped."""
    if optimizer is None:
        if clip:
            raise ValueError("clip: expected an optimizer beside it, for without one no update is planned, found none")
        return None
    if optimizer not in UPDATE_MOVES:
        raise ValueError(f"optimizer: expected one of {', '.join(UPDATE_MOVES)}, found {optimizer!r}")
    return StepUpdate(UPDATE_MOVES[optimizer] / 4, clip)  # that table is in bytes, of float32


@dataclass(frozen=True)
class Subject:
    """What a plan is of, where a workload does not say it.

    Attributes:
        model: its name.
        parameters: how many it has.
        setting: cluster and options.
        hardware: what computes.
        flops: operations of products and attention in a forward and backward.
    """

    model: str = "model"
    parameters: int = 0
    setting: Setting = field(default_factory=lambda: Setting(1))
    hardware: Hardware | None = None
    flops: int = 0


def report(
    workload: Workload,
    plan: Plan,
    budget: int | None = None,
    blocks: tuple[BlockChoice, ...] = (),
    subject: Subject | None = None,
) -> Report:
    """The report on `plan`, after a check. What lives beside gathered and packed buffers counts as activations.

    Raises:
        PlanError: the plan breaks a rule, or needs more than `budget` bytes.
    """
    verify(workload, plan, budget)
    subject = subject or Subject()
    setting, hardware = subject.setting, subject.hardware
    step = Scheduled(workload, plan, budget, blocks, shards=setting.shard_size or setting.world_size)
    timeline, tasks = step.timeline, [*enumerate(workload.tasks)]
    seconds = timeline.makespan
    update = sum(task.seconds for _, task in tasks[workload.end_of_backward : workload.forward])
    forward = sum(task.seconds for at, task in tasks if workload.is_forward(at))
    at = max(range(len(timeline.memory)), key=timeline.memory.__getitem__)
    peak, gathered = timeline.memory[at], step.gathered_at(at)
    beneath = tasks[at][1].memory if at < len(tasks) else max(0, peak - gathered)
    gathered = min(gathered, peak - beneath)
    fastest = max(hardware.peak.values()) if hardware else 0.0
    used = subject.flops / seconds / hardware.peak.get("bfloat16", fastest) if hardware and seconds else 0.0
    prediction = Prediction(
        model=subject.model,
        parameters=subject.parameters,
        setting=setting,
        forward=forward,
        backward=sum(task.seconds for _, task in tasks) - forward - update,
        update=update,
        exposed=max(0.0, timeline.exposed),
        step=seconds,
        tokens_per_second=setting.batch * setting.sequence / seconds if seconds else 0.0,
        mfu=used,
        hfu=used,
        collectives=by_kind(step.collectives),
        top=tuple(sorted(step.collectives, key=lambda each: -each.seconds)[:MOST_TOP]),
        memory=Memory(
            *(0, 0, 0, beneath, 0, gathered, peak - beneath - gathered, 0, peak),
            peak_at=tasks[at][1].name if at < len(tasks) else "the end of the step",
            capacity=hardware.memory if hardware else None,
        ),
        timeline=tuple(step.spans()),
        memory_over_time=step.memory_over_time(0.0, timeline.memory[-1], 0.0),
        constants=constants_of(hardware) if hardware else (),
    )
    return Report((prediction,), step)


def explain_sharded(
    model: nn.Module | Callable[[], nn.Module],
    shard: Callable[[nn.Module], nn.Module],
    example_inputs: Sequence[Any],
    config: CompileConfig,
    world_size: int | None,
    optimizer: str | None = None,
) -> Report:
    """The plan of a step of `model`, and what the step takes.

    Args:
        model: a model, or a function that makes one, whose tensors get no memory.
        shard: shards it, or a copy of it, if it is not sharded; called with a process group initialized.
        example_inputs: positional arguments of a forward.
        config: names the link, and perhaps the device and the budget in bytes.
        world_size: the number of ranks, where no process group is initialized.
        optimizer: name of the one whose update `config` has.

    Raises:
        PlanError: no plan fits into the budget.
        ValueError: `world_size` is missing or does not fit, or the model's graph has no sharded parameters.
    """
    exists = isinstance(model, nn.Module)
    with process_group(world_size), nullcontext() if exists else _fake_tensors():
        made = model if isinstance(model, nn.Module) else model()
        sharded = made if sharding_of(made) else shard(copy.deepcopy(made) if exists else made)
        choices, subject = _read(sharded, example_inputs, config)
    if config.device not in (None, "cpu"):  # on that device, though not here, one launch serves several units
        plain, stored = (replace(each, can_coalesce=True) for each in (choices.plain, choices.stored))
        choices = replace(choices, plain=plain, stored=stored)
    if optimizer is not None:
        subject = replace(subject, setting=replace(subject.setting, optimizer=optimizer, compile_step=True))
    chosen = choose_policies(choices, config)
    blocks = tuple(_block_choices(choices, chosen)) if config.activations != "keep" else ()
    return report(chosen.workload, chosen.planned.plan, config.budget, blocks, subject)


def _block_choices(choices: Options, chosen: Result) -> Iterator[BlockChoice]:
    for block, policy in zip(choices.blocks, chosen.policies, strict=True):
        units = [each.name for each in choices.plain.units if f"{each.name}.".startswith(f"{block.name}.")]
        unsharded = len(set(units).intersection(chosen.planned.keep_unsharded))
        yield BlockChoice(block.name, policy.name if policy else KEEP, unsharded, len(units))


@contextmanager
def process_group(world_size: int | None) -> Iterator[None]:
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
    dist.init_process_group("fake", rank=0, world_size=world_size, store=fake_store())
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


class _GraphRead(Exception):
    """Ends a compilation whose joint graph has been read."""


def choices_of(model: nn.Module, inputs: Sequence[Any], config: CompileConfig) -> Options:
    """The joint graph of a sharded model, and what may be chosen in it, as numbers. ValueError if it has no shards."""
    return _read(model, inputs, config)[0]


def _read(model: nn.Module, inputs: Sequence[Any], config: CompileConfig) -> tuple[Options, Subject]:
    """As `choices_of`, and what the graph is of."""
    found: list[tuple[Options, Subject]] = []

    def read_graph(context: GraphContext) -> None:
        choices = read_blocks(context.graph, costs_of(context.graph, config)).options(config)
        gathers = tagged(context.graph, "gather")
        dtypes = {each.meta["val"].dtype for each in gathers}
        tensors = [each for each in inputs if isinstance(each, torch.Tensor) and each.dim()]
        tokens = bool(tensors) and not tensors[0].is_floating_point() and tensors[0].dim() > 1
        setting = Setting(
            dist.get_world_size(),
            batch=max(1, tensors[0].shape[0]) if tensors else 1,
            sequence=tensors[0].shape[1] if tokens else 1,
            strategy="HYBRID_SHARD" if any(unit.replicate for unit in choices.plain.units) else "FULL_SHARD",
            precision="bf16" if torch.bfloat16 in dtypes else "fp16" if torch.float16 in dtypes else "fp32",
            optimizer="none",
            clip=config.update is not None and config.update.clips,
            hardware=config.device or "cpu",
            network=config.link,
        )
        parameters = sum(each.numel() for each in model.parameters())
        flops = sum(node_work(node).flops for node in context.graph.nodes)
        subject = Subject(type(model).__name__, parameters, setting, device(setting.hardware), flops)
        found.append((choices, subject))
        raise _GraphRead

    insert = next(each for each in PASSES if each.name == "insert_collectives")
    backend = partial(compile_with, passes=(insert, Pass("read_graph", "joint", read_graph)), config=config)
    reset_dynamo()
    try:
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    except Exception:
        if not found:
            raise
    reset_dynamo()
    if not found:
        raise ValueError("model: expected sharded parameters in its graph, found none")
    return found[0]
