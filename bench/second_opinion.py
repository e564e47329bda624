"""A second opinion on simulated plans: SimGrid runs them, message by message.

Steps of three models are planned for four clusters, on which collectives take 0.6 of the time of computing. Our
simulator says what a plan takes; so does SimGrid (simgrid_actors.py), where each rank computes and each step of each
ring is a flow. Both have the same seconds of tasks, and the same latencies and bandwidths.

    python -m bench second_opinion [--python /usr/bin/python3]      with Debian's python3-simgrid

    step, exposed    ms, ours and SimGrid's, and by how much of the step they differ
"""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.models import WORKLOADS
from bench.report import parser, write
from fsdp_compile import explain_plan
from fsdp_compile.passes.cost.hardware import Link
from fsdp_compile.passes.cost.roofline import launch_seconds, transfer_seconds
from fsdp_compile.passes.plan.plan import Plan, simulate
from fsdp_compile.passes.plan.schedule import search_plan
from fsdp_compile.passes.plan.workload import Workload

MODELS = ("gpt", "llama", "ten")
RATIO = 0.6
NEAR = Link("near", 4e-6, 3.6e11, "of the order of NVLink", hop=1e-6)
FAR = Link("far", 2e-5, 4.5e10, "of the order of an adapter of 400 Gbit/s", hop=4e-6)
CLUSTERS = {  # the number of ranks and their link
    "8 ranks, one link": (8, Link("ethernet", 2e-5, 1e9, "of the order of Ethernet")),
    "8 ranks of a node": (8, NEAR),
    "2 nodes of 8": (16, replace(FAR, inside=NEAR, ranks_per_node=8)),
    "4 nodes of 4": (16, replace(FAR, inside=NEAR, ranks_per_node=4)),
}


def step_of(model: str, ranks: int, link: Link) -> Workload:
    """The step of a model on a cluster, whose tasks take so long that collectives take `RATIO` of it."""
    workload = WORKLOADS[model]()
    step = explain_plan(workload.build, workload.batch(0, 0), link="cpu-gloo", world_size=ranks).workload
    units = tuple(
        replace(
            unit,
            gather=transfer_seconds(unit.gathered, ranks, link),
            reduce=transfer_seconds(unit.packed, ranks, link) if unit.reduce else 0.0,
        )
        for unit in step.units
    )
    sent = sum(2 * unit.gather + unit.reduce for unit in units) + 3 * len(units) * launch_seconds(ranks, link)
    longer = sent / RATIO / sum(task.seconds for task in step.tasks)
    tasks = tuple(replace(task, seconds=task.seconds * longer) for task in step.tasks)
    return replace(step, tasks=tasks, units=units, latency=launch_seconds(ranks, link))


def program(step: Workload, plan: Plan) -> list[tuple[str, str, float]]:
    """What a rank does: launches with their bytes, waits, and tasks with their seconds."""
    units = {unit.name: unit for unit in step.units}
    number: dict[tuple[bool, str], str] = {}
    done: list[tuple[str, str, float]] = []
    for at in range(len(step.tasks) + 1):
        for kind, names, _ in (each for each in plan.steps if each.at == at and each.kind != "free"):
            key = "reduce" in kind, names[0]
            if kind in ("gather", "reduce"):
                number[key] = f"{kind} {len(done)}"
                moved = sum(units[name].gathered if kind == "gather" else units[name].packed for name in names)
                done.append(("launch", number[key], float(moved)))
            else:
                done.append(("wait", number[key], 0.0))
        if at < len(step.tasks):
            done.append(("task", "", step.tasks[at].seconds))
    return done


def run(step: Workload, plan: Plan, ranks: int, link: Link, python: str) -> dict[str, float]:
    """Seconds of the step, and those in which computing waits, by SimGrid."""
    near = link.inside or link
    case = {
        "ranks": ranks,
        "ranks_per_node": link.ranks_per_node or 1,
        "latency": link.latency,
        "near_bandwidth": near.bandwidth,
        "near_hop": near.hop,
        "far_bandwidth": link.bandwidth,
        "far_hop": link.hop,
        "program": program(step, plan),
    }
    command = [python, str(Path(__file__).with_name("simgrid_actors.py"))]
    ran = subprocess.run(command, input=json.dumps(case), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{python}: expected a Python that has SimGrid, as Debian's with python3-simgrid; it said\n"
                         f"{ran.stderr[-2000:]}")  # fmt: skip
    result: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Print a row for each model and cluster, and write `bench/results/second_opinion.json`."""
    options = parser(__doc__)
    options.add_argument("--python", default="/usr/bin/python3", help="that has SimGrid")
    args = options.parse_args()
    rows: list[dict[str, Any]] = []
    print("| model | cluster | step, ours | SimGrid | off | exposed, ours | SimGrid | off, of the step |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for model in MODELS:
        for cluster, (ranks, link) in CLUSTERS.items():
            step = step_of(model, ranks, link)
            plan = search_plan(step).plan
            ours, theirs = simulate(step, plan), run(step, plan, ranks, link, args.python)
            rows.append({"model": model, "cluster": cluster, "step": ours.makespan, "exposed": ours.exposed,
                         "SimGrid's step": theirs["step"], "SimGrid's exposed": theirs["exposed"]})  # fmt: skip
            pairs = (ours.makespan, theirs["step"]), (ours.exposed, theirs["exposed"])
            shown = (
                f"{one * 1e3:,.2f} | {other * 1e3:,.2f} | {(other - one) / ours.makespan:+.1%}" for one, other in pairs
            )
            print(f"| {model} | {cluster} | {' | '.join(shown)} |", flush=True)
    if not args.dry:
        write("second_opinion", {"rows": rows})
