"""Plans for steps shaped like Llama 3's, on the package's simulator: ours, one unit ahead, FSDP2's rule.

Ours is planned twice: within the memory that the better rule needs, and within the device's. "unavoidable" is the
lower bound of a step within that memory, less what it computes; the rules' copies in and out are left out.
Eight ranks have no room for the states of the larger models: those rows have the first of the two alone.
"""

import time
from typing import Any

from bench.llama import MODELS, workload
from bench.report import parser, write
from bench.rules import fsdp2, one_ahead
from fsdp_compile.passes.cost.hardware import device, link
from fsdp_compile.passes.plan.plan import simulate, verify
from fsdp_compile.passes.plan.schedule import PlannedStep, search_plan
from fsdp_compile.passes.plan.workload import Workload

WORLDS = {
    "8B": {"h100-nvlink": 8, "h100-ib400": 64, "h100-ib400-single": 64},
    "70B": {"h100-nvlink": 8, "h100-ib400": 128, "h100-ib400-single": 128},
    "405B": {"h100-nvlink": 8, "h100-ib400": 512, "h100-ib400-single": 512},
}
BATCHES = (1, 2, 4)
NOTABLE = 1e-6  # of a step: less than this between rule and bound is nothing to avoid


def rows() -> list[dict[str, Any]]:
    """A row for each model, link and batch, printed as soon as it is known."""
    results: list[dict[str, Any]] = []
    for model, worlds in WORLDS.items():
        for name, world in worlds.items():
            for batch in BATCHES:
                step = workload(MODELS[model], batch, world, link(name), device("h100"))
                results.append({"model": model, "link": name, "world": world, "batch": batch, **_compare(step)})
                print(_line(results[-1]), flush=True)
    return results


def _compare(step: Workload) -> dict[str, Any]:
    computing = sum(task.seconds for task in step.tasks)
    rules = {"one_ahead": simulate(step, one_ahead(step)), "fsdp2": simulate(step, fsdp2(step))}
    better = min(rules.values(), key=lambda timeline: (timeline.makespan, timeline.peak))
    start = time.process_time()
    ours = search_plan(step, better.peak)
    planning = time.process_time() - start
    verify(step, ours.plan, better.peak)
    avoidable = better.makespan - ours.bound
    figures = {name: {"seconds": e.makespan, "exposed": e.exposed, "peak": e.peak} for name, e in rules.items()}
    row: dict[str, Any] = {
        "computing": computing,
        **figures,
        "ours": _figures(ours, computing),
        "planning": planning,
        "never_slower": ours.seconds <= better.makespan * (1 + 1e-9),
        "avoidable": avoidable,
        "avoided": (better.makespan - ours.seconds) / avoidable if avoidable > NOTABLE * better.makespan else None,
    }
    memory = device("h100").memory
    if memory is not None and memory > better.peak:
        row["ours_on_device"] = _figures(search_plan(step, memory), computing)
    return row


def _figures(planned: PlannedStep, computing: float) -> dict[str, Any]:
    spent = {"seconds": planned.seconds, "exposed": planned.seconds - computing}
    kept = {"peak": planned.peak, "keep_unsharded": len(planned.keep_unsharded)}
    return {**spent, **kept, "gap": planned.seconds / planned.bound - 1, "unavoidable": planned.bound - computing}


HEAD = (
    f"{'model':5} {'link':17} {'ranks':>5} {'batch':>5} {'computing':>9} | {'one ahead':>9} {'exposed':>8} | "
    f"{'fsdp2':>8} {'exposed':>8} | {'ours':>8} {'exposed':>8} {'unavoid.':>8} {'gap':>6} {'avoided':>8} | "
    f"{'in 80 GB':>8} {'exposed':>8} {'gap':>6}"
)


def _line(row) -> str:
    def part(figures) -> str:
        return f"{figures['seconds'] * 1e3:8.0f} {figures['exposed'] * 1e3:8.1f}"

    ours, more = row["ours"], row.get("ours_on_device")
    avoided = "-" if row["avoided"] is None else f"{row['avoided']:.0%}"
    return (
        f"{row['model']:5} {row['link']:17} {row['world']:5} {row['batch']:5} {row['computing'] * 1e3:9.0f} |  "
        f"{part(row['one_ahead'])} | {part(row['fsdp2'])} | {part(ours)} {ours['unavoidable'] * 1e3:8.1f} "
        f"{ours['gap']:6.2%} {avoided:>8} | " + (f"{part(more)} {more['gap']:6.2%}" if more else "")
    )


def main() -> None:
    """Print the table, in milliseconds, and write it."""
    args = parser(__doc__).parse_args()
    print(HEAD)
    results = rows()
    if not args.dry:
        write("planner", {"rows": results})
    slower = [row for row in results if not row["never_slower"]]
    planning = max(row["planning"] for row in results)
    avoided = min(row["avoided"] for row in results if row["avoided"] is not None)
    print(f"{len(results)} steps, {len(slower)} slower than a rule; planning took {planning:.2f} s of CPU time at most")
    print(f"of what the better rule exposes and a plan may avoid, ours avoids {avoided:.0%} or more")
