"""Plans by cost on the emulated link: what is exposed, beside the fixed rule and FSDP2; the simulator beside the clock.

For each ratio of communication to computing the graph is compiled to record a profile of its tasks, in one process that
plays rank 0 of 8, and it is compiled again by a plan for this profile and this link. The systems are then
measured alternately.

    exposed      ms of a forward and backward in which a wait sleeps
    formula      first gather + last reduce: what is unavoidable if all else hides
    bound        a lower bound of every plan's exposed time, from which task reads which unit (passes/plan/bound.py)
    simulated    the plan's step and exposed time by `simulate` (passes/plan/plan.py)
    outside      what a step takes beside its tasks where the link takes no time: guards, autograd, calls; part of the
                 calibration, and added to the simulated step
    peak         bytes of a forward and backward: planned, and counted by the allocator's records
"""

import argparse
import json
import logging
import pathlib
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bench import link, systems
from bench.link import FREE, LINK
from bench.memory import curve, resident
from bench.models import WORKLOADS
from bench.parts import link_for
from bench.report import machine, today, versions
from fsdp_compile import fully_shard
from fsdp_compile.passes.plan.bound import lower_bound
from fsdp_compile.passes.plan.plan import Plan, Timeline, simulate
from fsdp_compile.passes.plan.workload import Workload
from fsdp_compile.passes.post_grad.plan_pass import TaskProfile, plan_log

WORLD = 8
PLANNED: dict[str, Any] = {"ours, planned": "auto", "ours, planned, layers": {nn.Linear}}  # units by these policies
PEERS = ("fsdp2", "fsdp2_compile", "fsdp2:layers")
Graphs = dict[str, tuple[Workload, Plan]]


class Trained:
    """A system and a model, forward and backward."""

    def __init__(self, model: nn.Module, forward: Any, after_backward: Any = lambda: None) -> None:
        self.model, self.forward, self.after_backward = model, forward, after_backward

    def __call__(self) -> None:
        self.forward(*batch()).backward()
        self.after_backward()


def batch() -> list[torch.Tensor]:
    """The same tokens each time."""
    return WORKLOADS["gpt"]().batch(0, 0)


def peer(name: str) -> Trained:
    """One of bench/systems."""
    workload = WORKLOADS["gpt"]()
    torch.manual_seed(0)
    model = workload.build()
    names = {module: name for name, module in model.named_modules()}
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD,))
    blocks = workload.blocks(model)
    block_names, option = [names[each] for each in blocks], name.partition(":")[2]
    setup = systems.Setup(torch.device("cpu"), mesh, False, True, workload.ends, block_names, option)
    prepared = systems.prepare(name, model, blocks, setup)
    return Trained(prepared.model, prepared.forward, prepared.after_backward)


def ours(policy: Any = "auto", **options: Any) -> Trained:
    """Ours, whole graph; units are kept as the plan wants."""
    torch.manual_seed(0)
    model = fully_shard(WORKLOADS["gpt"]().build(), reshard_after_forward="auto", auto_wrap_policy=policy)
    return Trained(model, torch.compile(model, fullgraph=True, backend="fsdp_compile", options=options))


def planned(wire: str, policy: Any) -> tuple[Trained, Graphs, float]:
    """Compiled for a link by times that were measured; the plans it follows; seconds of a step on a free link."""
    LINK.configure(0.0, FREE)
    profiled = ours(policy, link=wire, record_profile=True)
    profiled()
    with TaskProfile() as profile:
        for _ in range(5):
            profiled()
    with tempfile.NamedTemporaryFile(suffix=".json") as file, noted() as graphs:
        profile.save(file.name)
        system = ours(policy, link=wire, profile=file.name)
        system()
    return system, graphs, statistics.median(timed(system)["step"] for _ in range(5))


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


def timed(system: Trained) -> dict[str, float]:
    """Seconds of a forward and backward, and how much of it waits slept."""
    LINK.reset()
    begin = LINK.clock()
    system()
    seconds = LINK.clock() - begin
    system.model.zero_grad()
    return {"step": seconds, "exposed": LINK.summary()["exposed"]}


def rounds(running: dict[str, Trained], number: int) -> dict[str, dict[str, float]]:
    """Medians of interleaved rounds."""
    for system in running.values():
        timed(system)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    for _ in range(number):
        for name, system in running.items():
            found[name].append(timed(system))
    return {
        name: {key: statistics.median(each[key] for each in steps) for key in steps[0]} for name, steps in found.items()
    }


def of_plan(graphs: Graphs, free: float) -> dict[str, float]:
    """What the planner says of forward and backward."""
    timelines = {name: simulate(*graph) for name, graph in graphs.items()}
    computing = sum(task.seconds for workload, _ in graphs.values() for task in workload.tasks)
    forward, backward = timelines["forward"], timelines["backward"]
    return {
        "computing": computing,
        "outside": free - computing,
        "simulated step": sum(timeline.makespan for timeline in timelines.values()) + free - computing,
        "simulated exposed": sum(_slept(timeline) for timeline in timelines.values()),
        "bound": sum(lower_bound(workload) for workload, _ in graphs.values()) - computing,
        "formula": forward.link[0].seconds + backward.link[-1].seconds,
        "peak": max(timeline.peak for timeline in timelines.values()),
    }


def _slept(timeline: Timeline) -> float:
    return timeline.makespan - sum(span.seconds for span in timeline.compute)


def peak(system: Any) -> int:
    """Bytes that live at most: parameters, and what a forward and backward allocates."""
    above = max((total for _, total in curve(system, torch.device("cpu"))), default=0)
    system.model.zero_grad()
    return above + resident([*system.model.parameters(), *system.model.buffers()])


def main() -> None:
    """Print a table and write `bench/results/planned.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # of one forward: each system and ratio is one
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    link.start(WORLD, 0.0, FREE)
    others = {"ours, fixed rule": ours(), **{name: peer(name) for name in PEERS}}
    free = rounds(others, args.rounds)
    timed(others["ours, fixed rule"])
    sent = LINK.summary()
    report: dict[str, Any] = {"date": today(), "machine": machine(), "versions": versions(), "settings": []}
    for ratio in args.ratios:
        latency, bandwidth = link_for(ratio, free["ours, fixed rule"]["step"], sent)
        wire = f"custom:{latency},{bandwidth}"
        made = {name: planned(wire, policy) for name, policy in PLANNED.items()}
        LINK.configure(latency, bandwidth)
        found = rounds({**{name: system for name, (system, _, _) in made.items()}, **others}, args.rounds)
        plans = {
            name: {**of_plan(graphs, alone), "counted peak": peak(system)}
            for name, (system, graphs, alone) in made.items()
        }
        report["settings"].append(
            {"ratio": ratio, "latency": latency, "bandwidth": bandwidth, "plans": plans, "systems": found}
        )
        show(ratio, found, plans)
    path = pathlib.Path(__file__).parent / "results" / "planned.json"
    path.write_text(json.dumps(report, indent=1) + "\n")


def show(ratio: float, found: dict[str, dict[str, float]], plans: dict[str, dict[str, float]]) -> None:
    """One ratio's part of the table, in milliseconds."""
    print(f"\ncommunication / computing {ratio}")
    for name, row in found.items():
        share = row["exposed"] / row["step"]
        print(
            f"  {name:25} step {row['step'] * 1e3:8.1f}  exposed {row['exposed'] * 1e3:7.1f}  {share:6.1%}", flush=True
        )
    times = ("computing", "outside", "simulated step", "simulated exposed", "bound", "formula")
    for name, said in plans.items():
        print(f"  {name}: " + "  ".join(f"{each} {said[each] * 1e3:.1f}" for each in times))
        print(
            f"    peak {said['peak'] / 2**20:.1f} MiB planned, {said['counted peak'] / 2**20:.1f} counted", flush=True
        )


if __name__ == "__main__":
    main()
