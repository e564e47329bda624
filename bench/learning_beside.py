"""What a plan that learns costs beside recording: steps while a copy of the process compiles, and the change of plans.

One or two processes train on the emulated link, which takes no time, with a thread each; all of them compile another
plan at once. Seconds are those of a clock on the wall: nothing else should run on the machine.

    step        ms of forward and backward, median, and while the other plan is compiled
    meanwhile   the second beside the first
    fork        ms that the step takes longer in which the process is copied
    load        ms that the step takes longer in which the compiled code is read from the caches
    switch      ms that the first steps by the new plan, two of them, take longer than the median of those that follow
    chance      ms that two of those that follow take longer than their median, at the median
    compiling   seconds that the copy takes

    python -m bench learning_beside [--model gpt] [--ranks 1 2] [--steps 20]
"""

import multiprocessing
import secrets
import statistics
import time
from typing import Any

import torch

from bench.first_plan import SPEED
from bench.link import FREE, LINK
from bench.models import WORKLOADS
from bench.planned_step import count_one_thread
from bench.report import parser, write
from fsdp_compile import fully_shard
from fsdp_compile.learning import graphs, install
from fsdp_compile.learning.child import Child
from fsdp_compile.passes.plan.safe import by_block

FIGURES = ("step", "meanwhile", "fork", "load", "switch", "chance", "compiling")


def rank(model: str, steps: int, barrier: Any, found: Any) -> None:
    """Train, compile another plan beside it, and follow that plan; leave the figures in `found`."""
    count_one_thread()
    LINK.now = time.perf_counter
    LINK.configure(0.0, FREE)
    graphs.schedule.first = 1 << 30  # what is learned is chosen here
    torch.manual_seed(0)
    batch = WORKLOADS[model]().batch(0, 0)
    whole = fully_shard(WORKLOADS[model]().build(), forward_prefetch=True)
    options = {"link": "custom:2e-5,3e8", "device": f"cpu:{SPEED:g}", "learn": True}
    run: Any = torch.compile(whole, fullgraph=True, backend="fsdp_compile", options=options)

    def step() -> float:
        LINK.reset()
        begin = time.perf_counter()
        run(*batch).backward()
        seconds = time.perf_counter() - begin
        whole.zero_grad()
        return seconds

    step()
    (learning,) = install.learned.values()
    (graph,) = learning.graphs
    noted = graph.noted("")
    assert noted is not None
    plans = {direction: by_block(each.workload) for direction, each in noted.items()}
    plan = graphs.plan_text(plans).replace("at", f"# {secrets.token_hex(8)}\nat", 1)  # no cache has it
    barrier.wait()
    before = statistics.median(step() for _ in range(steps))
    began = time.perf_counter()
    child = Child(lambda: str(graph.compile(plan)))
    forked = time.perf_counter() - began + step() - before
    during = []
    while child.status == "compiling":
        during.append(step())
    compiling = time.perf_counter() - began
    barrier.wait()
    begin = time.perf_counter()
    graph.compile(plan)
    loaded = time.perf_counter() - begin
    barrier.wait()  # as ranks meet where all have the code
    step()
    learning.in_force = plan
    first, later = [step() for _ in range(2)], [step() for _ in range(steps)]
    after = statistics.median(later)
    chance = statistics.median(map(max, later, later[1:])) - after
    found.put(dict(zip(FIGURES, (before, statistics.median(during), forked, loaded, max(first) - after, chance,
                                 compiling), strict=True)))  # fmt: skip


def main() -> None:
    """Print a table and write `bench/results/learning_beside.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", choices=WORKLOADS, default="gpt")
    arguments.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    arguments.add_argument("--steps", type=int, default=20)
    args = arguments.parse_args()
    spawned, rows = multiprocessing.get_context("spawn"), []
    for ranks in args.ranks:
        barrier, found = spawned.Barrier(ranks), spawned.Queue()
        those = [spawned.Process(target=rank, args=(args.model, args.steps, barrier, found)) for _ in range(ranks)]
        for each in those:
            each.start()
        figures = [found.get() for _ in those]
        for each in those:
            each.join()
        row = {name: max(each[name] for each in figures) for name in FIGURES}
        row["times"] = max(each["meanwhile"] / each["step"] for each in figures)
        rows.append({"model": args.model, "ranks": ranks, **row})
        ms = {name: f"{seconds * 1e3:.1f} ms" for name, seconds in row.items()}
        print(f"{ranks} ranks: step {ms['step']}, meanwhile {ms['meanwhile']} ({row['times']:.2f} times), fork +"
              f"{ms['fork']}, load +{ms['load']}, switch +{ms['switch']} (by chance +{ms['chance']}), compiling "
              f"{row['compiling']:.1f} s", flush=True)  # fmt: skip
    if not args.dry:
        write("learning_beside", {"rows": rows})
