"""Whole steps of `compile_step` on the emulated link, beside what the simulator says of their plans.

One process plays rank 0 of 8. For each kind of units a profile is recorded on a free link, with the seconds of updates;
for each ratio of communication to computing the step is compiled by a plan for this profile and this link, simulated,
and measured. Seconds are those of CPU time that the process computes, and of transfers that it waits for: other
programs on the machine do not count.

    step         ms of a forward, backward, update and zero_grad in the steady state
    exposed      ms of it in which a wait sleeps
    simulated    the same by `simulate`, of the plans of both graphs and the gathers behind updates, as one step that
                 repeats; "edge" is what the host does between the call of a step and the first task of its forward
    outside      what a step takes beside its tasks and the edge where the link takes no time: part of the calibration,
                 and added to the simulated step
"""

import json
import logging
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import link
from bench.link import FREE, LINK
from bench.models import WORKLOADS
from bench.parts import link_for
from bench.report import parser, write
from fsdp_compile import compile_step, fully_shard
from fsdp_compile.passes.cost.roofline import measured_update
from fsdp_compile.passes.plan.plan import Plan, Step, Timeline, simulate, verify
from fsdp_compile.passes.plan.whole_step import UpdateCost, with_update
from fsdp_compile.passes.plan.workload import Task, Workload, lower_bound
from fsdp_compile.passes.post_grad.plan_by_rule import plan_log
from fsdp_compile.passes.post_grad.record_times import TaskProfile

UNITS: dict[str, Any] = {"blocks": "auto", "layers": {nn.Linear}}  # by these policies
PROFILED = 7  # steps
WORLD = 8
Graphs = dict[str, tuple[Workload, Plan]]


@contextmanager
def noted() -> Iterator[Graphs]:
    """The plans of the graphs that are compiled meanwhile."""
    graphs: Graphs = {}

    def note(record: Any) -> bool:
        graphs[record.args[0]] = (record.workload, record.args[1])
        return True

    plan_log.addFilter(note)
    plan_log.setLevel(logging.DEBUG)
    try:
        yield graphs
    finally:
        plan_log.setLevel(logging.NOTSET)
        plan_log.removeFilter(note)


def count_one_thread() -> None:
    """Play rank 0 of `WORLD` on a link that takes no time, and count the CPU seconds of this one thread."""
    torch._dynamo.config.recompile_limit = 64
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    link.start(WORLD, 0.0, FREE)
    LINK.count_cpu_time()


class Stepped:
    """A model, its optimizer, and a call of `compile_step` for each link."""

    def __init__(self, model: str, policy: Any, clips: bool) -> None:
        self.workload, self.clips, self.number = WORKLOADS[model](), clips, 0
        torch.manual_seed(0)
        self.model = fully_shard(self.workload.build(), reshard_after_forward="auto", auto_wrap_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def compile(self, **options: Any) -> None:
        """From here on steps are planned for another link, or record a profile."""
        torch._dynamo.reset()
        self.step = compile_step(self.model, self.optimizer, clip_norm=1.0 if self.clips else None, options=options)

    def __call__(self) -> dict[str, float]:
        """Seconds of one step, and how much of it waits slept."""
        batch = self.workload.batch(self.number, 0)
        self.number += 1
        LINK.forget()
        begin = LINK.clock()
        self.step(*batch)
        return {"step": LINK.clock() - begin, "exposed": LINK.summary()["exposed"]}

    def medians(self, number: int) -> dict[str, float]:
        """Of some steps; two that are not counted come first."""
        steps = [self() for _ in range(number + 2)][2:]
        return {key: statistics.median(each[key] for each in steps) for key in steps[0]}


def profiled(stepped: Stepped, path: str) -> float:
    """Record a profile on a free link; seconds of the edge."""
    LINK.configure(0.0, FREE)
    stepped.compile(link="custom:2e-5,1e9", record_profile=True)
    stepped()
    stepped()
    with TaskProfile(LINK.clock) as profile:
        for _ in range(PROFILED):
            stepped()
    Path(path).write_text(json.dumps(profile.seconds))
    begins = min((key for key in profile._moments if key[0].startswith("forward")), key=lambda key: key[2])
    last = max(key for key in profile._moments if key[0].startswith("update"))
    return statistics.median(
        float(begin) - float(called)  # type: ignore[arg-type]  # on the CPU
        for begin, called in zip(profile._moments[begins][1:], profile._moments[last], strict=True)
    )


def joined(graphs: Graphs, path: str, edge: float) -> tuple[Workload, Plan]:
    """The plans of both graphs, and the gathers behind updates, as one step that repeats."""
    (forward, plan), (backward, plan_of_backward) = graphs["forward"], graphs["backward"]
    costs = {unit.name: replace(unit, arrives=None, may_prefetch=True) for unit in forward.units}
    for unit in backward.units:
        known = costs.get(unit.name, unit)
        costs[unit.name] = replace(known, reduce=unit.reduce, packed=unit.packed, replicate=unit.replicate)
    index = {name: number for number, name in enumerate(costs)}

    def moved(task: Task, of: Workload) -> Task:
        reads, writes = (tuple(index[of.units[each].name] for each in each) for each in (task.reads, task.writes))
        return replace(task, reads=reads, writes=writes)

    tasks = [moved(task, of) for of in (forward, backward) for task in of.tasks]
    units = tuple(costs.values())
    apart = Workload(tuple(tasks), len(forward.tasks), units, forward.latency, forward.can_coalesce)
    sizes = [unit.packed // WORLD for unit in units]
    before, *seconds, after = measured_update(path, sizes) or []
    workload = with_update(apart, UpdateCost(tuple(seconds), tuple(sizes), before, after + edge, compare=apart.latency))
    behind = [unit.name for unit in forward.units if unit.arrives is not None]
    late = (step for step in plan.steps if step.kind != "gather" or step.units[0] not in behind)
    steps = [*plan_of_backward.steps, *(step._replace(at=step.at + workload.forward) for step in late)]
    started = [Step("gather", (name,), workload.updated[index[name]] + 1) for name in behind]
    return workload, Plan(tuple(sorted([*steps, *started], key=lambda step: step.at)))


def row(stepped: Stepped, latency: float, bandwidth: float, path: str, edge: float, rounds: int) -> dict[str, float]:
    """One link: the plan, what the simulator says of it, and what the clock says."""
    LINK.configure(0.0, FREE)
    with noted() as graphs:
        stepped.compile(link=f"custom:{latency},{bandwidth}", profile=path)
        stepped()
    free = stepped.medians(rounds)["step"]
    workload, plan = joined(graphs, path, edge)
    verify(workload, plan)
    timeline: Timeline = simulate(workload, plan)
    computing = sum(span.seconds for span in timeline.compute)
    LINK.configure(latency, bandwidth)
    measured = stepped.medians(rounds)
    simulated = timeline.makespan + free - computing
    prefetched = sum(unit.arrives is not None for unit in graphs["forward"][0].units)
    return {
        **{"latency": latency, "bandwidth": bandwidth, "prefetched": prefetched},
        **{"computing": computing, "edge": edge, "outside": free - computing},
        **{"step": measured["step"], "simulated step": simulated, "bound": lower_bound(workload) - computing},
        **{"exposed": measured["exposed"], "simulated exposed": timeline.exposed},
        "step differs": simulated / measured["step"] - 1,
        "exposed differs": (timeline.exposed - measured["exposed"]) / measured["step"],
    }


def main() -> None:
    """Print a table and write `bench/results/planned_step.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    arguments.add_argument("--units", nargs="+", choices=UNITS, default=list(UNITS))
    arguments.add_argument("--model", default="gpt")
    arguments.add_argument("--clip", action="store_true", help="clip gradients by the norm of all")
    args = arguments.parse_args()
    count_one_thread()
    report: dict[str, Any] = {"clip": args.clip}
    for name in args.units:
        stepped = Stepped(args.model, UNITS[name], args.clip)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            edge = profiled(stepped, file.name)
            LINK.reset()
            free = stepped()["step"]
            sent = LINK.summary()
            for ratio in args.ratios:
                found = row(stepped, *link_for(ratio, free, sent), file.name, edge, args.rounds)
                report.setdefault(name, []).append({"ratio": ratio, **found})
                show(name, ratio, found)
    if not args.dry:
        write("planned_step", report)


def show(name: str, ratio: float, found: dict[str, float]) -> None:
    times = ("step", "simulated step", "exposed", "simulated exposed", "bound", "computing", "edge", "outside")
    print(
        f"{name} {ratio}  " + "  ".join(f"{each} {found[each] * 1e3:.1f}" for each in times),
        f" prefetched {found['prefetched']:.0f}  step {found['step differs']:+.1%}",
        f" exposed {found['exposed differs']:+.1%} of the step",
        flush=True,
    )
