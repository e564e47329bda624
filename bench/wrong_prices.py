"""Plans beside the rule where prices are wrong: what each exposes if computing and the link take other seconds.

Steps of three models on 8 ranks are planned by the CPU's prices and a link on which communication takes 0.3, 0.6 or 0.9
of the time of computing. Then each task takes 0.5, 0.7, 1.4 or 2 times its seconds, each collective likewise (16
combinations), and the plan and the rule without a link are simulated.

    exposed      ms, by the right prices: of the rule, of the plan that is the shortest by the prices, of the safe plan
    bound        ms, by the right prices
    worst        of the 16 combinations, by how much of the step the plan exposes more than the rule; shortest, safe
    of bound     of the 16 combinations, by how much of the step the safe plan exposes more than 1.15 times the bound;
                 in brackets, the rule
    MB           gathered and packed buffers that are alive at once, rule and safe plan
    planning     ms of CPU time, shortest and safe
"""

import itertools
import time
from dataclasses import replace
from typing import Any

from bench.models import WORKLOADS
from bench.report import parser, write
from fsdp_compile import explain_plan
from fsdp_compile.passes.plan.plan import Plan, simulate, verify
from fsdp_compile.passes.plan.safe import safe_plan
from fsdp_compile.passes.plan.schedule import alternating, search_plan
from fsdp_compile.passes.plan.workload import Workload, lower_bound

MODELS = ("gpt", "llama", "ten")
RATIOS = (0.3, 0.6, 0.9)
FACTORS = (0.5, 0.7, 1.4, 2.0)
WORLD, LATENCY = 8, 20e-6


def step_of(model: str) -> Workload:
    """The step of a model on a link of no matter what speed."""
    workload = WORKLOADS[model]()
    return explain_plan(workload.build, workload.batch(0, 0), link=f"custom:{LATENCY},1e9", world_size=WORLD).workload


def on_link(step: Workload, ratio: float) -> Workload:
    """`step` on a link on which the rule's collectives take `ratio` times as long as computing."""
    calls = len(alternating(step).of("gather", "reduce"))
    computing = sum(task.seconds for task in step.tasks)
    latency = min(LATENCY, ratio * computing / calls / 4)
    sent = sum(span.seconds - step.latency for span in simulate(step, alternating(step)).link)
    factor = (ratio * computing - calls * latency) / sent
    units = (replace(unit, gather=unit.gather * factor, reduce=unit.reduce * factor) for unit in step.units)
    return replace(step, units=tuple(units), latency=latency)


def at_other_prices(step: Workload, computing: float, link: float) -> Workload:
    """`step` whose tasks and collectives take so many times as long."""
    tasks = tuple(replace(task, seconds=task.seconds * computing) for task in step.tasks)
    units = (replace(unit, gather=unit.gather * link, reduce=unit.reduce * link) for unit in step.units)
    return replace(step, tasks=tasks, units=tuple(units), latency=step.latency * link)


def buffers(step: Workload, plan: Plan) -> int:
    """Bytes of gathered and packed buffers at most."""
    empty = replace(step, tasks=tuple(replace(task, memory=0) for task in step.tasks))
    return simulate(empty, plan).peak


def row(step: Workload) -> dict[str, Any]:
    """What the plans of a step expose."""
    begin = time.process_time()
    shortest = search_plan(step)
    middle = time.process_time()
    safe = safe_plan(step, found=shortest)
    end = time.process_time()
    verify(step, safe.plan)
    plans = {"rule": alternating(step), "shortest": shortest.plan, "safe": safe.plan}
    found: dict[str, Any] = {name: simulate(step, plan).exposed for name, plan in plans.items()}
    found |= {"bound": safe.bound - sum(task.seconds for task in step.tasks)}
    found |= {"planning": middle - begin, "planning safe": end - begin}
    found |= {f"{name} buffers": buffers(step, plan) for name, plan in plans.items()}
    worse: dict[str, list[float]] = {"shortest": [], "safe": [], "safe of bound": [], "rule of bound": []}
    for factors in itertools.product(FACTORS, FACTORS):
        real = at_other_prices(step, *factors)
        seen = {name: simulate(real, plan) for name, plan in plans.items()}
        least = 1.15 * (lower_bound(real) - sum(task.seconds for task in real.tasks))
        whole = seen["rule"].makespan
        for name in ("shortest", "safe"):
            worse[name].append((seen[name].exposed - seen["rule"].exposed) / whole)
        for name in ("safe", "rule"):
            worse[f"{name} of bound"].append((seen[name].exposed - least) / whole)
    return found | {f"worst {name}": max(values) for name, values in worse.items()}


def main() -> None:
    """Print a table and write `bench/results/wrong_prices.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(MODELS))
    args = arguments.parse_args()
    print(f"{'':22} {'exposed: rule, shortest, safe':>30} {'bound':>7} {'worst':>15} {'of bound':>16} {'MB':>15} "
          f"{'planning':>12}")  # fmt: skip
    rows = []
    for model in args.models:
        step = step_of(model)
        for keeps, ratio in itertools.product((False, True), RATIOS):
            units = step.units if keeps else (replace(unit, keep_unsharded=False) for unit in step.units)
            made = {"model": model, "ratio": ratio, "auto": keeps} | row(
                on_link(replace(step, units=tuple(units)), ratio)
            )
            rows.append(made)
            print(f"{model:10} {'auto' if keeps else '':5} {ratio:5}",
                  *(f"{made[name] * 1e3:9.1f}" for name in ("rule", "shortest", "safe")), f"{made['bound'] * 1e3:8.1f}",
                  *(f"{made[f'worst {name}']:+7.1%}" for name in ("shortest", "safe", "safe of bound")),
                  f"({made['worst rule of bound']:+.1%})",
                  *(f"{made[f'{name} buffers'] / 1e6:7.1f}" for name in ("rule", "safe")),
                  *(f"{made[name] * 1e3:6.0f}" for name in ("planning", "planning safe")), flush=True)  # fmt: skip
    if not args.dry:
        write("wrong_prices", {"rows": rows})
