"""What a person reads about a plan: each collective, what of it is hidden, what limits it; totals; memory."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compile.api import fully_shard
from fsdp_compile.config import CompileConfig
from fsdp_compile.fsdp_module import FSDPModule
from fsdp_compile.passes import PASSES
from fsdp_compile.passes.graph.reading import read
from fsdp_compile.passes.inductor import compile_with
from fsdp_compile.passes.pipeline import GraphContext, Pass
from fsdp_compile.passes.plan.bound import lower_bound
from fsdp_compile.passes.plan.plan import Plan, Step, verify
from fsdp_compile.passes.plan.search import search_plan
from fsdp_compile.passes.plan.simulate import Span, Timeline, simulate
from fsdp_compile.passes.plan.workload import Workload
from fsdp_compile.passes.post_grad.plan_pass import costs_of


@dataclass(frozen=True)
class Collective:
    """One launch of a plan.

    Attributes:
        name: its kind and units.
        bytes: of the gathered buffers, or of the reduce-scatter's inputs.
        seconds: how long it occupies the link.
        exposed: for how much of that nothing computes.
        limit: why that is so; empty if it is hidden. dependency: nothing can compute before it, or the last gradient is
            late. link: it queued behind another. memory: it could not start earlier, or was waited for, within the
            budget. compute: what computes beside it is too short.
    """

    name: str
    bytes: int
    seconds: float
    exposed: float
    limit: str


@dataclass(frozen=True)
class Report:
    """A plan on a workload: `str()` is a table, `to_trace()` JSON for Perfetto.

    Attributes:
        workload: the step.
        plan: how it communicates.
        timeline: what that takes.
        budget: bytes that may live at most; None: no limit.
    """

    workload: Workload
    plan: Plan
    timeline: Timeline
    budget: int | None

    @property
    def bound(self) -> float:
        """Seconds below which no plan can be."""
        return lower_bound(self.workload, None, self.budget)

    @property
    def collectives(self) -> list[Collective]:
        """The gathers and reduces, in the order in which they are issued."""
        return list(_collectives(self))

    def to_trace(self) -> str:
        """JSON for Perfetto or chrome://tracing."""
        return self.timeline.to_trace()

    def __str__(self) -> str:
        return "\n".join([*_table(self.collectives), "", *_totals(self)]) + "\n"


def report(workload: Workload, plan: Plan, budget: int | None = None) -> Report:
    """Check and time `plan`. PlanError if it breaks a rule or needs more than `budget` bytes."""
    verify(workload, plan, budget)
    return Report(workload, plan, simulate(workload, plan), budget)


def _collectives(found: Report) -> Iterator[Collective]:
    units = {unit.name: unit for unit in found.workload.units}
    before = 0.0  # when the link had done what was issued before
    for step, span in zip(found.plan.of("gather", "reduce"), found.timeline.link, strict=True):
        size = sum(units[name].gathered if step.kind == "gather" else units[name].packed for name in step.units)
        exposed = found.timeline.exposed_of(span)
        hidden = exposed <= 1e-9 * found.timeline.makespan
        limit = "" if hidden else _limit(found, step, span, size, queued=span.start <= before)
        yield Collective(span.name, size, span.seconds, 0.0 if hidden else exposed, limit)
        before = span.end


def _limit(found: Report, step: Step, span: Span, size: int, queued: bool) -> str:
    start = found.workload.backward if step.at >= found.workload.backward else 0
    if queued and span.start > 0:
        return "link"
    if step.kind == "reduce":
        return "memory" if _waited_for(found, step) < len(found.workload.tasks) else "dependency"
    if step.at == start:
        return "dependency"
    full = found.budget is not None and found.timeline.memory[step.at - 1] + size > found.budget
    return "memory" if full else "compute"


def _waited_for(found: Report, reduce: Step) -> int:
    """Before which task a reduce is waited for."""
    return next(step.at for step in found.plan.of("wait_reduce") if step.units == reduce.units)


def _table(collectives: list[Collective]) -> Iterator[str]:
    width = max([len(each.name) for each in collectives], default=10)
    yield f"{'collective':{width}}  {'bytes':>14}  {'ms':>9}  {'hidden':>9}  {'exposed':>9}  limited by"
    for each in collectives:
        hidden = each.seconds - each.exposed
        times = "  ".join(f"{1e3 * seconds:9.3f}" for seconds in (each.seconds, hidden, each.exposed))
        yield f"{each.name:{width}}  {each.bytes:14,}  {times}  {each.limit}".rstrip()


def _totals(found: Report) -> Iterator[str]:
    step, computing = found.timeline.makespan, sum(task.seconds for task in found.workload.tasks)
    gap = step / found.bound - 1 if found.bound else 0.0
    yield f"step      {1e3 * step:.3f} ms: computing {1e3 * computing:.3f}, the rest {1e3 * (step - computing):.3f}"
    yield f"bound     {1e3 * found.bound:.3f} ms, which no plan can beat; this one is {gap:.2%} above"
    limit = "no limit" if found.budget is None else f"{found.budget:,} bytes"
    yield f"memory    {found.timeline.peak:,} bytes at most, budget: {limit}"


def explain(
    model: nn.Module | Callable[[], nn.Module],
    example_inputs: Sequence[Any],
    *,
    link: str,
    world_size: int | None = None,
    device: str | None = None,
    budget: int | None = None,
) -> Report:
    """The plan that a compiled step of `model` would follow, without running it: no other rank, no GPU, no kernels.

    Args:
        model: a sharded model, an unsharded one, which is sharded with `reshard_after_forward="auto"`, or a function
            that makes either; what it makes has no memory, so that it may be larger than this machine.
        example_inputs: positional arguments of a forward. Under `torch.no_grad()` the plan is that of forward alone.
        link: what connects the ranks, as in `CompileConfig`.
        world_size: number of ranks, where no process group is initialised: one of that size is made up meanwhile.
        device: what computes, as in `CompileConfig`.
        budget: bytes that may live at once; None: no limit.

    Raises:
        PlanError: no plan fits into `budget`.
        ValueError: a name is unknown, or `world_size` is missing, or stands beside a process group of another size.
    """
    config = CompileConfig(link=link, device=device, budget=budget)
    with _process_group(world_size), _without_memory(model):
        made = model if isinstance(model, nn.Module) else model()
        sharded = made if isinstance(made, FSDPModule) else fully_shard(made, reshard_after_forward="auto")
        workload = _workload_of(sharded, example_inputs, config)
    if device not in (None, "cpu"):  # where it computes, not here, one call launches several units
        workload = replace(workload, can_coalesce=True)
    return report(workload, search_plan(workload, budget).plan, budget)


@contextmanager
def _process_group(world_size: int | None) -> Iterator[None]:
    if dist.is_initialized():
        if world_size not in (None, dist.get_world_size()):
            raise ValueError(
                f"world_size: expected {dist.get_world_size()}, as the process group has, found {world_size}"
            )
        yield
        return
    if world_size is None:
        raise ValueError("world_size: expected the number of ranks, as no process group is initialised, found None")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_memory(model: object) -> Iterator[None]:
    if isinstance(model, nn.Module):
        yield
        return
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # noted, never read through
        yield


class _Seen(Exception):
    """Ends a compilation whose joint graph has been read."""


def _workload_of(model: nn.Module, inputs: Sequence[Any], config: CompileConfig) -> Workload:
    found: list[Workload] = []

    def look(context: GraphContext) -> None:
        found.append(read(context.graph, costs_of(context.graph, config), joint=True).workload)
        raise _Seen

    passes = (*(each for each in PASSES if each.name == "insert_collectives"), Pass("look", "joint", look))
    backend = partial(compile_with, passes=passes, config=config)
    torch._dynamo.reset()
    try:
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    except Exception:
        if not found:
            raise
    torch._dynamo.reset()
    if not found:
        raise ValueError("model: expected sharded parameters in its graph, found none")
    return found[0]
