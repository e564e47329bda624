"""Activations and parameters under one budget: what is chosen, what it is predicted to take, what it takes.

For each model and each of six budgets, from nearly the least that any plan needs to what the fastest plan takes:

    chosen       what becomes of the blocks' activations (K kept, P all but products computed again, R all computed
                 again, O offloaded), and how many units stay unsharded
    step         ms of a forward and backward, predicted
    peak         MB, predicted for the step as a whole; planned for the two graphs; counted by the allocator's records
    alone        ms with one knob at its best setting within the budget: which units stay unsharded; how many blocks
                 are treated in one way, with all units resharded. "-": no setting is within the budget

`measured` compiles each choice for this CPU, where one process plays rank 0 of 8 on an emulated link. `predicted` asks
the figures of an H100 about larger models, which are traced and not run.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench import link
from bench.memory import peak
from bench.models import Inputs, Workload, gpt, llama
from bench.planned_step import noted
from bench.report import parser, write
from fsdp_compile import CompileConfig, fully_shard
from fsdp_compile.explain.ranks import process_group
from fsdp_compile.explain.sharded import choices_of
from fsdp_compile.passes._torch import FakeTensorMode
from fsdp_compile.passes.plan.memory import Options, choices, choose, workload_of
from fsdp_compile.passes.plan.plan import simulate, verify
from fsdp_compile.passes.plan.schedule import TOLERANCE, search_plan
from fsdp_compile.passes.plan.workload import smallest_budget

WORLD = 8
WIRE = "custom:2e-5,1e9"
PARTS = (0.03, 0.2, 0.4, 0.6, 0.8, 1.0)  # of what lies between the least and what the fastest plan takes
SMALL: dict[str, Callable[[], Workload]] = {
    "gpt": lambda: gpt(batch=8, context=64, layers=4, heads=4, dim=64),
    "llama": lambda: llama(4, 64, 8, vocab=64, dim=64, heads=4, kv_heads=2, hidden=128),
}
LARGE: dict[str, Callable[[], Workload]] = {
    "gpt": lambda: gpt(batch=4, context=2048, layers=16, heads=16, dim=2048, vocab=50304),
    "llama": lambda: llama(16, 4096, 1, vocab=128256),
}
LETTERS = {"keep": "K", "recompute": "R", "recompute but products": "P", "offload": "O"}


def accumulate(forward: Callable[..., torch.Tensor], batch: Inputs) -> None:
    forward(*batch).backward()


def options_for(workload: Workload, config: CompileConfig, dtype: torch.dtype = torch.float32) -> Options:
    """What may be chosen in a step of a model whose parameters are in `dtype`."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    model = fully_shard(workload.build(), reshard_after_forward="auto")
    torch.set_default_dtype(torch.float32)
    return choices_of(model, workload.batch(0, 0), {}, config)[0]


def budgets(step: Options) -> list[int]:
    """From nearly the least that any plan needs to what the fastest one takes."""
    least = min(smallest_budget(workload_of(step, policies)) for policies in choices(step))
    most = choose(step, None).planned.peak
    return [int(least + part * (most - least)) for part in PARTS]


def alone(step: Options, budget: int) -> dict[str, float | None]:
    """Seconds with one knob at its best setting within the budget."""
    closed = tuple(replace(unit, keep_unsharded=bool(unit.keep_unsharded)) for unit in step.plain.units)
    settings = {"unsharded": [step.plain]}
    for policies in choices(step):
        names = {policy.name for policy in policies if policy is not None}
        if len(names) == 1:
            settings.setdefault(names.pop(), []).append(replace(workload_of(step, policies), units=closed))
    found: dict[str, float | None] = {}
    for name, workloads in settings.items():
        within = (each for each in workloads if smallest_budget(each) <= budget)
        found[name] = min((search_plan(each, budget).seconds for each in within), default=None)
    return found


def row(step: Options, budget: int) -> dict[str, Any]:
    """What is chosen within a budget, and the knobs alone."""
    begin = time.process_time()
    chosen = choose(step, budget)
    planning = time.process_time() - begin
    verify(chosen.workload, chosen.planned.plan, budget)
    singles = alone(step, budget)
    best = min(seconds for seconds in singles.values() if seconds is not None) if any(singles.values()) else None
    assert best is None or chosen.seconds <= best * (1 + TOLERANCE), "a knob alone is faster"
    mix = "".join(LETTERS[policy.name if policy else "keep"] for policy in chosen.policies)
    plan, units = chosen.planned, len(chosen.workload.units)
    return {"budget": budget, "mix": mix, "unsharded": len(plan.keep_unsharded), "units": units, "peak": plan.peak,
            "step": chosen.seconds, "bound": plan.bound, "alone": singles, "planning": planning}  # fmt: skip


def measured(name: str) -> list[dict[str, Any]]:
    """Each choice compiled for this CPU, and its memory counted."""
    workload, rows = SMALL[name](), list[dict[str, Any]]()
    step = options_for(workload, CompileConfig(link=WIRE))
    for budget in budgets(step):
        found = row(step, budget)
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = fully_shard(workload.build(), reshard_after_forward="auto")
        options = {"link": WIRE, "budget": budget, "activations": "auto"}
        forward = torch.compile(model, fullgraph=True, backend="fsdp_compile", options=options)
        batch = workload.batch(0, 0)
        with noted() as graphs:
            forward(*batch).backward()
        model.zero_grad()
        found["planned peak"] = max(simulate(*graph).peak for graph in graphs.values())
        found["counted peak"] = peak(partial(accumulate, forward, batch), model)
        assert found["counted peak"] <= found["planned peak"] <= budget, "over the budget"
        rows.append(found)
        show(name, rows[-1:])
    return rows


def predicted(name: str) -> list[dict[str, Any]]:
    """Choices for larger models on H100s of 8 nodes, by the figures of the hardware file."""
    config = CompileConfig(link="h100-ib400", device="h100")
    with process_group(64), FakeTensorMode(allow_non_fake_inputs=True):
        step = options_for(LARGE[name](), config, torch.bfloat16)
    plain, stored = (replace(each, can_coalesce=True) for each in (step.plain, step.stored))
    step = replace(step, plain=plain, stored=stored)
    rows = []
    for budget in budgets(step):
        rows.append(row(step, budget))
        show(name, rows[-1:])
    return rows


def show(name: str, rows: list[dict[str, Any]]) -> None:
    for each in rows:
        singles = ", ".join(
            f"{knob} {'-' if seconds is None else f'{1e3 * seconds:.3f}'}" for knob, seconds in each["alone"].items()
        )
        peaks = "".join(f", {key} {each[key] / 1e6:.3f}" for key in ("planned peak", "counted peak") if key in each)
        print(
            f"{name:6} budget {each['budget'] / 1e6:10.3f} MB  {each['mix']} {each['unsharded']}/{each['units']}  "
            f"step {1e3 * each['step']:.3f} ms  peak {each['peak'] / 1e6:.3f}{peaks}  alone: {singles}  "
            f"planned in {each['planning']:.2f} s",
            flush=True,
        )


def main() -> None:
    """Print the tables and write `bench/results/memory_choice.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=["gpt", "llama"])
    arguments.add_argument("--parts", nargs="+", default=["predicted", "measured"])
    args = arguments.parse_args()
    torch._inductor.config.force_disable_caches = True  # on a hit nothing is planned
    report: dict[str, Any] = {}
    if "predicted" in args.parts:
        print("predicted, H100s of 8 nodes, 64 ranks")
        report["predicted"] = {name: predicted(name) for name in args.models}
    if "measured" in args.parts:
        print(f"measured, this CPU, 8 ranks, link {WIRE}")
        link.start(WORLD)
        report["measured"] = {name: measured(name) for name in args.models}
        dist.destroy_process_group()
    if not args.dry:
        write("memory_choice", report)
