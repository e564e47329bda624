"""What a person reads about a plan: each collective, what of it is hidden, what limits it; totals; memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_compile.passes.bound import lower_bound
from fsdp_compile.passes.plan import Plan, Step
from fsdp_compile.passes.simulate import Span, Timeline, simulate
from fsdp_compile.passes.verify import verify
from fsdp_compile.passes.workload import Workload


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
