"""What plans expose that have learned from recorded steps, beside plans for the right prices and the rule.

Steps of two models on 8 ranks are planned by the CPU's prices and a link on which communication takes 0.6 or 0.9 of
the time of computing. Then each task takes 0.3 to 3 times its seconds, drawn at random, and the link 0.25 or 4 times.
The step is simulated by these prices, what generated code would note is recorded and planned again, three times.

    exposed     ms, medians of the draws: of the first plan, of the learned one, of the plan for the right prices, rule
    over        of the draws, by how much of the step the learned plan exposes more than 1.05 times what the plan for
                the right prices exposes, at most
    of rule     of the draws, by how much of the step any plan after the first one takes longer than the rule, at most
    link        of the draws, by what factor the link is priced wrong after learning, at most
    planning    seconds of CPU time of one plan

    python -m bench learning [--models gpt llama] [--ratios 0.6 0.9] [--draws 20]
"""

import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from typing import Any, NamedTuple

from bench.models import WORKLOADS
from bench.report import parser, write
from bench.wrong_prices import at_other_prices, on_link, step_of
from fsdp_compile.learning.prices import Called, Mark, Record, records_of
from fsdp_compile.learning.replan import Graph, replanned
from fsdp_compile.passes.plan.plan import Machine, Plan, held_units, simulate
from fsdp_compile.passes.plan.safe import safe_plan
from fsdp_compile.passes.plan.schedule import alternating, search_plan
from fsdp_compile.passes.plan.workload import Workload

MOST = 3.0  # times as long or as short as priced a task may take
ROUNDS = 3  # steps that are recorded


class Learned(NamedTuple):
    """Seconds by the right prices."""

    first: float
    after: tuple[float, ...]  # of the plan after each record
    best: float
    rule: float
    computing: float
    link: float  # how many times as long as is right the last record says that the link takes

    @property
    def over(self) -> float:
        """By how much of the step the learned plan exposes more than 1.05 times what the best one does."""
        exposed, least = self.after[-1] - self.computing, self.best - self.computing
        return (exposed - 1.05 * least) / self.best

    @property
    def beside_rule(self) -> float:
        """By how much of the step the worst plan after the first one is longer than the rule."""
        return max(self.after) / self.rule - 1


def marks_of(real: Workload, plan: Plan, products: Sequence[bool], noise: float = 0.0) -> list[Mark]:
    """What generated code would note where it takes the seconds of `real`; each mark is up to `noise` s late."""
    machine, marks, done, rng = Machine(real, held_units(real, plan)), list[Mark](), 0, random.Random(0)

    def late() -> float:
        return noise * rng.random()

    def compute(until: int) -> None:
        nonlocal done
        while done < until:
            if products[done]:
                marks.append(Mark("product", machine.now + late(), machine.now + late()))
            machine.task(done)
            done += 1

    for step in plan.steps:
        compute(step.at)
        begin = machine.now
        machine.step(step)
        if step.kind != "free":
            count = 1 if step.kind in ("gather", "reduce") and real.can_coalesce else len(step.units)
            end = machine.now + late()
            marks += [Mark(step.kind, begin, end), *[Mark(step.kind, end, end)] * (count - 1)]
    compute(len(real.tasks))
    return [*marks, Mark("end", machine.now, machine.now)]


def recorded(step: Workload, plan: Plan, products: Sequence[bool], marks: Sequence[Mark]) -> Record:
    """What is read from the marks of a step that is one graph."""
    return records_of({"step": Called(step, plan, products, marks)})["step"]


def wrong_tasks(step: Workload, rng: random.Random, most: float = MOST) -> Workload:
    """`step` whose tasks each take up to `most` times as long or as short."""
    factors = [exp(rng.uniform(-log(most), log(most))) for _ in step.tasks]
    tasks = (replace(task, seconds=task.seconds * factor) for task, factor in zip(step.tasks, factors, strict=True))
    return replace(step, tasks=tuple(tasks))


def learn(
    step: Workload, real: Workload, products: Sequence[bool], rounds: int = ROUNDS, noise: float = 0.0
) -> Learned:
    """Plan `step` by its prices, then learn from what it takes by those of `real`."""
    plan = safe_plan(step).plan
    first, after, estimated = simulate(real, plan).makespan, list[float](), step
    for _ in range(rounds):
        record = recorded(estimated, plan, products, marks_of(real, plan, products, noise))
        found = replanned({"step": Graph(estimated, plan)}, {"step": record})
        plan = found.plans["step"] if found.pays else plan
        after.append(simulate(real, plan).makespan)
    best, rule = (simulate(real, each).makespan for each in (search_plan(real).plan, alternating(real)))
    unit = next(unit for unit in step.units if unit.gather)
    ratio = record.link / (next(each.gather for each in real.units if each.name == unit.name) / unit.gather)
    return Learned(first, tuple(after), best, rule, sum(task.seconds for task in real.tasks), ratio)


def draws(step: Workload, count: int) -> list[Learned]:
    """What is learned where prices are wrong by random factors."""
    found = []
    for seed in range(count):
        rng = random.Random(seed)
        real = at_other_prices(wrong_tasks(step, rng), 1.0, rng.choice([0.25, 4.0]))
        found.append(learn(step, real, [re.search("mm|attention", task.name) is not None for task in step.tasks]))
    return found


def main() -> None:
    """Print a table and write `bench/results/learning.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", choices=WORKLOADS, default=["gpt", "llama"])
    arguments.add_argument("--ratios", nargs="+", type=float, default=[0.6, 0.9])
    arguments.add_argument("--draws", type=int, default=20)
    args = arguments.parse_args()
    print(
        f"{'':14} {'exposed: first, learned, right, rule':>40} {'over':>8} {'of rule':>8} {'link':>6} {'planning':>9}"
    )
    rows = []
    for model in args.models:
        step = step_of(model)
        for ratio in args.ratios:
            begin = time.process_time()
            found = draws(replace(on_link(step, ratio), units=tuple(
                replace(unit, keep_unsharded=False) for unit in on_link(step, ratio).units)), args.draws)  # fmt: skip
            planning = (time.process_time() - begin) / args.draws / (ROUNDS + 1)
            exposed = [
                statistics.median(seconds - each.computing for seconds, each in zip(those, found, strict=True)) * 1e3
                for those in (
                    [each.first for each in found],
                    [each.after[-1] for each in found],
                    [each.best for each in found],
                    [each.rule for each in found],
                )
            ]
            made: dict[str, Any] = {
                "model": model, "ratio": ratio, "draws": args.draws, "exposed": exposed, "planning": planning,
                "over": max(each.over for each in found), "beside rule": max(each.beside_rule for each in found),
                "link": max(max(each.link, 1 / each.link) for each in found),
            }  # fmt: skip
            rows.append(made)
            print(f"{model:9} {ratio:4}", *(f"{each:9.1f}" for each in exposed), f"{made['over']:+8.2%}",
                  f"{made['beside rule']:+8.2%} {made['link']:6.2f} {planning:9.2f}", flush=True)  # fmt: skip
    if not args.dry:
        write("learning", {"rows": rows})
