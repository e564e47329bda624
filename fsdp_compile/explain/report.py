"""From a sharded model to a report on the plan that its compiled step would follow, without running it.

    model -> joint graph, traced by Dynamo and AOTAutograd -> workload: tasks and units with their costs -> plan
    plan -> each collective, how much of it computing hides and what limits it; totals; memory

Neither other ranks nor the device are needed: a process group of the backend "fake" stands for the ranks; costs come
from the figures of the link and of the device that the configuration names.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile.config import CompileConfig, StepUpdate
from fsdp_compile.core.sharding import sharding_of
from fsdp_compile.explain.pricing import UPDATE_MOVES
from fsdp_compile.passes import PASSES
from fsdp_compile.passes._torch import FakeTensorMode, fake_store, reset_dynamo
from fsdp_compile.passes.graph.costs import costs_of
from fsdp_compile.passes.inductor import compile_with
from fsdp_compile.passes.joint.choose_memory import choose_mix, read_blocks
from fsdp_compile.passes.pipeline import GraphContext, Pass
from fsdp_compile.passes.plan.bound import lower_bound
from fsdp_compile.passes.plan.memory import KEEP, Choices, Chosen
from fsdp_compile.passes.plan.plan import Plan, Span, Step, Timeline, simulate, verify
from fsdp_compile.passes.plan.update import end_of_backward, prefetched
from fsdp_compile.passes.plan.workload import Workload


@dataclass(frozen=True)
class Collective:
    """One launch of a plan.

    Attributes:
        name: "gather" or "reduce", and the units that it serves.
        bytes: size of the gathered buffers, or of the inputs of the reduce-scatters.
        seconds: how long it occupies the link.
        exposed: the seconds of these during which nothing computes.
        limit: why they are exposed; empty if none are. "dependency": nothing can compute before it, or the last
            gradient comes late. "link": it queued behind another collective. "memory": the budget did not let it start
            earlier, or made something wait for it. "compute": the computation beside it is too short.
    """

    name: str
    bytes: int
    seconds: float
    exposed: float
    limit: str


@dataclass(frozen=True)
class BlockChoice:
    """What becomes of a block between forward and backward.

    Attributes:
        name: its path in the model.
        activations: "keep", or how they are treated otherwise.
        unsharded: how many of its units stay unsharded.
        units: how many it has.
    """

    name: str
    activations: str
    unsharded: int
    units: int


@dataclass(frozen=True)
class Report:
    """A plan, and what a step takes that follows it: `str()` gives a table, `to_trace()` JSON for Perfetto.

    Attributes:
        workload: what the step computes and communicates.
        plan: when it communicates.
        timeline: the seconds and bytes that this takes.
        budget: the number of bytes that may live at once, or None for no limit.
        blocks: what becomes of each block between forward and backward, where that was chosen.
    """

    workload: Workload
    plan: Plan
    timeline: Timeline
    budget: int | None
    blocks: tuple[BlockChoice, ...] = ()

    @property
    def bound(self) -> float:
        """A lower bound: no plan takes fewer seconds."""
        return lower_bound(self.workload, None, self.budget)

    @property
    def collectives(self) -> list[Collective]:
        """The gathers and reduces, in the order in which they are launched; all-reduces of norms come last."""
        norms = [Collective(each.name, 4, each.seconds, each.seconds, "dependency") for each in self.timeline.norms]
        return [*_collectives(self), *norms]

    def to_trace(self) -> str:
        """JSON for Perfetto or chrome://tracing."""
        return self.timeline.to_trace()

    def __str__(self) -> str:
        lines = [*_table(self.collectives), *_of_updates(self), *_of_blocks(self.blocks), "", *_totals(self)]
        return "\n".join(lines) + "\n"


def report(workload: Workload, plan: Plan, budget: int | None = None, blocks: tuple[BlockChoice, ...] = ()) -> Report:
    """The report on `plan`, after a check.

    Raises:
        PlanError: the plan breaks a rule, or needs more than `budget` bytes.
    """
    verify(workload, plan, budget)
    return Report(workload, plan, simulate(workload, plan), budget, blocks)


def _collectives(report: Report) -> Iterator[Collective]:
    units = {unit.name: unit for unit in report.workload.units}
    before = 0.0  # when the link had finished everything that was launched before
    for step, span in zip(report.plan.of("gather", "reduce"), report.timeline.link, strict=True):
        size = sum(units[name].gathered if step.kind == "gather" else units[name].packed for name in step.units)
        exposed = report.timeline.exposed_of(span)
        hidden = exposed <= 1e-9 * report.timeline.makespan
        limit = "" if hidden else _limit(report, step, span, size, queued=span.start <= before)
        yield Collective(span.name, size, span.seconds, 0.0 if hidden else exposed, limit)
        before = span.end


def _limit(report: Report, step: Step, span: Span, size: int, queued: bool) -> str:
    workload = report.workload
    start = workload.backward if step.at >= workload.backward else 0
    if step.at >= workload.forward:
        start = max(start, workload.forward)
    if queued and span.start > 0:
        return "link"
    if step.kind == "reduce":
        waited_for = next(each.at for each in report.plan.of("wait_reduce") if each.units == step.units)
        return "memory" if waited_for < (end_of_backward(workload) or len(workload.tasks)) else "dependency"
    if step.at == start or step in prefetched(workload, report.plan):
        return "dependency"
    full = report.budget is not None and report.timeline.memory[step.at - 1] + size > report.budget
    return "memory" if full else "compute"


def _table(collectives: list[Collective]) -> Iterator[str]:
    name_width = max([len(each.name) for each in collectives], default=10)
    yield f"{'collective':{name_width}}  {'bytes':>14}  {'ms':>9}  {'hidden':>9}  {'exposed':>9}  limited by"
    for each in collectives:
        hidden = each.seconds - each.exposed
        times = "  ".join(f"{1e3 * seconds:9.3f}" for seconds in (each.seconds, hidden, each.exposed))
        yield f"{each.name:{name_width}}  {each.bytes:14,}  {times}  {each.limit}".rstrip()


def _of_updates(report: Report) -> Iterator[str]:
    """What lies between a backward and the next forward, and the gathers that start behind it."""
    workload = report.workload
    tasks = [*enumerate(workload.tasks)][end_of_backward(workload) : workload.forward]
    if tasks:
        name_width = max(len(task.name) for _, task in tasks)
        yield f"\n{'update':{name_width}}  {'ms':>9}  starts for the next forward"
    for index, task in tasks:
        started = [name for step in prefetched(workload, report.plan) if step.at == index + 1 for name in step.units]
        gathers = f"gather {' '.join(started)}" if started else ""
        yield f"{task.name:{name_width}}  {1e3 * task.seconds:9.3f}  {gathers}".rstrip()


def _of_blocks(blocks: tuple[BlockChoice, ...]) -> Iterator[str]:
    if blocks:
        name_width = max(len(each.name) for each in blocks)
        yield f"\n{'block':{name_width}}  {'activations':22}  units that stay unsharded"
        yield from (
            f"{each.name:{name_width}}  {each.activations:22}  {each.unsharded} of {each.units}" for each in blocks
        )


def _totals(report: Report) -> Iterator[str]:
    step, computing = report.timeline.makespan, sum(task.seconds for task in report.workload.tasks)
    gap = max(0.0, step / report.bound - 1) if report.bound else 0.0
    repeats = ", backward, update and the next forward, which repeats" * bool(report.workload.forward)
    rest = f"computing {1e3 * computing:.3f}, the rest {1e3 * (step - computing):.3f}"
    yield f"step      {1e3 * step:.3f} ms{repeats}: {rest}"
    yield f"bound     {1e3 * report.bound:.3f} ms, a lower bound for all plans; this one takes {gap:.2%} more"
    limit = "no limit" if report.budget is None else f"{report.budget:,} bytes"
    yield f"memory    {report.timeline.peak:,} bytes at most, budget: {limit}"


def update_of(optimizer: str | None, clip: bool) -> StepUpdate | None:
    """The update of an optimizer by its name. ValueError if the name is unknown, or nothing can be clipped."""
    if optimizer is None:
        if clip:
            raise ValueError("clip: expected an optimizer beside it, for without one no update is planned, found none")
        return None
    if optimizer not in UPDATE_MOVES:
        raise ValueError(f"optimizer: expected one of {', '.join(UPDATE_MOVES)}, found {optimizer!r}")
    return StepUpdate(UPDATE_MOVES[optimizer] / 4, clip)  # that table is in bytes, of float32


# --- prediction -------------------------------------------------------------------------------------------------------


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
    with process_group(world_size), nullcontext() if exists else _fake_tensors():
        made = model if isinstance(model, nn.Module) else model()
        sharded = made if sharding_of(made) else shard(copy.deepcopy(made) if exists else made)
        choices = choices_of(sharded, example_inputs, config)
    if config.device not in (None, "cpu"):  # on that device, though not here, one launch serves several units
        plain, stored = (replace(each, can_coalesce=True) for each in (choices.plain, choices.stored))
        choices = replace(choices, plain=plain, stored=stored)
    chosen = choose_mix(choices, config)
    blocks = tuple(_block_choices(choices, chosen)) if config.activations != "keep" else ()
    return report(chosen.workload, chosen.planned.plan, config.budget, blocks)


def _block_choices(choices: Choices, chosen: Chosen) -> Iterator[BlockChoice]:
    for block, way in zip(choices.blocks, chosen.mix, strict=True):
        units = [each.name for each in choices.plain.units if f"{each.name}.".startswith(f"{block.name}.")]
        unsharded = len(set(units).intersection(chosen.planned.keep_unsharded))
        yield BlockChoice(block.name, way.name if way else KEEP, unsharded, len(units))


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


def choices_of(model: nn.Module, inputs: Sequence[Any], config: CompileConfig) -> Choices:
    """The joint graph of a sharded model, and what may be chosen in it, as numbers. ValueError if it has no shards."""
    choices: list[Choices] = []

    def read_choices(context: GraphContext) -> None:
        choices.append(read_blocks(context.graph, costs_of(context.graph, config)).choices(config))
        raise _GraphRead

    insert = next(each for each in PASSES if each.name == "insert_collectives")
    backend = partial(compile_with, passes=(insert, Pass("read_choices", "joint", read_choices)), config=config)
    reset_dynamo()
    try:
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    except Exception:
        if not choices:
            raise
    reset_dynamo()
    if not choices:
        raise ValueError("model: expected sharded parameters in its graph, found none")
    return choices[0]
